"""Command R7B and Command A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.family import ModelFamily, ReasoningMarkers
from cortex.neuron.families.gguf import GGUFArchitecture, GGUFKeys
from cortex.neuron.families.splits import Split
from cortex.neuron.families.tool_calls import CallFrame, ToolSyntax

_COHERE_JSON: Final = ToolSyntax(
    "cohere_json",
    markers=(("<|START_ACTION|>",),),
    frame=CallFrame("<|START_ACTION|>", "[\n    ", "\n]", "<|END_ACTION|>", is_control=True),
    keys=("tool_name", "parameters"),
)


def _cohere2(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **keys.windows(config["num_hidden_layers"], 4),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
    }


FAMILIES: Final = (
    ModelFamily(
        ("cohere2",),
        "Command R7B, Command A",
        rotates_neighbours=True,
        tool_syntaxes=(_COHERE_JSON,),
        reasoning=ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
        pretokenizers={"command-r": Split(single_digits=True, normal_form_c=True)},
        gguf=(GGUFArchitecture("cohere2", _cohere2, norm_eps=1e-6),),
    ),
)
