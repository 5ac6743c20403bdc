"""Tiny models of Llama and of Qwen's text families, in the reference library: each option alone."""

from __future__ import annotations

from typing import Any

import transformers

from ..tiny_models import tiny_delta, tiny_experts
from .tiny_family import FOUR_LAYERS, Family


def rope(kind: str, **numbers: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **numbers}}


WINDOWED = {"use_sliding_window": True, "sliding_window": 9}
DELTA: dict[str, Any] = {
    **tiny_delta(linear_num_value_heads=6, linear_key_head_dim=12, linear_value_head_dim=10),
    **{"num_hidden_layers": 5, "num_attention_heads": 6, "head_dim": 16},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    **rope("default", partial_rotary_factor=0.25),
}
SHARED = {**tiny_experts(num_experts_per_tok=3), "shared_expert_intermediate_size": 40}
VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    **{"out_hidden_size": 48, "num_position_embeddings": 16},
}


def experts(**changes: Any) -> dict[str, Any]:
    sizes = {"num_experts": 8, "norm_topk_prob": False, "num_hidden_layers": 3, "num_attention_heads": 6}
    return {**tiny_experts(), **sizes, "head_dim": 16, **changes}


QWEN: dict[str, Family] = {
    "llama": Family(
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {
            "plain": {},
            "every head its own keys": {"num_key_value_heads": 4},
            "one key head for all": {"num_key_value_heads": 1},
            "odd heads": {"hidden_size": 45, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
            "seven heads": {"hidden_size": 49, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 8},
            "heads wider than hidden": {"head_dim": 32},
            "no head_dim": {"head_dim": None},
            "attention biases": {"attention_bias": True},
            "mlp biases": {"mlp_bias": True},
            "every bias": {"attention_bias": True, "mlp_bias": True},
            "tied": {"tie_word_embeddings": True},
            "one layer, odd sizes": {
                **{"num_hidden_layers": 1, "hidden_size": 40, "intermediate_size": 33, "vocab_size": 101},
            },
            "coarse norm": {"rms_norm_eps": 1e-2},
            "linear rope": rope("linear", factor=3.0),
            "llama3 rope": rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
            "yarn rope": rope("yarn", factor=4.0, original_max_position_embeddings=64),
            "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        },
    ),
    "qwen3": Family(
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {
            "plain": {},
            "odd heads": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 10},
            "seven to one": {"num_attention_heads": 7, "num_key_value_heads": 1},
            "biases": {"attention_bias": True},
            "tied": {"tie_word_embeddings": True},
            "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=64),
            "windows on every layer": {**WINDOWED, "layer_types": ["sliding_attention"] * 2},
            "windows by turns": {
                **{"use_sliding_window": True, "sliding_window": 16, **FOUR_LAYERS},
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "windows after the first layers": {
                **{"use_sliding_window": True, "sliding_window": 33, "num_hidden_layers": 3, "max_window_layers": 1},
            },
            "a window of one": {**WINDOWED, "sliding_window": 1, "layer_types": ["sliding_attention"] * 2},
        },
    ),
    "qwen3_moe": Family(
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            "plain": experts(),
            "renormalised": experts(norm_topk_prob=True),
            "many experts": experts(num_experts=33, num_experts_per_tok=7, norm_topk_prob=True),
            "every expert": experts(num_experts=4, num_experts_per_tok=4),
            "one of two": experts(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=20),
            "dense layers between": experts(mlp_only_layers=[0, 2], norm_topk_prob=True),
            "every second layer": experts(decoder_sparse_step=2, num_hidden_layers=4),
            "tied, biased": experts(tie_word_embeddings=True, attention_bias=True),
            "no experts": experts(num_experts=0),
            "windows": experts(**WINDOWED, max_window_layers=1),
        },
    ),
    "qwen3_next": Family(
        transformers.Qwen3NextConfig,
        transformers.Qwen3NextForCausalLM,
        {
            "plain": DELTA | SHARED,
            "one dense layer": {**DELTA, **SHARED, "mlp_only_layers": [1]},
            "as many key as value heads": {**DELTA, **SHARED, "linear_num_key_heads": 6, "linear_conv_kernel_dim": 2},
            "layers by interval": {**DELTA, **SHARED, "layer_types": None, "num_hidden_layers": 4},
            "tied": {**DELTA, **SHARED, "tie_word_embeddings": True, "attention_bias": True},
        },
    ),
    "qwen3_5_text": Family(transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM, {"plain": DELTA}),
    "qwen3_5_moe_text": Family(
        transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM, {"plain": DELTA | SHARED}
    ),
    "qwen3_5": Family(
        transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration, {"plain": DELTA}, VISION
    ),
    "qwen3_5_moe": Family(
        transformers.Qwen3_5MoeConfig,
        transformers.Qwen3_5MoeForConditionalGeneration,
        {"plain": DELTA | SHARED},
        VISION,
    ),
}
