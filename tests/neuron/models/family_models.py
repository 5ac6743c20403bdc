"""Tiny models of the reference library, one or more of every family: the options that published configs use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers

from ..tiny_models import tiny_sizes
from .gemma4_models import GEMMA4, GEMMA4_PATCHES, GEMMA4_TOWER, GEMMA4_UNIFIED
from .reference_models import randomised

VOCAB = 97
SIZES: dict[str, Any] = {
    **tiny_sizes(vocab_size=VOCAB, hidden_size=48, intermediate_size=72),
    "eos_token_id": None,
    "pad_token_id": None,
}
FOUR_LAYERS = {"num_hidden_layers": 4}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
LOCAL, YARN = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32},
)
LATENT = {
    **{"num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 32},
    **{"q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14},
}
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
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
GLIMMER = {
    "model_type": "muse_glimmer_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True, slots=True)
class Family:
    """`changes`: by name, the options of each model that is compared, in addition to SIZES."""

    config: Any
    model: Any
    changes: dict[str, dict[str, Any]]
    tower: dict[str, Any] | None = None
    """The vision tower of a model whose language model has a config of its own."""

    def config_of(self, name: str) -> Any:
        sizes = SIZES | self.changes[name]
        if self.tower is None:
            return self.config(**sizes, attn_implementation="eager")
        tied = {"tie_word_embeddings": sizes.pop("tie_word_embeddings", False)}
        return self.config(text_config=sizes, vision_config=self.tower, attn_implementation="eager", **tied)


def _longrope(original: int) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.3],
            "long_factor": [1.5, 2.0, 4.0],
            "original_max_position_embeddings": original,
        },
        "original_max_position_embeddings": original,
    }


TABLE: dict[str, Family] = {
    "qwen2": Family(
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {
            "plain": {},
            "tied": {"tie_word_embeddings": True},
            "windows": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, **FOUR_LAYERS},
        },
    ),
    "mistral": Family(
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"plain": {"sliding_window": None}, "window": {"sliding_window": 7, "head_dim": 16}},
    ),
    "ministral3": Family(
        transformers.Ministral3Config,
        transformers.Ministral3ForCausalLM,
        {"grows": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}}},
    ),
    "mistral3": Family(
        transformers.Mistral3Config,
        transformers.Mistral3ForConditionalGeneration,
        {
            "mistral": {"model_type": "mistral", "sliding_window": None},
            "ministral": {"model_type": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
        },
        PIXTRAL,
    ),
    "seed_oss": Family(
        transformers.SeedOssConfig,
        transformers.SeedOssForCausalLM,
        {"plain": {}, "every bias": {"attention_out_bias": True, "mlp_bias": True, "head_dim": 16}},
    ),
    "smollm3": Family(
        transformers.SmolLM3Config,
        transformers.SmolLM3ForCausalLM,
        {
            "plain": FOUR_LAYERS | {},
            "windows": {
                "no_rope_layers": [0, 1],
                "use_sliding_window": True,
                "sliding_window": 5,
            },
        },
    ),
    "phi3": Family(
        transformers.Phi3Config,
        transformers.Phi3ForCausalLM,
        {
            "plain": {},
            "window": {"sliding_window": 6, "num_key_value_heads": 4},
            "short": _longrope(128),
            "long": _longrope(32),
        },
    ),
    "olmo2": Family(transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {"plain": {}}),
    "olmo3": Family(
        transformers.Olmo3Config,
        transformers.Olmo3ForCausalLM,
        {
            "plain": {"sliding_window": 9, **FOUR_LAYERS},
            "two ropes": {
                **{"sliding_window": 9, "layer_types": WINDOWS, **FOUR_LAYERS},
                "rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL},
            },
        },
    ),
    "exaone4": Family(
        transformers.Exaone4Config,
        transformers.Exaone4ForCausalLM,
        {
            "windows": {"sliding_window": 9, "layer_types": WINDOWS, **FOUR_LAYERS},
            "no windows": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        },
    ),
    "gemma3_text": Family(
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {
            "plain": {"sliding_window": 9, "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
            "capped": {
                **{"sliding_window": 9, "layer_types": WINDOWS, "query_pre_attn_scalar": 16, **FOUR_LAYERS},
                **{"final_logit_softcapping": 20.0, "attention_bias": True, "tie_word_embeddings": False},
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
                    "sliding_attention": LOCAL,
                },
            },
        },
    ),
    "gemma3": Family(
        transformers.Gemma3Config,
        transformers.Gemma3ForConditionalGeneration,
        {
            "plain": {
                **{"sliding_window": 9, "query_pre_attn_scalar": 24, "num_hidden_layers": 7, "vocab_size": VOCAB},
                "tie_word_embeddings": True,
            }
        },
        SIGLIP,
    ),
    "gemma4_text": Family(transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM, GEMMA4),
    "gemma4_unified_text": Family(
        transformers.Gemma4UnifiedTextConfig, transformers.Gemma4UnifiedForCausalLM, GEMMA4_UNIFIED
    ),
    "gemma4": Family(
        transformers.Gemma4Config,
        transformers.Gemma4ForConditionalGeneration,
        {"readers": GEMMA4["readers"] | {"pad_token_id": 0}},
        GEMMA4_TOWER,
    ),
    "gemma4_unified": Family(
        transformers.Gemma4UnifiedConfig,
        transformers.Gemma4UnifiedForConditionalGeneration,
        GEMMA4_UNIFIED,
        GEMMA4_PATCHES,
    ),
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
    "granite": Family(
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        {
            "plain": {"attention_multiplier": 0.3},
            "multipliers": {
                **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
                **{"attention_multiplier": 0.05, "rms_norm_eps": 1e-2, "tie_word_embeddings": True},
            },
        },
    ),
    "glm4": Family(
        transformers.Glm4Config,
        transformers.Glm4ForCausalLM,
        {
            "plain": {"head_dim": 16},
            "every dimension": {
                **{"attention_bias": False},
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "ernie4_5": Family(
        transformers.Ernie4_5Config,
        transformers.Ernie4_5ForCausalLM,
        {"plain": {}, "biases": {"use_bias": True, "head_dim": 16, "tie_word_embeddings": False}},
    ),
    "hunyuan_v1_dense": Family(
        transformers.HunYuanDenseV1Config,
        transformers.HunYuanDenseV1ForCausalLM,
        {
            "plain": {},
            "alpha": {
                "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10_000.0},
                "attention_bias": True,
            },
        },
    ),
    "cohere2": Family(
        transformers.Cohere2Config,
        transformers.Cohere2ForCausalLM,
        {
            "plain": {"sliding_window": 9, **FOUR_LAYERS},
            "biases": {"sliding_window": 200, "logit_scale": 0.3, "attention_bias": True, "tie_word_embeddings": False},
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
    "youtu": Family(transformers.YoutuConfig, transformers.YoutuForCausalLM, {"plain": LATENT}),
    "muse_glimmer": Family(
        transformers.MuseGlimmerConfig,
        transformers.MuseGlimmerForConditionalGeneration,
        {
            "plain": {"sliding_window": 9, "num_hidden_layers": 5},
            "listed": {
                **{"layer_types": WINDOWS, "sliding_window": 9, "layer_rope_theta": [10_000.0, 0, 10_000.0, 0]},
                **{"qk_scale_factor": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
                **{"attention_bias": True, **FOUR_LAYERS},
            },
        },
        GLIMMER,
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
                "rotary_dim": 8,
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
    entry = TABLE[family]
    config = entry.config_of(name)
    return randomised(lambda: entry.model(config), std=0.15, vector_std=0.5)
