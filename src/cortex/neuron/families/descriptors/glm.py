"""GLM-4 to GLM-4.7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.descriptors.deepseek import SHARED_NAMES
from cortex.neuron.families.family import THINK, ModelFamily
from cortex.neuron.families.gguf import (
    FUSED,
    SHARED_EXPERT,
    SIGMOID,
    GGUFArchitecture,
    GGUFKeys,
    check_scoring,
    num_dense,
    optional_count,
)
from cortex.neuron.families.splits import CL100K
from cortex.neuron.families.tool_calls import NAME_LINE, TOOL_CALL, CallFrame, TagForm, tagged

GLM_XML: Final = tagged(
    "glm_xml",
    "<arg_key>",
    form=TagForm(
        CallFrame(TOOL_CALL.opening, "", "", TOOL_CALL.closing),
        *("", "", TOOL_CALL.closing),
        *("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"),
    ),
)


def _glm4moe(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    check_scoring(keys, SIGMOID)
    return {
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": optional_count(keys, "expert_shared_count"),
        "first_k_dense_replace": num_dense(keys),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


FAMILIES: Final = (
    ModelFamily(
        ("glm4",),
        "GLM-4",
        rotates_neighbours=True,
        head_dim=128,
        rotated_fraction=0.5,
        tool_syntaxes=(NAME_LINE,),
        reasoning=THINK,
        pretokenizers=dict.fromkeys(("glm4", "chatglm-bpe"), CL100K),
        gguf=(
            GGUFArchitecture(
                "glm4",
                tensor_names={
                    **FUSED,
                    "post_attention_norm": "post_self_attn_layernorm",
                    "post_ffw_norm": "post_mlp_layernorm",
                },
                rotates_part=True,
            ),
        ),
    ),
    ModelFamily(
        ("glm4_moe",),
        "GLM-4.5 to 4.7",
        tensor_names=SHARED_NAMES,
        tool_syntaxes=(GLM_XML,),
        reasoning=THINK,
        gguf=(
            GGUFArchitecture(
                "glm4moe",
                _glm4moe,
                {**SHARED_EXPERT, "post_attention_norm": "post_attention_layernorm"},
                is_mixture=True,
                rotates_part=True,
                head="layer",
            ),
        ),
    ),
    ModelFamily(
        ("glm4_moe_lite",),
        "GLM-4.7-Flash",
        tensor_names=SHARED_NAMES,
        tool_syntaxes=(GLM_XML,),
        reasoning=THINK,
        also_gguf=("deepseek2",),
    ),
)
