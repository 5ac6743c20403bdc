"""LFM2, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.family import THINK, ModelFamily
from cortex.neuron.families.gguf import (
    SIGMOID,
    GGUFArchitecture,
    GGUFKeys,
    Options,
    check_scoring,
    experts,
    layer_types,
    num_dense,
)
from cortex.neuron.families.splits import CL100K_WHOLE
from cortex.neuron.families.tool_calls import CallFrame, ToolSyntax

_CALLS: Final = ToolSyntax(
    "lfm2",
    "python",
    (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    frame=CallFrame("<|tool_call_start|>", "[", "]", "<|tool_call_end|>", is_control=True),
)
_NAMES: Final = {
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".self_attn.q_layernorm.": ".self_attn.q_norm.",
    ".self_attn.k_layernorm.": ".self_attn.k_norm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
}


def _lfm2(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": layer_types(keys, config, "conv"),
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "intermediate_size": keys.count("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    check_scoring(keys, SIGMOID)
    dense = num_dense(keys)
    return {
        **_lfm2(keys, config),
        **experts(keys),
        "num_dense_layers": dense,
        "use_expert_bias": keys.has_tensor(f"blk.{dense}.exp_probs_b.bias"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def _architecture(name: str, options: Options) -> GGUFArchitecture:
    return GGUFArchitecture(name, options, mixer="short_convolution", last_norm="token_embd_norm")


FAMILIES: Final = (
    ModelFamily(
        ("lfm2",),
        "LFM2",
        tensor_names=_NAMES,
        tool_syntaxes=(_CALLS,),
        reasoning=THINK,
        pretokenizers={"lfm2": CL100K_WHOLE},
        gguf=(_architecture("lfm2", _lfm2),),
    ),
    ModelFamily(
        ("lfm2_moe",),
        "LFM2-MoE",
        tensor_names={
            **_NAMES,
            ".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias",
            ".feed_forward.": ".mlp.",
            ".w1.weight": ".gate_proj.weight",
            ".w2.weight": ".down_proj.weight",
            ".w3.weight": ".up_proj.weight",
        },
        tool_syntaxes=(_CALLS,),
        reasoning=THINK,
        gguf=(_architecture("lfm2moe", _lfm2moe),),
    ),
)
