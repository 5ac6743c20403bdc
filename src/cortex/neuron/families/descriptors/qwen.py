"""Qwen2.5 to Qwen3.5, and Mellum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from cortex.neuron.families.family import THINK, ModelFamily
from cortex.neuron.families.gguf import SHARED_EXPERT, GGUFArchitecture, GGUFKeys, ropes_by_type
from cortex.neuron.families.splits import DIGITS, GPT2, ONE_DIGIT_NFC, Split, words
from cortex.neuron.families.tool_calls import HERMES_JSON, TOOL_CALL, TagForm, tagged
from cortex.neuron.pictures.spec import PictureDefaults, PictureText

QWEN_XML: Final = replace(
    tagged(
        "qwen_xml",
        "<function=",
        form=TagForm(
            TOOL_CALL, *("<function=", ">", "</function>"), *("<parameter=", (">",), "</parameter>"), value_break="\n"
        ),
    ),
    precedence=1,
)
_HYBRID: Final = {
    **SHARED_EXPERT,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_PICTURES: Final = PictureDefaults("area", PictureText("<|image_pad|>", "<|image_pad|>"), most=16_777_216, least=65_536)
_PROJECTOR: Final = "qwen3vl_merger"
# Combining marks stay with their letters, which matters for Indic and Thai scripts.
_QWEN35_WORDS: Final = words(r"\p{N}", r"[\p{L}\p{M}]", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")


def _hybrid(name: str, *, is_mixture: bool = False, is_tiled: bool = False) -> GGUFArchitecture:
    """Gated delta nets, whose own tensors `weights/gguf/recurrent.py` names."""
    return GGUFArchitecture(
        name,
        tensor_names=_HYBRID,
        is_mixture=is_mixture,
        is_tiled=is_tiled,
        mixer="gated_delta",
        rotates_part=True,
        norms="plus_one",
        head="mtp",
    )


def _mellum(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    ropes = ropes_by_type(config, keys.number("rope.freq_base_swa", config["rope_theta"]))
    windows = keys.windows(config["num_hidden_layers"], 4) if keys.has("attention.sliding_window") else {}
    return {**windows, "rope_parameters": ropes}


FAMILIES: Final = (
    ModelFamily(
        ("qwen2",),
        "Qwen2, Qwen2.5",
        reasoning=THINK,
        pretokenizers=dict.fromkeys(("qwen2", "deepseek-r1-qwen"), ONE_DIGIT_NFC),
        gguf=(GGUFArchitecture("qwen2"),),
    ),
    ModelFamily(
        ("qwen3",),
        "Qwen3",
        reasoning=THINK,
        gguf=(GGUFArchitecture("qwen3"), GGUFArchitecture("qwen3vl")),
        may_rerank=True,
    ),
    ModelFamily(
        ("qwen3_moe",),
        "Qwen3-MoE, Qwen3-Coder",
        tool_syntaxes=(HERMES_JSON, QWEN_XML),
        reasoning=THINK,
        gguf=(GGUFArchitecture("qwen3moe", is_mixture=True), GGUFArchitecture("qwen3vlmoe", is_mixture=True)),
    ),
    ModelFamily(
        ("qwen3_vl",),
        "Qwen3-VL",
        reasoning=THINK,
        pictures=_PICTURES,
        tower="qwen",
        projectors={_PROJECTOR: ("qwen3",)},
    ),
    ModelFamily(
        ("qwen3_vl_moe",),
        "Qwen3-VL-MoE",
        experts="by_columns",
        reasoning=THINK,
        pictures=_PICTURES,
        tower="qwen",
        projectors={_PROJECTOR: ("qwen3_moe",)},
    ),
    ModelFamily(("qwen3_next",), "Qwen3-Next", reasoning=THINK, gguf=(_hybrid("qwen3next", is_mixture=True),)),
    ModelFamily(
        ("qwen3_5_text",),
        "Qwen3.5",
        tool_syntaxes=(QWEN_XML,),
        reasoning=THINK,
        pretokenizers={"qwen35": Split((_QWEN35_WORDS,), normal_form_c=True)},
        gguf=(_hybrid("qwen35", is_tiled=True),),
    ),
    ModelFamily(
        ("qwen3_5_moe_text",),
        "Qwen3.5-MoE",
        tool_syntaxes=(QWEN_XML,),
        reasoning=THINK,
        gguf=(_hybrid("qwen35moe", is_mixture=True, is_tiled=True),),
    ),
    ModelFamily(
        ("qwen3_5",),
        "Qwen3.5",
        tool_syntaxes=(QWEN_XML,),
        reasoning=THINK,
        pictures=_PICTURES,
        tower="qwen",
        projectors={_PROJECTOR: ("qwen3_5_text",)},
    ),
    ModelFamily(
        ("qwen3_5_moe",),
        "Qwen3.5-MoE",
        tool_syntaxes=(QWEN_XML,),
        reasoning=THINK,
        pictures=_PICTURES,
        tower="qwen",
        projectors={_PROJECTOR: ("qwen3_5_moe_text",)},
    ),
    ModelFamily(
        ("mellum",),
        "Mellum 2",
        pretokenizers={"mellum": GPT2, "mellum2": DIGITS},
        gguf=(GGUFArchitecture("mellum", _mellum, is_mixture=True),),
    ),
)
