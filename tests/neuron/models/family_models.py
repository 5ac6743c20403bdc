"""Tiny models of the reference library, one or more of every family: the options that published configs use."""

from __future__ import annotations

from typing import Any

import transformers

from .dense_models import DENSE
from .qwen_models import QWEN
from .reference_models import randomised
from .tiny_family import FOUR_LAYERS, LATENT, LOCAL, SIZES, WINDOWS, YARN, Family

STRETCHED = {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
GRANITE_GROUPS = 2 if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23) else 1
"""Earlier versions of the library normalise all groups together, which no published model has."""
MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 16, "mamba_n_groups": 1}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.25,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.05,
}


TABLE: dict[str, Family] = {
    **DENSE,
    "gpt_oss": Family(
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {
            "no window": {
                **{"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
                "layer_types": ["full_attention"] * SIZES["num_hidden_layers"],
            },
            "windows": {
                **{"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 9},
                "rope_parameters": YARN | {"truncate": False},
                **FOUR_LAYERS,
            },
        },
    ),
    "glm4_moe": Family(
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {
            "plain": {"n_routed_experts": 6, "num_hidden_layers": 3, **EXPERTS},
            "scaled": {
                **{"n_routed_experts": 6, "routed_scaling_factor": 2.5, "norm_topk_prob": False, "use_qk_norm": True},
                **{"attention_bias": True, "n_shared_experts": 2, "first_k_dense_replace": 0, **EXPERTS},
            },
        },
    ),
    "glm4_moe_lite": Family(
        transformers.Glm4MoeLiteConfig,
        transformers.Glm4MoeLiteForCausalLM,
        {
            "plain": {"n_routed_experts": 6, "num_hidden_layers": 3, **LATENT, **EXPERTS},
            "listed": {
                **{"n_routed_experts": 6, "n_shared_experts": 2, "norm_topk_prob": False, **LATENT, **EXPERTS},
                **{"mlp_layer_types": ["sparse", "dense"], "rope_interleave": False, "attention_bias": True},
            },
        },
    ),
    "deepseek_v2": Family(
        transformers.DeepseekV2Config,
        transformers.DeepseekV2ForCausalLM,
        {
            "plain": {"n_routed_experts": 6, "first_k_dense_replace": 1, **LATENT, **EXPERTS, "q_lora_rank": None},
            "groups": {
                **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
                **{"routed_scaling_factor": 1.6, **LATENT, **EXPERTS, **STRETCHED},
            },
        },
    ),
    "deepseek_v3": Family(
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            "groups": {
                **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, **LATENT},
                **{"num_hidden_layers": 3, "num_nextn_predict_layers": 0, **EXPERTS, **STRETCHED},
            },
        },
    ),
    "laguna": Family(
        transformers.LagunaConfig,
        transformers.LagunaForCausalLM,
        {
            "plain": {"num_experts": 6, "shared_expert_intermediate_size": 40, **EXPERTS},
            "heads": {
                **{"num_experts": 6, "shared_expert_intermediate_size": 24, "moe_routed_scaling_factor": 2.5},
                **{"num_attention_heads_per_layer": [4, 2, 8, 4], "layer_types": WINDOWS, "sliding_window": 9},
                **{"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "gating": "per-element"},
                "rope_parameters": {
                    "full_attention": YARN | {"partial_rotary_factor": 0.5},
                    "sliding_attention": LOCAL,
                },
                **EXPERTS,
                **FOUR_LAYERS,
            },
        },
    ),
    "ernie4_5_moe": Family(
        transformers.Ernie4_5_MoeConfig,
        transformers.Ernie4_5_MoeForCausalLM,
        {
            "plain": {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "num_hidden_layers": 3},
            "some layers": {
                **{"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 0},
                **{"moe_layer_interval": 2, "moe_layer_end_index": 2, **FOUR_LAYERS},
            },
        },
    ),
    "minimax_m2": Family(
        transformers.MiniMaxM2Config,
        transformers.MiniMaxM2ForCausalLM,
        {
            "plain": {
                **{"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "head_dim": 16},
                # `rotary_dim` as published; versions of the library that do not read it read the fraction
                "rotary_dim": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "mellum": Family(
        transformers.MellumConfig,
        transformers.MellumForCausalLM,
        {
            "plain": {"num_experts": 6, **EXPERTS},
            "windows": {
                **{"num_experts": 6, "layer_types": WINDOWS, "sliding_window": 9, **EXPERTS, **FOUR_LAYERS},
                "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
                "rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL},
            },
        },
    ),
    "lfm2": Family(
        transformers.Lfm2Config,
        transformers.Lfm2ForCausalLM,
        {
            "plain": {
                "layer_types": ["conv", "full_attention", "conv", "conv"],
                **FOUR_LAYERS,
                "block_multiple_of": 16,
            },
            "wide": {
                **{"full_attn_idxs": [1], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-4},
                "tie_word_embeddings": False,
            },
        },
    ),
    "lfm2_moe": Family(
        transformers.Lfm2MoeConfig,
        transformers.Lfm2MoeForCausalLM,
        {
            "plain": {
                **{"layer_types": ["conv", "full_attention", "conv", "conv"], "num_experts": 6, **EXPERTS},
                **{"num_dense_layers": 1, "routed_scaling_factor": 1.5, **FOUR_LAYERS},
            },
            "unbiased": {
                **{"layer_types": ["full_attention", "conv"], "num_experts": 5, "use_expert_bias": False, **EXPERTS},
                **{"num_dense_layers": 0, "norm_topk_prob": False},
            },
        },
    ),
    "granitemoehybrid": Family(
        transformers.GraniteMoeHybridConfig,
        transformers.GraniteMoeHybridForCausalLM,
        {
            "dense": {
                **{"layer_types": ["linear_attention", "full_attention"], **MAMBA, "mamba_n_groups": GRANITE_GROUPS},
                **{"num_local_experts": 0, "shared_intermediate_size": 56, "position_embedding_type": "rope"},
                **{"mamba_conv_bias": False, "tie_word_embeddings": True, **MULTIPLIERS},
            },
            "attention only": {
                **{"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope", "num_local_experts": 0},
                **{"shared_intermediate_size": 40, **MAMBA, **MULTIPLIERS},
            },
            "mixture": {
                **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], **MAMBA},
                **{"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
                **{"shared_intermediate_size": 40, "num_hidden_layers": 3, **MULTIPLIERS},
            },
        },
    ),
    "nemotron_h": Family(
        transformers.NemotronHConfig,
        transformers.NemotronHForCausalLM,
        {
            "dense": {
                **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "head_dim": 16},
                **{"mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 24, "n_groups": 4},
                **{"use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 1e-4},
            },
            "mixture": {
                **{"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]},
                **{"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2},
                **{"n_routed_experts": 6, "moe_shared_expert_intermediate_size": 40, **EXPERTS},
                **{"routed_scaling_factor": 2.5, "head_dim": 12},
            },
            "latent": {
                **{"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "moe_latent_size": 32},
                **{"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 1},
                **{"n_routed_experts": 6, "moe_shared_expert_intermediate_size": 40, **EXPERTS, "head_dim": 12},
            },
        },
    ),
}
CASES = [(family, name) for family, entry in TABLE.items() for name in entry.changes]


def reference_of(family: str, name: str) -> Any:
    entry = QWEN.get(family) or TABLE[family]
    config = entry.config_of(name)
    return randomised(lambda: entry.model(config), std=0.15, vector_std=0.5)
