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
| `｜DSML｜`, with `function_calls>` or without | DeepSeek V3.2, V4: `<｜DSML｜invoke name="f"><｜DSML｜parameter …` |
| `<｜tool▁sep｜>` and a block of JSON | DeepSeek V3, R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, the block |
| `<｜tool▁sep｜>` | DeepSeek V3.1: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` |
| `<|tool_call_argument_begin|>` | Kimi: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}` |
| `<|tool_call:args|>` | Solar: `<|tool_call:begin|>id<|tool_call:name|>f<|tool_call:args|>{…}<|tool_call:end|>` |
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
| `<TOOLCALL>` | Nemotron JSON: `<TOOLCALL>[{"name": …, "arguments": …}]</TOOLCALL>` |
| `<|function_call|>` | GigaChat JSON: `<|function_call|>{"name": …, "arguments": …}` |
| `<|observation|>` and `metadata` | GLM-4: `f` in a line of its own, then `{…}` |
| `<|python_tag|>`, or `"name"` and `"parameters"` spelled out | Llama: `{"name": …, "parameters": …}`, or `[f(p=1)]` |
| the variable `tools`, and none of these | what it has tokens for; else plain: `{"name": …, "arguments": …}` |
| no variable `tools`, and no calls | Hermes JSON, as `template/generic_tools.py` describes it to the model |

A model whose template contains one of the pairs in `REASONING_MARKERS` writes its reasoning between them.
With one of `RESPONSE_TAGS`, its response may be between tags as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    DSML = "dsml"
    DSML_CALLS = "dsml_calls"
    DEEPSEEK_BLOCK = "deepseek_block"
    DEEPSEEK = "deepseek"
    KIMI = "kimi"
    SOLAR = "solar"
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
    NEMOTRON_JSON = "nemotron_json"
    GIGACHAT_JSON = "gigachat_json"
    NAME_LINE = "name_line"
    LLAMA_JSON = "llama_json"
    PLAIN_JSON = "plain_json"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What a model writes before and after its reasoning."""

    open: str
    close: str
    follow: str = "\n\n"
    """What the model writes between its reasoning and its response."""
    response_tags: tuple[str, str] | None = None
    """Tags around the response (`output/response_tags.py`)."""


ADDRESSED: Final = ReasoningMarkers("to=self<|message|>", "<|eom|>", "<|start|>assistant")
"""The markers of models that address each message (`output/addressed.py`)."""

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

RESPONSE_TAGS: Final = (("<response>", "</response>"), ("<answer>", "</answer>"))
"""Tags around the response. `<response>` is also a tag around results of tools."""

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
    (("｜DSML｜", "function_calls>"), ToolSyntax.DSML),
    (("｜DSML｜",), ToolSyntax.DSML_CALLS),
    (("<｜tool▁sep｜>", "```json"), ToolSyntax.DEEPSEEK_BLOCK),
    (("<｜tool▁sep｜>",), ToolSyntax.DEEPSEEK),
    (("<|tool_call_argument_begin|>",), ToolSyntax.KIMI),
    (("<|tool_call:args|>",), ToolSyntax.SOLAR),
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
    (("<TOOLCALL>",), ToolSyntax.NEMOTRON_JSON),
    (("<|function_call|>",), ToolSyntax.GIGACHAT_JSON),
    (("<|observation|>", "metadata"), ToolSyntax.NAME_LINE),
    ((PYTHON_TAG,), ToolSyntax.LLAMA_JSON),
)
"""What a template contains, and the syntax that this means."""


def tool_syntax(template: ChatTemplate, has_token: Callable[[str], bool] = lambda _: False) -> ToolSyntax:
    """`has_token`: whether a text is one token of the model. It decides where the template has a place for tools and
    shows no calls."""
    if not template.takes_tools and not template.shows_calls:
        return ToolSyntax.HERMES_JSON
    if (syntax := _marked(template.mentions)) is not None:
        return syntax
    if not template.takes_tools:
        return ToolSyntax.HERMES_JSON
    if _SPELLS_NAME.search(template.source) and _SPELLS_PARAMETERS.search(template.source):
        return ToolSyntax.LLAMA_JSON
    return _marked(has_token) or ToolSyntax.PLAIN_JSON


def _marked(has: Callable[[str], bool]) -> ToolSyntax | None:
    return next((syntax for markers, syntax in MARKERS if all(map(has, markers))), None)


def reasoning_markers(template: ChatTemplate) -> ReasoningMarkers | None:
    # The closing marker decides: a template that strips old reasoning contains it.
    found = next((markers for markers in REASONING_MARKERS if template.mentions(markers.close)), None) or next(
        (markers for markers in REASONING_MARKERS if template.mentions(markers.open)), None
    )
    response_tags = next((tags for tags in RESPONSE_TAGS if all(map(template.mentions, tags))), None)
    return found if found is None or response_tags is None else replace(found, response_tags=response_tags)
