"""Nemotron-H and Nemotron 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.descriptors.qwen import QWEN_XML
from cortex.neuron.families.family import THINK, ModelFamily
from cortex.neuron.families.gguf import SHARED_EXPERT, GGUFArchitecture, GGUFKeys, experts, mamba
from cortex.neuron.families.tool_calls import framed_json


def _nemotron_h(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
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
    ssm = mamba(keys, config)
    return {
        "layers_block_type": types,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "intermediate_size": max(widths) or None,
        "mamba_num_heads": ssm["heads"],
        "mamba_head_dim": ssm["inner"] // ssm["heads"],
        "n_groups": ssm["groups"],
        "ssm_state_size": ssm["state"],
        "conv_kernel": ssm["taps"],
        "use_conv_bias": ssm["has_bias"],
        **(_nemotron_experts(keys) if has_experts else {}),
    }


def _nemotron_experts(keys: GGUFKeys) -> dict[str, Any]:
    found = experts(keys)
    return {
        "n_routed_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "norm_topk_prob": found["norm_topk_prob"],
        "moe_shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.count("expert_group_count", 1),
        "moe_latent_size": keys.count("moe_latent_size") if keys.has("moe_latent_size") else None,
    }


FAMILIES: Final = (
    ModelFamily(
        ("nemotron_h",),
        "Nemotron-H, Nemotron 3",
        tensor_names={
            "backbone.embeddings.": "model.embed_tokens.",
            "backbone.norm_f.": "model.norm.",
            "backbone.layers.": "model.layers.",
            **{f".mixer.{part}": f".self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")},
            **{
                f".mixer.{part}": f".mamba.{part}"
                for part in ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")
            },
            ".mixer.shared_experts.": ".mlp.shared_expert.",
            ".mixer.": ".mlp.",
        },
        tool_syntaxes=(QWEN_XML, framed_json("nemotron_json", "<TOOLCALL>", "</TOOLCALL>", precedence=3)),
        reasoning=THINK,
        gguf=(
            GGUFArchitecture("nemotron_h", _nemotron_h, {"attn_norm": "norm"}, mixer="mamba"),
            GGUFArchitecture(
                "nemotron_h_moe",
                _nemotron_h,
                {
                    **SHARED_EXPERT,
                    "attn_norm": "norm",
                    "ffn_latent_down": "mlp.fc1_latent_proj",
                    "ffn_latent_up": "mlp.fc2_latent_proj",
                },
                mixer="mamba",
            ),
        ),
    ),
)
