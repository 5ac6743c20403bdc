"""The computed size of every family, against what its layers allocate."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch

from cortex.neuron.engine.memory.sequences import KVCache, StateMemory
from cortex.neuron.kernels.cpu.layout import cpu_layout
from cortex.neuron.kernels.float8.layout import FLOAT8_ROWS
from cortex.neuron.kernels.layouts import DeviceLayout
from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.layers.configs import Shard
from cortex.neuron.layers.parallel import SingleRank
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.registry import FAMILIES, read_architecture
from cortex.neuron.models.sizes import WeightStorage, kv_bytes_per_token, position_bytes, state_bytes, weight_bytes

from ...waiting import WAIT_S
from ..tiny_models import tiny_delta, tiny_sizes

META = torch.device("meta")
SIZES: dict[str, Any] = {
    **tiny_sizes(
        vocab_size=192,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=6,
        max_position_embeddings=512,
        head_dim=32,
    ),
    **tiny_delta(linear_num_value_heads=6, linear_key_head_dim=12, linear_value_head_dim=10),
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
SHARED = {"shared_expert_intermediate_size": 40}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "experts": EXPERTS,
    "experts and a shared one": EXPERTS | SHARED,
    "rows that do not fill blocks": {"num_key_value_heads": 1, "vocab_size": 100},
}


OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"mlp_bias": False, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "deepseek_v3": {"n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24},
    "gemma4": {
        **{"num_kv_shared_layers": 1, "use_double_wide_mlp": True},
        "layer_types": [*["sliding_attention"] * 3, *["full_attention"] * 2],
    },
    "gemma4_text": {**{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3}, "moe_intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "glm4_moe_lite": {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "kimi_k2": {
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "laguna": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "granitemoehybrid": {
        **{"layer_types": ["mamba", "attention", "mamba", "mamba", "attention"], "shared_intermediate_size": 40},
        **{"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "num_local_experts": 6},
    },
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"]} | EXPERTS,
    "mellum": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "nemotron_h": {
        **{"hybrid_override_pattern": "ME*M-", "mamba_num_heads": 6, "mamba_head_dim": 10, "n_groups": 2},
        **{"ssm_state_size": 12, "n_routed_experts": 6, "moe_intermediate_size": 24},
        **{"moe_shared_expert_intermediate_size": 40, "moe_latent_size": 16, "mlp_bias": False},
    },
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 3},
}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32}
WITH_LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "youtu")
OWN_OPTIONS |= {family: LATENT | OWN_OPTIONS.get(family, {}) for family in WITH_LATENTS}
WITH_TOWER = (
    *("gemma3", "gemma4", "gemma4_unified", "mistral3", "muse_glimmer"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
)


def config_of(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = {"model_type": family, **SIZES, **changes, **OWN_OPTIONS.get(family, {})}
    # A config with a vision tower has the sizes of its text part one level down.
    tied = {"tie_word_embeddings": changes.get("tie_word_embeddings", False)}
    return {"model_type": family, "text_config": config, **tied} if family in WITH_TOWER else config


class FamilyVariant(NamedTuple):
    """One of the changes, to one family."""

    name: str
    config: dict[str, Any]
    place: int
    """Picks one of several values, so that each occurs with every family and with every change, but not each with both
    at once: what they decide does not depend on each other."""

    @property
    def architecture(self) -> Architecture:
        return read_architecture(self.config)


def variants(family: str) -> list[FamilyVariant]:
    first = list(FAMILIES).index(family)
    return [
        FamilyVariant(name, config_of(family, changes), first + number)
        for number, (name, changes) in enumerate(CHANGES.items())
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_computed_size_is_what_the_layers_allocate(family: str) -> None:
    for variant in variants(family):
        architecture, dtype = variant.architecture, (torch.float32, torch.bfloat16)[variant.place % 2]
        model = Decoder(architecture, Parameters(META, dtype), num_positions=1)
        assert weight_bytes(architecture, WeightStorage(dtype.itemsize)) == model.parameters.num_bytes, variant.name
        kv = KVCache(model.attentions, dict.fromkeys(architecture.windows, 3), 8, dtype, META)
        assert 3 * 8 * kv_bytes_per_token(architecture, dtype.itemsize) == kv.num_bytes, variant.name
        states = StateMemory(model.recurrent_layers, 3, dtype, META).num_bytes if model.recurrent_layers else 0
        assert 3 * state_bytes(architecture, dtype.itemsize) == states, variant.name


@pytest.mark.parametrize("family", FAMILIES)
def test_computed_size_of_tables_is_what_the_layers_allocate(family: str) -> None:
    architecture = read_architecture(config_of(family, {}))  # the changes are of other parts
    for num_positions in (1, 50):
        model = Decoder(architecture, Parameters(META, torch.float32), num_positions)
        assert position_bytes(architecture, num_positions) == model.ropes.num_bytes


class OneOfTwo(SingleRank):
    shard = Shard(1, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_computed_size_of_a_rank_is_what_its_layers_allocate(family: str) -> None:
    for name, changes in CHANGES.items():
        if "blocks" in name:
            continue  # one head of keys cannot be divided
        whole = read_architecture(config_of(family, changes | {"vocab_size": 193}))
        rank = whole.sharded(OneOfTwo.shard)
        parameters = Parameters(META, torch.float32, group=OneOfTwo())
        model = Decoder(rank, parameters, num_positions=1)
        rank_bytes, whole_bytes = (weight_bytes(each, WeightStorage(4)) for each in (rank, whole))
        assert rank_bytes == parameters.num_bytes < whole_bytes, name
        kv = KVCache(model.attentions, dict.fromkeys(rank.windows, 1), 1, torch.float32, META)
        divisor = 1 if family in WITH_LATENTS else 2  # every rank has all latents
        assert kv_bytes_per_token(rank, 4) == kv.num_bytes == kv_bytes_per_token(whole, 4) // divisor, name
        assert state_bytes(rank, 4) == state_bytes(whole, 4) // 2, name


@pytest.mark.parametrize("family", FAMILIES)
def test_computed_size_of_a_stage_is_what_its_layers_allocate(family: str) -> None:
    for variant in variants(family):
        stage = (range(2), range(2, 5))[variant.place % 2]
        architecture = variant.architecture.staged(stage)
        model = Decoder(architecture, Parameters(META, torch.float32), num_positions=1)
        assert weight_bytes(architecture, WeightStorage(4)) == model.parameters.num_bytes, (variant.name, stage)
        kv = KVCache(model.attentions, dict.fromkeys(architecture.windows, 1), 1, torch.float32, META)
        assert kv_bytes_per_token(architecture, 4) == kv.num_bytes, (variant.name, stage)
        states = StateMemory(model.recurrent_layers, 1, torch.float32, META).num_bytes if model.recurrent_layers else 0
        assert state_bytes(architecture, 4) == states, (variant.name, stage)


@pytest.mark.parametrize("family", FAMILIES)
def test_computed_size_on_a_cpu_is_what_the_layers_allocate(family: str) -> None:
    """Value projections are stored in a format of their own, all other matrices in Q4_K."""
    for variant in variants(family):
        dense = Decoder(variant.architecture, Parameters(META, torch.float32), num_positions=1).parameters
        matrices = [binding.source for binding in dense.bindings if binding.destination.dim() == 2]
        mixed = ("Q4_K", "Q6_K", "Q8_0", "F32")[variant.place % 4]
        chosen = {name: cpu_layout(mixed if "v_proj" in name else "Q4_K") for name in matrices}
        offer = {name: layout for name, layout in chosen.items() if layout is not None}
        stored = Decoder(variant.architecture, Parameters(META, torch.float32, offer), num_positions=1).parameters
        computed = weight_bytes(variant.architecture, WeightStorage(4, offer))
        assert computed == stored.num_bytes < dense.num_bytes, (variant.name, mixed)


@pytest.mark.parametrize("family", FAMILIES)
def test_computed_size_of_packed_matrices_is_what_the_layers_allocate(family: str) -> None:
    """Value and down projections are packed in a layout of their own or dense, all other matrices in 4 bits."""
    of_their_own: list[DeviceLayout | None] = [layouts.Q4, layouts.Q6, layouts.IQ4, FLOAT8_ROWS, None]
    for variant in variants(family):
        architecture = variant.architecture
        dense = Decoder(architecture, Parameters(META, torch.bfloat16), num_positions=1).parameters
        # gpt-oss has gate and up of an expert in one tensor
        joint = {
            f"{name}.mlp.experts.{number}.gate_up_proj.weight"
            for name, _ in architecture.named_layers()
            for number in range(6)
        }
        files = joint if family == "gpt_oss" else ()
        names = [part.source for binding in dense.bindings for part in binding.chosen_from(files)]
        mixed = of_their_own[variant.place % len(of_their_own)]
        packing = {name: mixed if "v_proj" in name or "down_proj" in name else layouts.Q4 for name in names}
        offer = {name: layout for name, layout in packing.items() if layout is not None}
        packed = Decoder(architecture, Parameters(META, torch.bfloat16, packing=offer), num_positions=1).parameters
        computed = weight_bytes(architecture, WeightStorage(2, packing=offer))
        assert computed == packed.num_bytes < dense.num_bytes, (variant.name, mixed)


def test_sizes_are_computed_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import cortex.neuron.models.sizes, cortex.neuron.models.registry"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
