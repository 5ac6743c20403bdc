"""Granite, dense and hybrid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.family import THINK, ModelFamily
from cortex.neuron.families.gguf import MAX_EXPERTS, SHARED_EXPERT, GGUFArchitecture, GGUFKeys, layer_types, mamba
from cortex.neuron.families.tool_calls import HERMES_JSON, framed_json


def _granite(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    if not keys.flag("rope.scaling.finetuned", default=True):
        raise keys.unsupported("rope.scaling.finetuned", "Granite models without positions are not supported")
    return {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": keys.number("logit_scale"),
    }


def _granitehybrid(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    experts = keys.count("expert_count", limit=MAX_EXPERTS) if keys.has("expert_count") else 0
    ssm = mamba(keys, config)
    if ssm["inner"] % config["hidden_size"]:
        raise keys.malformed(f"has {ssm['inner']} values of Mamba for a width of {config['hidden_size']}")
    inner = keys.count("feed_forward_length")
    return {
        "layer_types": layer_types(keys, config, "linear_attention"),
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", default=False) else None,
        "num_local_experts": experts,
        "num_experts_per_tok": keys.count("expert_used_count") if experts else 0,
        "intermediate_size": inner,
        "shared_intermediate_size": keys.count("expert_shared_feed_forward_length") if experts else inner,
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "mamba_n_heads": ssm["heads"],
        "mamba_n_groups": ssm["groups"],
        "mamba_d_state": ssm["state"],
        "mamba_d_conv": ssm["taps"],
        "mamba_expand": ssm["inner"] // config["hidden_size"],
        "mamba_conv_bias": ssm["has_bias"],
    }


FAMILIES: Final = (
    ModelFamily(
        ("granite",),
        "Granite 3 and 4, dense",
        tool_syntaxes=(framed_json("granite_json", "<|tool_call|>", "", is_control=True, precedence=1), HERMES_JSON),
        reasoning=THINK,
        gguf=(GGUFArchitecture("granite", _granite, is_interleaved=True),),
    ),
    ModelFamily(
        ("granitemoehybrid",),
        "Granite 4",
        tensor_names={
            ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
            ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
            ".block_sparse_moe.router.layer.": ".mlp.gate.",
            ".shared_mlp.input_linear.": ".mlp.shared_expert.gate_up_proj.",
            ".shared_mlp.output_linear.": ".mlp.shared_expert.down_proj.",
        },
        gguf=(GGUFArchitecture("granitehybrid", _granitehybrid, SHARED_EXPERT, mixer="mamba", is_interleaved=True),),
    ),
)
