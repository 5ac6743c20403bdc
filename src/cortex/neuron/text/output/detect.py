"""Detects the syntax of a model's output from its chat template.

A template writes the tool calls and reasoning of earlier turns in the model's own syntax, so it contains the markers.
The first row of this table that applies decides:

| the template contains | tool calls are parsed as |
|---|---|
| `<|channel|>` and `<|message|>` | harmony (`output/harmony.py`): `<|channel|>commentary to=functions.f<|message|>{` |
| `<atem:function_calls>` | Muse XML: `<atem:function_calls><atem:invoke name="f"><atem:parameter name="p">…` |
| `<minimax:tool_call>` | MiniMax XML: `<minimax:tool_call><invoke name="f"><parameter name="p">…` |
| `<seed:tool_call>` | Seed XML: `<seed:tool_call><function=f><parameter=p>…` |
| `<arg_key>` | GLM XML: `<tool_call>f<arg_key>p</arg_key><arg_value>…` |
| `<function=` | Qwen XML: `<tool_call><function=f><parameter=p>…` |
| `[TOOL_CALLS]` and `[ARGS]` | Mistral: `[TOOL_CALLS]f[ARGS]{…}` |
| `[TOOL_CALLS]` | Mistral JSON: `[TOOL_CALLS][{"name": …, "arguments": …}]` |
| `<|tool_call_start|>` or `<|tool_list_start|>` | LFM2: `<|tool_call_start|>[f(p=1)]<|tool_call_end|>` |
| `<function_calls>` | OLMo: `<function_calls>f(p=1)</function_calls>` |
| `<|tool_call>` | Gemma: `<|tool_call>call:f{p:1}<tool_call|>` |
| `<|/tool_call|>` | Phi JSON: `<|tool_call|>[{"name": …, "arguments": …}]<|/tool_call|>` |
| `<|tool_call|>` | Granite JSON: `<|tool_call|>[{"name": …, "arguments": …}]` |
| `<|START_ACTION|>` | Cohere JSON: `<|START_ACTION|>[{"tool_name": …, "parameters": …}]<|END_ACTION|>` |
| `<tool_calls>` | Hunyuan JSON: `<tool_calls>[{"name": …, "arguments": …}]</tool_calls>` |
| `<tool_call>` | Hermes JSON: `<tool_call>{"name": …, "arguments": …}</tool_call>` |
| `<|python_tag|>`, or both `"name"` and `"parameters"` spelled out | Llama JSON: `{"name": …, "parameters": …}` |
| the variable `tools`, and none of these | plain JSON: `{"name": …, "arguments": …}` |
| no variable `tools` | Hermes JSON, as `template/generic_tools.py` describes it to the model |

A model whose template contains one of the pairs in `REASONING_MARKERS` writes its reasoning between them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cortex.neuron.text.template.chat_template import ChatTemplate


class ToolSyntax(StrEnum):
    HARMONY = "harmony"
    MUSE_XML = "muse_xml"
    MINIMAX_XML = "minimax_xml"
    SEED_XML = "seed_xml"
    GLM_XML = "glm_xml"
    QWEN_XML = "qwen_xml"
    MISTRAL = "mistral"
    MISTRAL_JSON = "mistral_json"
    LFM2 = "lfm2"
    OLMO = "olmo"
    GEMMA = "gemma"
    PHI_JSON = "phi_json"
    GRANITE_JSON = "granite_json"
    COHERE_JSON = "cohere_json"
    HUNYUAN_JSON = "hunyuan_json"
    HERMES_JSON = "hermes_json"
    LLAMA_JSON = "llama_json"
    PLAIN_JSON = "plain_json"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What a model writes before and after its reasoning."""

    open: str
    close: str
    follow: str = "\n\n"
    """What the model writes between its reasoning and its response."""


ADDRESSED: Final = ReasoningMarkers("to=self<|message|>", "<|eom|>", "<|start|>assistant")
"""Of models that address each message (`output/addressed.py`)."""

REASONING_MARKERS: Final = (
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("[THINK]", "[/THINK]"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),
    ReasoningMarkers("<thinking>", "</thinking>"),
    ReasoningMarkers("<reasoning>", "</reasoning>"),
    ReasoningMarkers("<thought>", "</thought>"),
    ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarkers("<|channel>thought", "<channel|>"),
    ADDRESSED,
)

PYTHON_TAG: Final = "<|python_tag|>"
TOOL_CALL_OPEN: Final = "<tool_call>"
TOOL_CALL_CLOSE: Final = "</tool_call>"

_SPELLS_NAME: Final = re.compile(r"""\\?["']name\\?["']\s*:""")
_SPELLS_PARAMETERS: Final = re.compile(r"""\\?["']parameters\\?["']\s*:""")


MARKERS: Final = (
    (("<|channel|>", "<|message|>"), ToolSyntax.HARMONY),
    (("<atem:function_calls>",), ToolSyntax.MUSE_XML),
    (("<minimax:tool_call>",), ToolSyntax.MINIMAX_XML),
    (("<seed:tool_call>",), ToolSyntax.SEED_XML),
    (("<arg_key>",), ToolSyntax.GLM_XML),
    (("<function=",), ToolSyntax.QWEN_XML),
    (("[TOOL_CALLS]", "[ARGS]"), ToolSyntax.MISTRAL),
    (("[TOOL_CALLS]",), ToolSyntax.MISTRAL_JSON),
    (("<|tool_call_start|>",), ToolSyntax.LFM2),
    (("<|tool_list_start|>",), ToolSyntax.LFM2),
    (("<function_calls>",), ToolSyntax.OLMO),
    (("<|tool_call>",), ToolSyntax.GEMMA),
    (("<|/tool_call|>",), ToolSyntax.PHI_JSON),
    (("<|tool_call|>",), ToolSyntax.GRANITE_JSON),
    (("<|START_ACTION|>",), ToolSyntax.COHERE_JSON),
    (("<tool_calls>",), ToolSyntax.HUNYUAN_JSON),
    ((TOOL_CALL_OPEN,), ToolSyntax.HERMES_JSON),
    ((PYTHON_TAG,), ToolSyntax.LLAMA_JSON),
)
"""What a template contains, and the syntax that this means."""


def tool_syntax(template: ChatTemplate) -> ToolSyntax:
    if not template.takes_tools:
        return ToolSyntax.HERMES_JSON
    for markers, syntax in MARKERS:
        if all(map(template.mentions, markers)):
            return syntax
    if _SPELLS_NAME.search(template.source) and _SPELLS_PARAMETERS.search(template.source):
        return ToolSyntax.LLAMA_JSON
    return ToolSyntax.PLAIN_JSON


def reasoning_markers(template: ChatTemplate) -> ReasoningMarkers | None:
    # The closing marker decides: a template that strips old reasoning contains it.
    return next((markers for markers in REASONING_MARKERS if template.mentions(markers.close)), None) or next(
        (markers for markers in REASONING_MARKERS if template.mentions(markers.open)), None
    )
