"""Which spellings of a quantisation mean the same one."""

import pytest

from cortex.quant_names import is_same_quant


@pytest.mark.parametrize(
    ("wanted", "requested", "stored", "same"),
    [
        ("q4", "Q4_K_M", "q4_k", True),
        ("Q4_K_M", "q4", "q4_k", True),
        ("Q4_K_M", "q4", None, True),
        ("Q4_K_M", "q4", "q4_0", False),
        ("Q4_0", "int4", "q4_k", False),
        ("int4", "q4", "q4_0", True),
        ("int4", "Q4_0", "q4_0", True),
        ("q4_k_m", "Q4_K_M", "q4_k", True),
        ("Q4_K_M", None, "q4_k", True),
        ("8bit", None, "q8_0", True),
        ("fp16", None, None, True),
        ("FP8", "fp8", "fp8", True),
        ("q6k", "q6_k", "q6_k", True),
        ("Q4_K_S", "Q4_K_M", "q4_k", False),
        ("q8", "Q4_K_M", "q4_k", False),
        ("q8", None, "q4_k", False),
        ("q8", None, None, False),
        ("bf16", "q4", "q4_k", False),
        ("fp8", "q8_0", "q8_0", False),
    ],
)
def test_spellings_of_one_quantisation_are_the_same(
    wanted: str, requested: str | None, stored: str | None, same: bool
) -> None:
    assert is_same_quant(wanted, requested, stored) is same
