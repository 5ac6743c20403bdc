"""Tiny models of the reference library without experts and recurrent layers, one or more of every family."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers

from .gemma4_models import GEMMA4, GEMMA4_PATCHES, GEMMA4_TOWER, GEMMA4_UNIFIED
from .tiny_family import FOUR_LAYERS, LATENT, LOCAL, VOCAB, WINDOWS, YARN, Family

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
GLIMMER_ADAPTER = {"out_hidden_size": 64, "projector_hidden_size": 16}
"""Four patches of the tower together, and what becomes of them: 42 million parameters if it is left out."""
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


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


DENSE: dict[str, Family] = {
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
    "youtu": Family(transformers.YoutuConfig, transformers.YoutuForCausalLM, {"plain": LATENT}),
    "muse_glimmer": Family(
        partial(transformers.MuseGlimmerConfig, **GLIMMER_ADAPTER),
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
}
