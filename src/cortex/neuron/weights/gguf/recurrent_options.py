"""The options of families with recurrent layers (other than gated delta nets) in GGUF metadata, as their `config.json`
has them. Which layers have attention follows from the key-value heads of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex.neuron.weights.gguf.keys import Keys

_SIGMOID = 2
"""A value of `expert_gating_func`."""
_MAX_EXPERTS = 1 << 12
_MAX_HEADS = 1 << 14


def lfm2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": _types(keys, config, "conv"),
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2moe(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    if keys.has("expert_gating_func") and keys.count("expert_gating_func") != _SIGMOID:
        raise keys.unsupported("expert_gating_func", f"of this family only {_SIGMOID} is supported")
    dense = keys.count("leading_dense_block_count") if keys.has("leading_dense_block_count") else 0
    return {
        **lfm2(keys, config),
        **_experts(keys),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_dense_layers": dense,
        "use_expert_bias": keys.has_tensor(f"blk.{dense}.exp_probs_b.bias"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def granitehybrid(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    experts = keys.count("expert_count", limit=_MAX_EXPERTS) if keys.has("expert_count") else 0
    mamba = _mamba(keys, config)
    if mamba["inner"] % config["hidden_size"]:
        raise keys.malformed(f"has {mamba['inner']} values of Mamba for a width of {config['hidden_size']}")
    inner = keys.count("feed_forward_length")
    return {
        "layer_types": _types(keys, config, "linear_attention"),
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", default=False) else None,
        "num_local_experts": experts,
        "num_experts_per_tok": keys.count("expert_used_count") if experts else 0,
        "intermediate_size": inner,
        "shared_intermediate_size": keys.count("expert_shared_feed_forward_length") if experts else inner,
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "mamba_n_heads": mamba["heads"],
        "mamba_n_groups": mamba["groups"],
        "mamba_d_state": mamba["state"],
        "mamba_d_conv": mamba["taps"],
        "mamba_expand": mamba["inner"] // config["hidden_size"],
        "mamba_conv_bias": mamba["has_bias"],
    }


def nemotron_h(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """A layer without key-value heads is Mamba, or a feed-forward block where it has a width."""
    num_layers = config["num_hidden_layers"]
    kv_heads = keys.layer_counts("attention.head_count_kv", num_layers)
    widths = keys.layer_counts("feed_forward_length", num_layers)
    has_experts = keys.has("expert_count")
    types = []
    for index in range(num_layers):
        if kv_heads[index]:
            types.append("full_attention")
        elif not widths[index]:
            types.append("linear_attention")
        else:
            types.append("moe" if keys.has_tensor(f"blk.{index}.ffn_gate_inp.weight") else "mlp")
    mamba = _mamba(keys, config)
    return {
        "layers_block_type": types,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "intermediate_size": max(widths) or None,
        "mamba_num_heads": mamba["heads"],
        "mamba_head_dim": mamba["inner"] // mamba["heads"],
        "n_groups": mamba["groups"],
        "ssm_state_size": mamba["state"],
        "conv_kernel": mamba["taps"],
        "use_conv_bias": mamba["has_bias"],
        **(_nemotron_experts(keys) if has_experts else {}),
    }


def _nemotron_experts(keys: Keys) -> dict[str, Any]:
    experts = _experts(keys)
    return {
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "norm_topk_prob": experts["norm_topk_prob"],
        "moe_shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.count("expert_group_count", 1),
        "moe_latent_size": keys.count("moe_latent_size") if keys.has("moe_latent_size") else None,
    }


def _experts(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.count("expert_count", limit=_MAX_EXPERTS),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
    }


def _mamba(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    heads, inner = keys.count("ssm.time_step_rank", limit=_MAX_HEADS), keys.count("ssm.inner_size")
    if inner % heads:
        raise keys.malformed(f"has {inner} values of Mamba for {heads} heads, which do not divide")
    layers = range(config["num_hidden_layers"])
    return {
        "heads": heads,
        "inner": inner,
        "groups": keys.count("ssm.group_count", limit=_MAX_HEADS),
        "state": keys.count("ssm.state_size"),
        "taps": keys.count("ssm.conv_kernel"),
        "has_bias": any(keys.has_tensor(f"blk.{layer}.ssm_conv1d.bias") for layer in layers),
    }


def _types(keys: Keys, config: Mapping[str, Any], other: str) -> list[str]:
    kv_heads = keys.layer_counts("attention.head_count_kv", config["num_hidden_layers"])
    return ["full_attention" if count else other for count in kv_heads]
