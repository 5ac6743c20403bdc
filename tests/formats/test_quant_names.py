"""Which spellings of a quantisation mean the same one."""

import pytest

from cortex.formats.quant_names import at_load, bits, is_same_quant, label_in


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
        ("fp8", None, "q8_0", False),
        ("q8", None, "fp8", False),
        ("int4", "int4", None, True),
        ("8bit", "8bit", "q8_0", True),
        ("8bit", "int8", None, True),
    ],
)
def test_spellings_of_one_quantisation_are_the_same(
    wanted: str, requested: str | None, stored: str | None, same: bool
) -> None:
    assert is_same_quant(wanted, requested, stored) is same


SPELLINGS = {
    "q4_k": [
        "q4",
        "Q4",
        "4bit",
        "4-bits",
        "int4",
        "q4_k",
        "Q4_K",
        "q4k",
        "Q4_K_M",
        "q4_k_s",
        "UD-Q4_K_XL",
        "Q4_0",
        "q4-1",
    ],
    "q5_k": ["q5", "int5", "Q5_K_M", "q5_1"],
    "q6_k": ["q6", " Q6_K ", "q6k", "6bit"],
    "q8_0": ["q8", "int8", "8bit", "Q8_0", "q8-0", "Q8_K_XL"],
    "fp8": ["fp8", "FP8", "fp-8"],
    None: [
        "",
        "q",
        "q2_k",
        "q3",
        "q7",
        "fp4",
        "mxfp4",
        "nvfp4",
        "awq",
        "q44",
        "4x",
        "iq4_xs",
        "IQ4_NL",
        "tq1_0",
        "bf16",
    ],
}
"""What each spelling means for dense weights."""


@pytest.mark.parametrize(("name", "spelling"), [(name, each) for name, all_ in SPELLINGS.items() for each in all_])
def test_every_spelling_means_one_format_at_load(name: str | None, spelling: str) -> None:
    assert at_load(spelling) == name
    if spelling:
        assert is_same_quant(spelling, spelling, None), "it is what was asked for"
    if name is None:
        return
    for other, spellings in SPELLINGS.items():
        if other not in (name, None):
            assert not any(is_same_quant(spelling, each, None) for each in spellings), other
            assert not is_same_quant(spelling, None, other)


@pytest.mark.parametrize(
    ("file", "label", "num_bits"),
    [
        ("Qwen3-8B-Q4_K_M", "Q4_K_M", 4),
        ("UD-IQ2_XXS/model", "UD-IQ2_XXS", 2),
        ("m.bf16", "BF16", 16),
        ("gpt-oss-mxfp4", "MXFP4", 4),
        ("Q8_0/m-q4_0", "Q4_0", 4),
        ("SmolLM2-135M", None, 0),
    ],
)
def test_finds_the_label_in_the_name_of_a_file(file: str, label: str | None, num_bits: int) -> None:
    assert label_in(file) == label
    assert bits(label or "") == num_bits
