"""Tiny models of the reference library that are written as GGUF files: one of every architecture, and some others."""

from __future__ import annotations

from typing import Any

import transformers

from ..tiny_models import tiny_delta, tiny_experts, tiny_sizes
from .dense_models import GLIMMER_ADAPTER
from .reference_models import randomised

VOCAB, HIDDEN = 96, 256
SIZES: dict[str, Any] = {
    **tiny_sizes(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=2, head_dim=64),
    "rms_norm_eps": 1e-6,
}
EXPERTS: dict[str, Any] = {
    **tiny_experts(num_experts=5, moe_intermediate_size=256),
    "decoder_sparse_step": 1,
}
HYBRID: dict[str, Any] = {
    **tiny_delta(linear_num_value_heads=6, linear_key_head_dim=32, linear_value_head_dim=128),
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
SHARED = {"shared_expert_intermediate_size": 512}
UNPADDED = {**SIZES, "pad_token_id": None}
WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
GEMMA4: dict[str, Any] = {
    **{"num_hidden_layers": 5, "global_head_dim": 128, "sliding_window": 9, "final_logit_softcapping": 30.0},
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}

MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 32}
NEMOTRON: dict[str, Any] = {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32}
MULTIPLIERS: dict[str, Any] = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 4.0},
    "attention_multiplier": 0.05,
}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LATENT: dict[str, Any] = {
    **UNPADDED,
    **{"num_key_value_heads": 4, "head_dim": 64, "q_lora_rank": 256, "kv_lora_rank": 256},
    **{"qk_nope_head_dim": 256, "qk_rope_head_dim": 64, "v_head_dim": 64},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
}

BUILDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, SIZES),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, SIZES),
    "qwen3moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, SIZES | EXPERTS),
    "qwen3next": (
        transformers.Qwen3NextConfig,
        transformers.Qwen3NextForCausalLM,
        SIZES | EXPERTS | SHARED | HYBRID,
    ),
    "qwen35": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM, SIZES | HYBRID),
    "qwen35moe": (
        transformers.Qwen3_5MoeTextConfig,
        transformers.Qwen3_5MoeForCausalLM,
        SIZES | EXPERTS | SHARED | HYBRID,
    ),
    "deepseek2": (
        transformers.Glm4MoeLiteConfig,
        transformers.Glm4MoeLiteForCausalLM,
        LATENT | {"routed_scaling_factor": 1.8},
    ),
    "ernie4_5-moe": (
        transformers.Ernie4_5_MoeConfig,
        transformers.Ernie4_5_MoeForCausalLM,
        {
            **UNPADDED,
            **{"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 256, "moe_num_shared_experts": 2},
            "num_hidden_layers": 3,
        },
    ),
    "glm4moe": (
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {
            **UNPADDED,
            **{"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "use_qk_norm": True},
            **{"routed_scaling_factor": 2.5, "attention_bias": True},
        },
    ),
    "minimax-m2": (
        transformers.MiniMaxM2Config,
        transformers.MiniMaxM2ForCausalLM,
        UNPADDED | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 256, "rotary_dim": 32},
    ),
    "gpt-oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {
            **UNPADDED,
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 256, "sliding_window": 9},
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "cohere2": (transformers.Cohere2Config, transformers.Cohere2ForCausalLM, UNPADDED | WINDOWS | {"logit_scale": 0.3}),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM, UNPADDED),
    "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM, SIZES | WINDOWS),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        UNPADDED | WINDOWS | {"query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0},
    ),
    "gemma4": (
        transformers.Gemma4TextConfig,
        transformers.Gemma4ForCausalLM,
        {
            **{**UNPADDED, **GEMMA4, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCAB},
            **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        },
    ),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM, UNPADDED),
    "granite": (
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        SIZES | MULTIPLIERS,
    ),
    "hunyuan-dense": (transformers.HunYuanDenseV1Config, transformers.HunYuanDenseV1ForCausalLM, UNPADDED),
    "laguna": (
        transformers.LagunaConfig,
        transformers.LagunaForCausalLM,
        {
            **UNPADDED,
            **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_hidden_layers": 4},
            **{"shared_expert_intermediate_size": 512, "moe_routed_scaling_factor": 2.5, "sliding_window": 9},
            "num_attention_heads_per_layer": [4, 8, 8, 8],
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {**PLAIN, "rope_theta": 500.0},
            },
        },
    ),
    "mellum": (
        transformers.MellumConfig,
        transformers.MellumForCausalLM,
        {
            **(UNPADDED | EXPERTS | WINDOWS),
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {**PLAIN, "rope_theta": 500.0}},
        },
    ),
    "muse-glimmer": (
        lambda attn_implementation, **text: transformers.MuseGlimmerConfig(
            text_config=text, vision_config=TOWER, attn_implementation=attn_implementation, **GLIMMER_ADAPTER
        ),
        transformers.MuseGlimmerForConditionalGeneration,
        UNPADDED | {"num_hidden_layers": 5, "sliding_window": 9},
    ),
    "mistral3": (
        transformers.Ministral3Config,
        transformers.Ministral3ForCausalLM,
        UNPADDED | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    ),
    "olmo2": (
        transformers.Olmo3Config,
        transformers.Olmo3ForCausalLM,
        UNPADDED
        | WINDOWS
        | {"rope_parameters": {"full_attention": {**YARN, "attention_factor": 4.0}, "sliding_attention": PLAIN}},
    ),
    "phi3": (
        transformers.Phi3Config,
        transformers.Phi3ForCausalLM,
        {
            **UNPADDED,
            **{"original_max_position_embeddings": 16, "sliding_window": 20},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
                **{
                    "short_factor": [1.0 + number / 16 for number in range(16)],
                    "original_max_position_embeddings": 128,
                },
                "long_factor": [1.5 + number / 4 for number in range(16)],
            },
        },
    ),
    "lfm2": (
        transformers.Lfm2Config,
        transformers.Lfm2ForCausalLM,
        UNPADDED | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2moe": (
        transformers.Lfm2MoeConfig,
        transformers.Lfm2MoeForCausalLM,
        {
            **UNPADDED,
            **{"layer_types": ["full_attention", "conv"], "num_dense_layers": 1, "num_experts": 5},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 256},
        },
    ),
    "granitehybrid": (
        transformers.GraniteMoeHybridConfig,
        transformers.GraniteMoeHybridForCausalLM,
        {
            **UNPADDED,
            **{"layer_types": ["linear_attention", "full_attention"], **MAMBA, **MULTIPLIERS},
            **{"num_local_experts": 5, "intermediate_size": 256, "shared_intermediate_size": 512},
        },
    ),
    "nemotron_h": (
        transformers.NemotronHConfig,
        transformers.NemotronHForCausalLM,
        UNPADDED | NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron_h_moe": (
        transformers.NemotronHConfig,
        transformers.NemotronHForCausalLM,
        {
            **UNPADDED,
            **{"layers_block_type": ["linear_attention", "moe", "full_attention"], **NEMOTRON},
            **{"n_routed_experts": 5, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 512},
            "routed_scaling_factor": 2.5,
        },
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, SIZES),
    "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM, UNPADDED | {"attention_out_bias": True}),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM, UNPADDED | {"num_hidden_layers": 4}),
}
VARIANTS: dict[str, tuple[str, tuple[Any, Any, dict[str, Any]]]] = {
    "deepseek v2": (
        "deepseek2",
        (
            transformers.DeepseekV2Config,
            transformers.DeepseekV2ForCausalLM,
            {
                **LATENT,
                **{"q_lora_rank": None, "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"},
                "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
            },
        ),
    ),
    "gemma4 with experts": (
        "gemma4",
        (
            transformers.Gemma4TextConfig,
            transformers.Gemma4ForCausalLM,
            {
                **{**UNPADDED, **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
                **{"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 256},
                "hidden_size_per_layer_input": 0,
            },
        ),
    ),
    "mistral": (
        "llama",
        (transformers.MistralConfig, transformers.MistralForCausalLM, SIZES | {"sliding_window": None}),
    ),
    "mistral small": (
        "mistral3",
        (transformers.MistralConfig, transformers.MistralForCausalLM, SIZES | {"sliding_window": None}),
    ),
    "olmo2": ("olmo2", (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, UNPADDED)),
    "phi4": ("phi3", (transformers.Phi3Config, transformers.Phi3ForCausalLM, UNPADDED)),
    "exaone4 without windows": (
        "exaone4",
        (
            transformers.Exaone4Config,
            transformers.Exaone4ForCausalLM,
            SIZES | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        ),
    ),
    "granitehybrid without experts": (
        "granitehybrid",
        (
            transformers.GraniteMoeHybridConfig,
            transformers.GraniteMoeHybridForCausalLM,
            {
                **UNPADDED,
                **{"layer_types": ["linear_attention", "full_attention"], **MAMBA, **MULTIPLIERS},
                **{"num_local_experts": 0, "shared_intermediate_size": 512, "position_embedding_type": "rope"},
            },
        ),
    ),
    "nemotron with latent experts": (
        "nemotron_h_moe",
        (
            transformers.NemotronHConfig,
            transformers.NemotronHForCausalLM,
            {
                **UNPADDED,
                **{"layers_block_type": ["linear_attention", "moe", "full_attention"], **NEMOTRON},
                **{"n_routed_experts": 5, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 512},
                "moe_latent_size": 64,
            },
        ),
    ),
    "glm4 without biases": (
        "glm4",
        (transformers.Glm4Config, transformers.Glm4ForCausalLM, UNPADDED | {"attention_bias": False}),
    ),
}
"""Other models of the same architectures: name → architecture, build."""


def reference_of(architecture: str, **changes: Any) -> Any:
    return build(BUILDS[architecture], **changes)


def build(parts: tuple[Any, Any, dict[str, Any]], **changes: Any) -> Any:
    config_class, model_class, sizes = parts
    config = config_class(**(sizes | changes), attn_implementation="eager")
    return randomised(lambda: model_class(config), std=0.06, vector_std=0.3)
