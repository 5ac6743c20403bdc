"""Detects the syntax of a model's output from its chat template.

A template writes the tool calls and reasoning of earlier turns in the model's own syntax, so it contains the markers:

| the template contains | tool calls are parsed as |
|---|---|
| `<function=` | Qwen XML: `<tool_call><function=f><parameter=p>…` |
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
    QWEN_XML = "qwen_xml"
    HERMES_JSON = "hermes_json"
    LLAMA_JSON = "llama_json"
    PLAIN_JSON = "plain_json"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What a model writes before and after its reasoning."""

    open: str
    close: str


REASONING_MARKERS: Final = (
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("[THINK]", "[/THINK]"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),
    ReasoningMarkers("<thinking>", "</thinking>"),
    ReasoningMarkers("<reasoning>", "</reasoning>"),
    ReasoningMarkers("<thought>", "</thought>"),
)

PYTHON_TAG: Final = "<|python_tag|>"
TOOL_CALL_OPEN: Final = "<tool_call>"
TOOL_CALL_CLOSE: Final = "</tool_call>"

_SPELLS_NAME: Final = re.compile(r"""\\?["']name\\?["']\s*:""")
_SPELLS_PARAMETERS: Final = re.compile(r"""\\?["']parameters\\?["']\s*:""")


def tool_syntax(template: ChatTemplate) -> ToolSyntax:
    if not template.takes_tools:
        return ToolSyntax.HERMES_JSON
    if template.mentions("<function="):
        return ToolSyntax.QWEN_XML
    if template.mentions(TOOL_CALL_OPEN):
        return ToolSyntax.HERMES_JSON
    if template.mentions(PYTHON_TAG):
        return ToolSyntax.LLAMA_JSON
    if _SPELLS_NAME.search(template.source) and _SPELLS_PARAMETERS.search(template.source):
        return ToolSyntax.LLAMA_JSON
    return ToolSyntax.PLAIN_JSON


def reasoning_markers(template: ChatTemplate) -> ReasoningMarkers | None:
    # The closing marker decides: a template that strips old reasoning contains it.
    return next((markers for markers in REASONING_MARKERS if template.mentions(markers.close)), None) or next(
        (markers for markers in REASONING_MARKERS if template.mentions(markers.open)), None
    )
