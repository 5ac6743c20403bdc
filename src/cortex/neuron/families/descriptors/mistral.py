"""Mistral, Mistral Small 3 and Ministral 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.family import ModelFamily, ReasoningMarkers
from cortex.neuron.families.gguf import GGUFArchitecture, GGUFKeys
from cortex.neuron.families.splits import CL100K_WHOLE, Split, cased_words
from cortex.neuron.families.tool_calls import CallFrame, ToolSyntax, named_form
from cortex.neuron.vision.spec import PictureDefaults, PictureText

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
_REASONING: Final = ReasoningMarkers("[THINK]", "[/THINK]")


def _mistral3(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Mistral Small 3 or, with a temperature that grows with the position, Ministral 3."""
    if not keys.has("attention.temperature_scale"):
        return {"sliding_window": None}
    growth = {"llama_4_scaling_beta": keys.number("attention.temperature_scale")}
    scaling = {**(config["rope_scaling"] or {}), **growth}
    return {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "rope_scaling": scaling}


FAMILIES: Final = (
    ModelFamily(
        ("mistral",),
        tool_syntaxes=_SYNTAXES,
        reasoning=_REASONING,
        pretokenizers={"tekken": TEKKEN, "pixtral": CL100K_WHOLE},
        gguf=(GGUFArchitecture("mistral3", "MistralForCausalLM", _mistral3, is_interleaved=True),),
    ),
    ModelFamily(("ministral3",), tool_syntaxes=_SYNTAXES, reasoning=_REASONING, also_gguf=("mistral3",)),
    ModelFamily(
        ("mistral3",),
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
)
