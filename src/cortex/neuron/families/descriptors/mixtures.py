"""Families with experts and one published line each: gpt-oss, MiniMax-M2, Laguna and ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.descriptors.glm import GLM_XML
from cortex.neuron.families.family import THINK, ModelFamily, ReasoningMarkers
from cortex.neuron.families.gguf import (
    SHARED_EXPERT,
    SIGMOID,
    SOFTMAX,
    GGUFArchitecture,
    GGUFKeys,
    check_scoring,
    num_dense,
    optional_count,
    ropes_by_type,
)
from cortex.neuron.families.splits import O200K, ONE_DIGIT, Split
from cortex.neuron.families.tool_calls import HARMONY, CallFrame, TagForm, tagged


def _gpt_oss(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **keys.windows(config["num_hidden_layers"], 2),
        "num_local_experts": config["num_experts"],
        "intermediate_size": config["moe_intermediate_size"],
        # Files do not name it.
        "rope_scaling": {**config["rope_scaling"], "truncate": False} if config["rope_scaling"] else None,
        "rope_parameters": {},
    }


def _minimax_m2(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    check_scoring(keys, SIGMOID)
    return {"num_local_experts": config["num_experts"], "intermediate_size": config["moe_intermediate_size"]}


def _laguna(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    check_scoring(keys, SIGMOID)
    num_layers, width = config["num_hidden_layers"], config["head_dim"]
    heads, dense = keys.counts("attention.head_count", num_layers), num_dense(keys)
    ropes = ropes_by_type(config, keys.number("rope.freq_base_swa", config["rope_theta"]))
    ropes["full_attention"]["partial_rotary_factor"] = config["partial_rotary_factor"]
    ropes["sliding_attention"]["partial_rotary_factor"] = keys.count("rope.dimension_count_swa", width) / width
    return {
        **keys.windows(num_layers, 4, is_first=True),
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if keys.num_rows("blk.0.attn_gate.weight") == heads[0] else "per-element",
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(num_layers)],
        "moe_routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "rope_parameters": ropes,
    }


def _ernie4_5_moe(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    check_scoring(keys, SOFTMAX)
    return {
        "moe_num_experts": config["num_experts"],
        "moe_k": config["num_experts_per_tok"],
        "moe_num_shared_experts": optional_count(keys, "expert_shared_count"),
        "moe_layer_start_index": num_dense(keys),
        "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
    }


FAMILIES: Final = (
    ModelFamily(
        ("gpt_oss",),
        "gpt-oss",
        tensor_names={".mlp.router.": ".mlp.gate."},
        experts="interleaved",
        tool_syntaxes=(HARMONY,),
        reasoning=ReasoningMarkers("<|channel|>analysis", ""),
        gguf=(
            GGUFArchitecture("gpt-oss", _gpt_oss, {"post_attention_norm": "post_attention_layernorm"}, is_mixture=True),
        ),
    ),
    ModelFamily(
        ("minimax_m2",),
        "MiniMax-M2",
        tensor_names={
            ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
            ".block_sparse_moe.": ".mlp.",
            ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
            ".w1.weight": ".gate_proj.weight",
            ".w2.weight": ".down_proj.weight",
            ".w3.weight": ".up_proj.weight",
        },
        tool_syntaxes=(
            tagged(
                "minimax_xml",
                "<minimax:tool_call>",
                form=TagForm(
                    CallFrame("<minimax:tool_call>", "\n", "\n", "</minimax:tool_call>"),
                    *("<invoke name=", ">", "</invoke>"),
                    *("<parameter name=", (">",), "</parameter>"),
                    quote='"',
                ),
            ),
        ),
        reasoning=THINK,
        pretokenizers={"minimax-m2": O200K},
        gguf=(GGUFArchitecture("minimax-m2", _minimax_m2, is_mixture=True, rotates_part=True),),
    ),
    ModelFamily(
        ("laguna",),
        "Laguna",
        tensor_names={
            ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
            ".mlp.experts.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
            ".mlp.shared_experts.": ".mlp.shared_expert.",
        },
        tool_syntaxes=(GLM_XML,),
        reasoning=THINK,
        pretokenizers={"laguna": Split((r"[^\n]+|\n+", *ONE_DIGIT.patterns))},
        gguf=(
            GGUFArchitecture(
                "laguna",
                _laguna,
                {**SHARED_EXPERT, "attn_gate": "self_attn.g_proj"},
                is_mixture=True,
                rotates_part=True,
                heads_by_layer=True,
            ),
        ),
    ),
    ModelFamily(
        ("ernie4_5",), "ERNIE 4.5, dense", rotates_neighbours=True, head_dim=128, gguf=(GGUFArchitecture("ernie4_5"),)
    ),
    ModelFamily(
        ("ernie4_5_moe",),
        "ERNIE 4.5",
        tensor_names={
            ".mlp.moe_statics.": ".mlp.gate.",
            ".mlp.gate.moe_statics.": ".mlp.gate.",
            ".mlp.shared_experts.": ".mlp.shared_expert.",
        },
        rotates_neighbours=True,
        reasoning=THINK,
        gguf=(GGUFArchitecture("ernie4_5-moe", _ernie4_5_moe, SHARED_EXPERT, is_mixture=True),),
    ),
)
