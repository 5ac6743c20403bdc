"""Frequencies and scale of every rope scaling against the reference library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cortex.neuron.kernels.attention.rotate import Rotation
from cortex.neuron.layers import configs
from cortex.neuron.layers.rope import RopeTables, inverse_frequencies, rope_table
from cortex.neuron.models.config import UnsupportedModel, read_rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3 of the small models": {**LLAMA3, "factor": 32.0},
    "llama3 trained on little": {**LLAMA3, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn with its own ramp": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with a given attention factor": {**YARN, "attention_factor": 0.7},
    "yarn with two scales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6},
    "yarn with exact bounds": {**YARN, "truncate": False},
    "yarn that does not stretch": {**YARN, "factor": 1.0},
    "yarn trained on little": {**YARN, "original_max_position_embeddings": 16},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + number / 32 for number in range(32)],
    "long_factor": [1.5 + number for number in range(32)],
    "original_max_position_embeddings": 4096,
}


def reference_config(scaling: dict[str, Any], theta: float, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": theta},
    )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_match_the_reference_library(name: str, theta: float, head_dim: int) -> None:
    config = reference_config(SCALINGS[name], theta, head_dim)
    frequencies, scale = inverse_frequencies(read_rope(config.to_dict(), head_dim))
    if name == "default":
        reference, reference_scale = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        reference, reference_scale = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(frequencies, reference, rtol=1e-5, atol=0)
    assert scale == pytest.approx(reference_scale)


@pytest.mark.parametrize("changes", [{}, {"factor": 0.5}, {"factor": 8.0}, {"attention_factor": 1.3}])
@pytest.mark.parametrize("num_positions", [4096, 4097])
def test_frequencies_of_longrope_depend_on_the_context(num_positions: int, changes: dict[str, float]) -> None:
    config = reference_config({**LONGROPE, **changes}, 10_000.0, 64)
    frequencies, scale = inverse_frequencies(read_rope(config.to_dict(), 64), num_positions)
    reference, reference_scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=num_positions)
    torch.testing.assert_close(frequencies, reference, rtol=1e-5, atol=0)
    assert scale == pytest.approx(reference_scale)


def test_layers_that_rotate_alike_share_a_table_and_others_rotate_by_nothing() -> None:
    tables = RopeTables(5, torch.device("cpu"))
    first, second = (read_rope({"rope_scaling": dict(YARN)}, 64) for _ in range(2))
    assert tables[first] is tables[second]
    assert tables[first] is not tables[read_rope({}, 64)]
    x = torch.randn(5, 3, 64)
    assert torch.equal(Rotation.at(torch.arange(5), tables[None], torch.float32)(x), x)
    assert len(tables.storages()) == 3


@pytest.mark.parametrize("name", SCALINGS)
def test_table_matches_cosines_and_sines_of_the_reference_library(name: str) -> None:
    config = reference_config(SCALINGS[name], 10_000.0, 32)
    table = rope_table(read_rope(config.to_dict(), 32), 300, torch.device("cpu"))
    cosine, sine = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
    torch.testing.assert_close(table, torch.cat((cosine[0, :, :16], sine[0, :, :16]), dim=1), rtol=1e-4, atol=1e-4)


def test_legacy_config_keys_give_the_same_frequencies() -> None:
    """`rope_theta` next to `rope_scaling`, with the rule under `type`."""
    old = {"rope_theta": 500_000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}, "max_position_embeddings": 131072}
    del old["rope_scaling"]["rope_type"]  # type: ignore[attr-defined]
    new = {"rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}, "max_position_embeddings": 131072}
    old_frequencies, _ = inverse_frequencies(read_rope(old, 64))
    new_frequencies, _ = inverse_frequencies(read_rope(new, 64))
    assert torch.equal(old_frequencies, new_frequencies)


def test_partial_rotary_factor_rotates_a_part_of_each_head() -> None:
    partial = read_rope({"rope_theta": 10_000.0, "partial_rotary_factor": 0.25}, 64)
    assert partial.dims == 16
    assert inverse_frequencies(partial)[0].shape == (8,)


def test_yarn_falls_back_to_max_position_embeddings() -> None:
    with_it = read_rope({"rope_scaling": {**YARN}, "max_position_embeddings": 1}, 64)
    without = dict(YARN)
    del without["original_max_position_embeddings"]
    fallback = read_rope({"rope_scaling": without, "max_position_embeddings": 32768}, 64)
    assert torch.equal(inverse_frequencies(with_it)[0], inverse_frequencies(fallback)[0])


@pytest.mark.parametrize(
    ("scaling", "missing"), [("linear", "factor"), ("llama3", "low_freq_factor"), ("yarn", "factor")]
)
def test_rejects_a_scaling_without_its_required_settings(scaling: str, missing: str) -> None:
    settings = {**LLAMA3, "rope_type": scaling}
    del settings[missing]
    with pytest.raises(UnsupportedModel, match=f"'{scaling}' needs the number '{missing}', which the config does not"):
        read_rope({"rope_scaling": settings}, 64)


def test_rejects_a_scaling_by_the_value_of_its_setting() -> None:
    with pytest.raises(UnsupportedModel, match="needs the number 'factor', and the model's config has -4"):
        read_rope({"rope_scaling": {**YARN, "factor": -4}}, 64)
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 1, "short_factor": [1.0] * 32}
    with pytest.raises(UnsupportedModel, match="'original_max_position_embeddings', and the model's config has 1"):
        read_rope({"rope_scaling": longrope | {"long_factor": [1.0] * 32}}, 64)


def test_rejects_an_unknown_scaling_and_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel, match="'dynamic' is not supported") as caught:
        read_rope({"rope_scaling": {"rope_type": "dynamic"}}, 64)
    assert all(name in str(caught.value) for name in configs.SCALINGS)
