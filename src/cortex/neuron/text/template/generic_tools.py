"""Tools for models whose template has no place for them.

The tools are described in the system message, in the form that Hermes models were trained on, which most models follow
when they see it. Calls of earlier turns become text of the assistant, and their results become user messages. A forced
call is constrained by a grammar, so structured output by a forced tool works with every chat model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.pictures import as_list
from cortex.neuron.text.template.system_form import takes_system

_DESCRIPTION: Final = """\
You can call functions. These are their descriptions, one per line:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "function_name", "arguments": {{}}}}
</tool_call>
Its result then follows between <tool_response> tags."""


def described(
    turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], template: ChatTemplate
) -> list[dict[str, Any]]:
    """The conversation with `tools` in its system message, and with calls and results as text unless the template shows
    calls."""
    spelled = list(turns) if template.mentions("tool_calls") else _joined([_as_text(turn) for turn in turns])
    if not tools:
        return spelled
    description = _DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, *later = spelled
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{description}"}, *later]
    if takes_system(template):
        return [{"role": "system", "content": description}, *spelled]
    content = first["content"]
    if isinstance(content, list):
        return [{**first, "content": [*as_list(description), *content]}, *later]
    return [{**first, "content": f"{description}\n\n{content}"}, *later]


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
