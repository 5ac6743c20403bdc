"""Muse Glimmer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from cortex.neuron.families.family import ADDRESSED, ModelFamily
from cortex.neuron.families.gguf import AROUND_BLOCKS, GGUFArchitecture, GGUFKeys
from cortex.neuron.families.tool_calls import CallFrame, TagForm, tagged


def _muse_glimmer(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
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


_MUSE_TEXT: Final = ModelFamily(
    ("muse_glimmer_text",),
    "Muse Glimmer",
    tool_syntaxes=(
        tagged(
            "muse_xml",
            "<atem:function_calls>",
            form=TagForm(
                CallFrame("<atem:function_calls>", "\n", "\n", "</atem:function_calls>"),
                *("<atem:invoke name=", ">", "</atem:invoke>"),
                *("<atem:parameter name=", (">",), "</atem:parameter>"),
                quote='"',
            ),
        ),
    ),
    reasoning=ADDRESSED,
    gguf=(
        GGUFArchitecture(
            "muse-glimmer",
            _muse_glimmer,
            {**AROUND_BLOCKS, "attn_gate": "self_attn.gate_proj"},
            is_interleaved=True,
            norms="plus_one_but_last",
        ),
    ),
)

FAMILIES: Final = (_MUSE_TEXT, replace(_MUSE_TEXT, model_types=("muse_glimmer",), gguf=()))
