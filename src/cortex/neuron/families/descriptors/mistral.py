"""Mistral, Mistral Small 3, Ministral 3 and Phi-3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.family import THINK, ModelFamily, ReasoningMarkers
from cortex.neuron.families.gguf import FUSED, GGUFArchitecture, GGUFKeys
from cortex.neuron.families.splits import CL100K_WHOLE, Split, cased_words
from cortex.neuron.families.tool_calls import HERMES_JSON, CallFrame, ToolSyntax, named_form
from cortex.neuron.pictures.spec import PictureDefaults, PictureText

TEKKEN: Final = Split((cased_words(r"\p{N}", suffix=""),), whole_words_first=True)
_HEAD: Final = r"NAME (?:\[CALL_ID\] [\w-]+)? (?:\[ARGS\])?"
_SYNTAXES: Final = (
    ToolSyntax(
        "mistral",
        "named",
        (("[TOOL_CALLS]", "[ARGS]"),),
        frame=CallFrame("[TOOL_CALLS]", "", "", "", is_control=True),
        named=named_form(_HEAD, between=("[ARGS]",), also="[CALL_ID]"),
    ),
    ToolSyntax(
        "mistral_json",
        markers=(("[TOOL_CALLS]",),),
        frame=CallFrame("[TOOL_CALLS]", "[", "]", "", is_control=True),
        named=named_form(_HEAD, also="[ARGS]"),
    ),
)
_PHI_JSON: Final = ToolSyntax(
    "phi_json",
    markers=(("<|/tool_call|>",),),
    frame=CallFrame("<|tool_call|>", "[", "]", "<|/tool_call|>", is_control=True),
)
_REASONING: Final = ReasoningMarkers("[THINK]", "[/THINK]")


def _mistral3(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Mistral Small 3 or, with a temperature that grows with the position, Ministral 3."""
    if not keys.has("attention.temperature_scale"):
        return {"sliding_window": None}
    growth = {"llama_4_scaling_beta": keys.number("attention.temperature_scale")}
    scaling = {**(config["rope_scaling"] or {}), **growth}
    return {"model_type": "ministral3", "rope_scaling": scaling}


def _phi3(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = keys.count("attention.sliding_window") if keys.has("attention.sliding_window") else None
    return {"original_max_position_embeddings": original, "sliding_window": window}


FAMILIES: Final = (
    ModelFamily(
        ("mistral",),
        "Mistral",
        tool_syntaxes=_SYNTAXES,
        reasoning=_REASONING,
        pretokenizers={"tekken": TEKKEN, "pixtral": CL100K_WHOLE},
        gguf=(GGUFArchitecture("mistral3", _mistral3, is_interleaved=True),),
    ),
    ModelFamily(("ministral3",), "Ministral 3", tool_syntaxes=_SYNTAXES, reasoning=_REASONING, also_gguf=("mistral3",)),
    ModelFamily(
        ("mistral3",),
        "Mistral Small 3.1 and later, Ministral 3",
        tool_syntaxes=_SYNTAXES,
        reasoning=_REASONING,
        pictures=PictureDefaults(
            "edge",
            PictureText("[IMG]", "[IMG]", row_end="[IMG_BREAK]", end="[IMG_END]"),
            most=1540,
            patch=14,
            mean=(0.48145466, 0.4578275, 0.40821073),
            std=(0.26862954, 0.26130258, 0.27577711),
        ),
        tower="pixtral",
        projectors={"pixtral": ("llama", "mistral", "ministral3")},
    ),
    ModelFamily(
        ("phi3",),
        "Phi-3, Phi-4",
        tool_syntaxes=(_PHI_JSON, HERMES_JSON),
        reasoning=THINK,
        gguf=(GGUFArchitecture("phi3", _phi3, FUSED, rotates_part=True),),
    ),
)
