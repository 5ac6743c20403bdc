"""The options of a family in GGUF metadata, as its `config.json` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from cortex.neuron.weights.gguf.keys import Keys

_GEMMA3_27B_LAYERS: Final = 62
"""The one Gemma 3 whose attention scale does not follow from the width of its heads, and files do not name it."""
SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


def _cohere2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **keys.windows(config["num_hidden_layers"], 4),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
    }


def _ernie4_5_moe(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    _check_scoring(keys, SOFTMAX)
    return {
        "moe_num_experts": config["num_experts"],
        "moe_k": config["num_experts_per_tok"],
        "moe_num_shared_experts": keys.count("expert_shared_count") if keys.has("expert_shared_count") else 0,
        "moe_layer_start_index": _num_dense(keys),
        "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
    }


def _exaone4(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return keys.windows(config["num_hidden_layers"], 4)


def _gemma3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    is_27b = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    width = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    cap = keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else None
    return {
        **keys.windows(config["num_hidden_layers"], 6),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "final_logit_softcapping": cap,
        "rope_parameters": _by_type(config, keys.number("rope.freq_base_swa", 10_000.0)),
    }


def _gemma_embedding(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gemma3(keys, config), "use_bidirectional_attention": True}


def _glm4moe(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    _check_scoring(keys, SIGMOID)
    return {
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": keys.count("expert_shared_count") if keys.has("expert_shared_count") else 0,
        "first_k_dense_replace": _num_dense(keys),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _granite(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    if not keys.flag("rope.scaling.finetuned", default=True):
        raise keys.unsupported("rope.scaling.finetuned", "Granite models without positions are not supported")
    return {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": keys.number("logit_scale"),
    }


def _minimax_m2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    _check_scoring(keys, SIGMOID)
    return {"num_local_experts": config["num_experts"], "intermediate_size": config["moe_intermediate_size"]}


def _mistral3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Mistral Small 3 or, with a temperature that grows with the position, Ministral 3."""
    if not keys.has("attention.temperature_scale"):
        return {"sliding_window": None}
    growth = {"llama_4_scaling_beta": keys.number("attention.temperature_scale")}
    scaling = {**(config["rope_scaling"] or {}), **growth}
    return {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "rope_scaling": scaling}


def _olmo2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """OLMo 2 or, with windows, OLMo 3."""
    if not keys.has("attention.sliding_window"):
        return {}
    return {
        **keys.windows(config["num_hidden_layers"], 4),
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": _by_type(config, keys.number("rope.freq_base_swa", config["rope_theta"])),
    }


def _phi3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = keys.count("attention.sliding_window") if keys.has("attention.sliding_window") else None
    return {"original_max_position_embeddings": original, "sliding_window": window}


def _seed_oss(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    del config
    return {"attention_out_bias": keys.has_tensor("blk.0.attn_output.bias")}


def _num_dense(keys: Keys) -> int:
    return keys.count("leading_dense_block_count") if keys.has("leading_dense_block_count") else 0


def _check_scoring(keys: Keys, known: int) -> None:
    """Rejects a router that turns scores into weights in another way than the family's."""
    if keys.has("expert_gating_func") and keys.count("expert_gating_func") != known:
        raise keys.unsupported("expert_gating_func", f"of this family only {known} is supported")


def _by_type(config: Mapping[str, Any], windowed_theta: float) -> dict[str, Any]:
    """Layers with a window rotate by a theta of their own, without a scaling."""
    return {
        "full_attention": {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})},
        "sliding_attention": {"rope_type": "default", "rope_theta": windowed_theta},
    }


OPTIONS: Final[Mapping[str, Callable[[Keys, Mapping[str, Any]], dict[str, Any]]]] = {
    "cohere2": _cohere2,
    "ernie4_5-moe": _ernie4_5_moe,
    "exaone4": _exaone4,
    "gemma-embedding": _gemma_embedding,
    "gemma3": _gemma3,
    "glm4moe": _glm4moe,
    "granite": _granite,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "seed_oss": _seed_oss,
}
"""Architecture → its options, in addition to what all files have: (keys, config so far) → what the config gets."""
