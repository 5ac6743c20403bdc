"""How models are divided among ranks: what is possible, and that the ranks' tensors together are the model's."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.neuron.layers.configs import AttentionConfig, Shard
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.weights.sharded import TensorSlice

from ..tiny_models import tiny_delta, tiny_sizes

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    **tiny_sizes(
        vocab_size=192,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=6,
        max_position_embeddings=512,
        head_dim=32,
    ),
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    "model_type": "qwen3_next",
    **tiny_delta(linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=12, linear_value_head_dim=10),
}


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({}, 4, "6 attention heads cannot be divided among 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "4 key-value heads cannot be divided among 6"),
        ({"intermediate_size": 129}, 2, "an inner width of 129"),
        (EXPERTS, 6, "5 experts cannot be divided among 6"),
        (DELTA, 2, "3 key heads of the gated delta nets"),
    ],
)
def test_rejects_a_number_of_devices_that_does_not_divide_the_model(
    changes: dict[str, Any], size: int, reason: str
) -> None:
    architecture = read_architecture(CONFIG | changes)
    with pytest.raises(UnsupportedModel, match=reason):
        architecture.sharded(Shard(0, size))


def test_ranks_without_a_key_value_head_of_their_own_share_one() -> None:
    architecture = read_architecture(CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 2})
    name = "model.layers.0.self_attn.k_proj.weight"
    slices = [architecture.tensor_slices(Shard(rank, 4))[name] for rank in range(4)]
    assert [part.rows for part in slices if part] == [
        (range(0, 32),),
        (range(0, 32),),
        (range(32, 64),),
        (range(32, 64),),
    ]
    mixers = [architecture.sharded(Shard(rank, 4)).layers[0].mixer for rank in range(4)]
    assert {mixer.kv_heads for mixer in mixers if isinstance(mixer, AttentionConfig)} == {1}
    assert all(isinstance(mixer, AttentionConfig) for mixer in mixers)


def test_latents_are_on_every_rank_and_their_heads_on_one() -> None:
    architecture = read_architecture(
        CONFIG
        | {"model_type": "youtu", "kv_lora_rank": 16, "q_lora_rank": 12}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
    )
    slices = architecture.tensor_slices(Shard(1, 2))
    prefix = "model.layers.0.self_attn"
    assert {name.removeprefix(f"{prefix}.") for name in slices if name.startswith(prefix)}.isdisjoint(
        {"q_a_proj.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight"}
    )
    assert slices[f"{prefix}.q_b_proj.weight"] == TensorSlice(rows=(range(36, 72),))
    assert slices[f"{prefix}.kv_b_proj.weight"] == TensorSlice(rows=(range(54, 108),))
    assert slices[f"{prefix}.o_proj.weight"] == TensorSlice(columns=range(30, 60))
    assert any("every device keeps the whole KV cache" in note for note in architecture.sharded(Shard(1, 2)).notes)
    assert not architecture.notes


def test_every_expert_is_on_exactly_one_rank_under_a_number_that_starts_at_0() -> None:
    architecture = read_architecture(CONFIG | EXPERTS)
    sources = []
    for rank in range(2):
        slices = architecture.tensor_slices(Shard(rank, 2))
        held = {name: part for name, part in slices.items() if ".down_proj.weight" in name and part is not None}
        assert sorted(held) == [f"model.layers.0.mlp.experts.{number}.down_proj.weight" for number in range(len(held))]
        sources += [part.source for part in held.values()]
    assert sources == [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(5)]
