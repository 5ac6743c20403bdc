"""Tools for models whose template has no place for them, and calls for templates that do not show them.

The tools are described in the system message, with a call in the model's own syntax if its template has one. Otherwise
it is the form that Hermes models were trained on, which most models follow when they see it. Calls of earlier turns
become text of the assistant, and their results become user messages. A forced call is constrained by a grammar, so
structured output by a forced tool works with every chat model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from cortex.neuron.families.tool_calls import HERMES_JSON, NAME_LINE, ToolSyntax
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.pictures import as_list
from cortex.neuron.text.template.system_form import takes_system
from cortex.neuron.text.tools.call import json_text
from cortex.neuron.text.tools.write import SpelledText, Written, written_calls

_DESCRIPTION: Final = """\
You can call functions. These are their descriptions, one per line:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments {how}:
"""
_AS_TEXT: Final = "\nIts result then follows between <tool_response> tags."


def described(
    turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], template: ChatTemplate, syntax: ToolSyntax
) -> list[dict[str, Any]]:
    """The conversation with `tools` in its system message, and with calls and results as text unless the template shows
    calls."""
    spelled = list(turns) if template.shows_calls else _joined([_as_text(turn) for turn in turns])
    if not tools:
        return spelled
    is_native = syntax is not HERMES_JSON
    how = "exactly in this form" if is_native else "as JSON between these tags"
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    description = [
        Written(_DESCRIPTION.format(tools=listed, how=how), False),
        *written_calls([("function_name", {})], syntax),
        *([] if is_native and template.shows_calls else [Written(_AS_TEXT, False)]),
    ]
    first, *later = spelled
    gap = Written("\n\n", False)
    if first["role"] == "system":
        said = Written(first["content"], False)
        return [{**first, "content": SpelledText([said, gap, *description])}, *later]
    if takes_system(template):
        return [{"role": "system", "content": SpelledText(description)}, *spelled]
    content = first["content"]
    if isinstance(content, list):
        return [{**first, "content": [*as_list(SpelledText(description)), *content]}, *later]
    return [{**first, "content": SpelledText([*description, gap, Written(content, False)])}, *later]


def with_spelled_calls(turns: Sequence[dict[str, Any]], syntax: ToolSyntax) -> list[dict[str, Any]]:
    """The conversation with calls as text of the assistant, in the model's syntax."""
    if syntax is NAME_LINE:
        return [part for turn in turns for part in _named_turns(turn)]
    return [_spelled(turn, syntax) if "tool_calls" in turn else turn for turn in turns]


def _named_turns(turn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The name of each call is the metadata of a turn, and results are observations."""
    kept = {name: value for name, value in turn.items() if name != "tool_calls"}
    if kept["role"] == "tool":
        kept["role"] = "observation"
    if kept["content"] or "tool_calls" not in turn:
        yield kept
    for call in turn.get("tool_calls", ()):
        function = call["function"]
        yield {"role": "assistant", "metadata": function["name"], "content": json_text(function["arguments"])}


def _spelled(turn: dict[str, Any], syntax: ToolSyntax) -> dict[str, Any]:
    kept = {name: value for name, value in turn.items() if name != "tool_calls"}
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = [
        (function["name"], arguments if isinstance(arguments := function["arguments"], dict) else {"": arguments})
        for function in functions
    ]
    said = [Written(turn["content"], False)] if turn["content"] else []
    return {**kept, "content": SpelledText([*said, *written_calls(calls, syntax)])}


def _as_text(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    if "tool_calls" not in turn:
        return turn
    calls = [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in turn["tool_calls"]]
    kept = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([*([turn["content"]] if turn["content"] else []), *calls])}


def _call_text(function: dict[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)


def _joined(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results and the user's text after them in one message: many templates want the roles to alternate."""
    joined: list[dict[str, Any]] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if last is not None and last["role"] == turn["role"] == "user" and _is_result(last["content"]):
            joined[-1] = {**last, "content": _with_result(last["content"], turn["content"])}
        else:
            joined.append(turn)
    return joined


def _is_result(content: str | list[dict[str, Any]]) -> bool:
    return isinstance(content, str) and content.endswith("</tool_response>")


def _with_result(result: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return f"{result}\n{content}" if isinstance(content, str) else [*as_list(result), *content]
