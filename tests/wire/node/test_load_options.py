"""The one rule by which load options of two places are combined."""

from typing import Any

import msgspec
import pytest

from cortex.wire.node.load_options import PlacedOptions, SamplingDefaults
from cortex.wire.node.orders import LoadRequest


@pytest.mark.parametrize(
    ("given", "base", "merged"),
    [
        ({}, {"quant": "q4_k", "deterministic": True}, {"quant": "q4_k", "deterministic": True}),
        ({"quant": "q8_0"}, {"quant": "q4_k", "source": "org/a"}, {"quant": "q8_0", "source": "org/a"}),
        ({"quant": "", "source": ""}, {"quant": "q4_k", "source": "org/a"}, {"quant": "q4_k", "source": "org/a"}),
        ({"kv_dtype": "auto"}, {"kv_dtype": "fp8"}, {"kv_dtype": "auto"}),
        ({"tensor_parallel": 2}, {"tensor_parallel": 4}, {"tensor_parallel": 2}),
        ({"quant": "q8"}, {"devices": (1,)}, {"quant": "q8", "devices": (1,)}),
        (
            {"sampling": SamplingDefaults(temperature=0.0)},
            {"sampling": SamplingDefaults(temperature=0.7, top_k=20)},
            {"sampling": SamplingDefaults(temperature=0.0, top_k=20)},
        ),
    ],
)
def test_what_is_given_is_preferred_to_the_base(
    given: dict[str, Any], base: dict[str, Any], merged: dict[str, Any]
) -> None:
    assert PlacedOptions(**given).over(PlacedOptions(**base)) == PlacedOptions(**merged)


def test_fields_that_the_base_does_not_have_are_left_out() -> None:
    request = LoadRequest(model_id="a", max_bytes=5, context_tokens=512)
    assert request.over(PlacedOptions(quant="q4_k")) == PlacedOptions(quant="q4_k", context_tokens=512)


def test_request_on_the_wire_names_only_what_it_gives() -> None:
    request = LoadRequest(model_id="a", quant="q4_k", devices=(0, 1), tensor_parallel=2)
    assert msgspec.to_builtins(request) == {"model_id": "a", "quant": "q4_k", "devices": (0, 1), "tensor_parallel": 2}
    assert msgspec.json.decode(b'{"model_id": "a", "of_a_later_version": 1}', type=LoadRequest) == LoadRequest(
        model_id="a"
    )
