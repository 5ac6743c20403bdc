"""The options of a family in GGUF metadata, as its `config.json` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from cortex.neuron.weights.gguf.keys import FLOAT32_DIGITS, Keys
from cortex.neuron.weights.gguf.recurrent_options import granitehybrid, lfm2, lfm2moe, nemotron_h

_GEMMA3_27B_LAYERS: Final = 62
"""The one Gemma 3 whose attention scale does not follow from the width of its heads, and files do not name it."""
_MAX_EXPERTS: Final = 1 << 12
"""Far above every published model; bounds the work for a damaged file."""
SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


def _cohere2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **keys.windows(config["num_hidden_layers"], 4),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
    }


def _deepseek2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek V3, Kimi K2 and GLM-4.7-Flash or, with a softmax router, DeepSeek V2. Files name the sizes of latents as
    those of a head, older ones those of a head itself."""
    num_dense, rope_dims = _num_dense(keys), keys.count("rope.dimension_count")
    groups = keys.count("expert_group_count", 1)
    kept = keys.count("expert_group_used_count", 1) if groups > 1 else 1
    query_dim = keys.count("attention.key_length_mla", config["head_dim"])
    if query_dim <= rope_dims:
        raise keys.malformed(f"rotates {rope_dims} of {query_dim} dimensions of a head")
    has_bias = keys.has_tensor(f"blk.{num_dense}.exp_probs_b.bias")
    is_sigmoid = keys.count("expert_gating_func", SIGMOID if has_bias else SOFTMAX) == SIGMOID
    _check_scoring(keys, SIGMOID if is_sigmoid else SOFTMAX)
    scaling = dict(config["rope_scaling"] or {})
    if "mscale" in scaling:  # files have a tenth of it
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(scaling["mscale"] * 10, FLOAT32_DIGITS))
    options = {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope_dims,
        "partial_rotary_factor": 1.0,
        "rope_scaling": scaling or None,
        "q_lora_rank": keys.count("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": query_dim - rope_dims,
        "qk_rope_head_dim": rope_dims,
        "v_head_dim": keys.count("attention.value_length_mla", keys.count("attention.value_length")),
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": keys.count("expert_shared_count") if keys.has("expert_shared_count") else 0,
        "n_group": groups,
        "topk_group": kept,
        "first_k_dense_replace": num_dense,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=False),
    }
    if is_sigmoid:
        return options
    method = "group_limited_greedy" if groups > kept else "greedy"
    return {
        **options,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": method,
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
    return {
        **keys.windows(config["num_hidden_layers"], 6),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "final_logit_softcapping": _optional_number(keys, "final_logit_softcapping"),
        "rope_parameters": _by_type(config, keys.number("rope.freq_base_swa", 10_000.0)),
    }


def _gemma_embedding(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gemma3(keys, config), "use_bidirectional_attention": True}


def _gemma4(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """What files say about heads is about layers without a window, and under names of their own about the others."""
    num_layers, inner = config["num_hidden_layers"], config["intermediate_size"]
    windows = keys.windows(num_layers, 6)
    full = [layer for layer, kind in enumerate(windows["layer_types"]) if kind == "full_attention"]
    kv_heads = keys.counts("attention.head_count_kv", num_layers, config["num_attention_heads"])
    num_readers = (
        keys.count("attention.shared_kv_layers", limit=num_layers - 1) if keys.has("attention.shared_kv_layers") else 0
    )
    inners, widths = keys.counts("feed_forward_length", num_layers), [inner] * num_layers
    is_wide = inners[-1] == 2 * inner
    if is_wide:
        widths[num_layers - num_readers :] = [2 * inner] * num_readers
    if inners != widths:
        raise keys.unsupported("feed_forward_length", "only the layers without KV of their own may be twice as wide")
    head_dim = keys.count("attention.key_length_swa", config["head_dim"])
    if keys.count("rope.dimension_count_swa", head_dim) != head_dim:
        raise keys.unsupported("rope.dimension_count_swa", f"only all {head_dim} dimensions of a head are supported")
    options = {
        **windows,
        "head_dim": head_dim,
        "per_layer_config": {
            str(layer): {
                "head_dim": config["head_dim"] if layer in full else head_dim,
                "num_key_value_heads": kv_heads[layer],
            }
            for layer in range(num_layers)
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": _optional_number(keys, "final_logit_softcapping"),
        "attention_k_eq_v": bool(full) and not keys.has_tensor(f"blk.{full[0]}.attn_v.weight"),
        "num_kv_shared_layers": num_readers,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": _by_type(config, keys.number("rope.freq_base_swa", 10_000.0)),
        "rope_scaling": None,
    }
    if keys.has("embedding_length_per_layer_input"):
        options["hidden_size_per_layer_input"] = keys.count("embedding_length_per_layer_input")
        options["vocab_size_per_layer_input"] = config["vocab_size"]
    if keys.has("expert_count"):
        options |= {
            "enable_moe_block": True,
            "num_experts": keys.count("expert_count", limit=_MAX_EXPERTS),
            "top_k_experts": keys.count("expert_used_count"),
            "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        }
    return options


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


def _gpt_oss(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **keys.windows(config["num_hidden_layers"], 2),
        "num_local_experts": config["num_experts"],
        "intermediate_size": config["moe_intermediate_size"],
        # Files do not name it.
        "rope_scaling": {**config["rope_scaling"], "truncate": False} if config["rope_scaling"] else None,
        "rope_parameters": {},
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


def _laguna(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    _check_scoring(keys, SIGMOID)
    num_layers, width = config["num_hidden_layers"], config["head_dim"]
    heads, num_dense = keys.counts("attention.head_count", num_layers), _num_dense(keys)
    ropes = _by_type(config, keys.number("rope.freq_base_swa", config["rope_theta"]))
    ropes["full_attention"]["partial_rotary_factor"] = config["partial_rotary_factor"]
    ropes["sliding_attention"]["partial_rotary_factor"] = keys.count("rope.dimension_count_swa", width) / width
    return {
        **keys.windows(num_layers, 4, is_first=True),
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if keys.num_rows("blk.0.attn_gate.weight") == heads[0] else "per-element",
        "mlp_layer_types": ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)],
        "moe_routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "rope_parameters": ropes,
    }


def _mellum(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    ropes = _by_type(config, keys.number("rope.freq_base_swa", config["rope_theta"]))
    windows = keys.windows(config["num_hidden_layers"], 4) if keys.has("attention.sliding_window") else {}
    return {**windows, "rope_parameters": ropes}


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


def _muse_glimmer(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without a window do not rotate. The scale of queries is the weight of a norm, which only files have."""
    windows = keys.windows(config["num_hidden_layers"], 4)
    return {
        **windows,
        "layer_rope_theta": [config["rope_theta"] * (kind == "sliding_attention") for kind in windows["layer_types"]],
        "output_multiplier": keys.number("logit_scale"),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "qk_norm_weights": True,
        "qk_scale_factor": 1.0,
    }


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


def _optional_number(keys: Keys, name: str) -> float | None:
    return keys.number(name) if keys.has(name) else None


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
    "deepseek2": _deepseek2,
    "ernie4_5-moe": _ernie4_5_moe,
    "exaone4": _exaone4,
    "gemma-embedding": _gemma_embedding,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm4moe": _glm4moe,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitehybrid": granitehybrid,
    "laguna": _laguna,
    "lfm2": lfm2,
    "lfm2moe": lfm2moe,
    "mellum": _mellum,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "muse-glimmer": _muse_glimmer,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "seed_oss": _seed_oss,
}
"""Architecture → its options, in addition to what all files have: (keys, config so far) → what the config gets."""
