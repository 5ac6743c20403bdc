"""A request's conversation as the variables that chat templates expect.

Nothing is dropped. If templates differ about a form, the template itself decides: nearly all iterate over arguments as
an object, with empty content; a few insert arguments as text, show the calls of a turn only if its content is none, or
accept only ids of nine letters and digits. The source of a template does not show this reliably, so it is probed.

A template without a place for tools gets them described in the system message, with a call in the model's own syntax if
its template has one, and otherwise in the form that Hermes models were trained on, which most models follow when they
see it. Calls of earlier turns become text of the assistant, and their results become user messages.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from cortex.neuron.families.tool_calls import HARMONY, HERMES_JSON, NAME_LINE, ToolSyntax
from cortex.neuron.pictures.spec import PictureText
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.detect import tool_syntax
from cortex.neuron.text.template.pictures import as_list, content_of, with_shown_pictures
from cortex.neuron.text.tools.call import json_text
from cortex.neuron.text.tools.write import MarkupText, TextPiece, written_calls
from cortex.wire.errors import InvalidValue, TemplateRenderFailed, UnsupportedModality, shorten
from cortex.wire.requests import (
    EFFORT_TOKENS,
    GenerateRequest,
    Message,
    PicturePart,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    effort_of,
)

_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""The model always reasons, at one of three efforts."""


def is_harmony(template: ChatTemplate) -> bool:
    return tool_syntax(template) is HARMONY


def known_effort(effort: str | None, *, is_off: bool) -> dict[str, str]:
    """The variable for the effort nearest to the requested one; none without a request."""
    wanted = "none" if is_off else effort
    return {} if wanted is None else {"reasoning_effort": _EFFORTS.get(wanted, wanted)}


def described_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools whose descriptions, and defaults of a choice, are strings: templates concatenate them."""
    return [{**tool, "function": _described(tool["function"])} for tool in tools]


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function["parameters"]
    properties = parameters.get("properties")
    if isinstance(properties, Mapping):
        written = {name: _with_written_default(schema) for name, schema in properties.items()}
        parameters = {**parameters, "properties": written}
    return {"description": "", **function, "parameters": parameters}


def _with_written_default(schema: Any) -> Any:
    if not isinstance(schema, Mapping) or not {"enum", "oneOf"} & schema.keys():
        return schema
    default = schema.get("default", "")
    return schema if isinstance(default, str) else {**schema, "default": json.dumps(default, ensure_ascii=False)}


def reject_built_in_tools(template_args: Mapping[str, Any]) -> None:
    """Raises InvalidValue for tools that the model was trained with: nothing here runs them."""
    if tools := template_args.get("builtin_tools"):
        raise InvalidValue(
            f"the built-in tools {shorten(str(tools))} do not run here; remove builtin_tools, or send your own tools",
            param="chat_template_kwargs",
        )


_ID: Final = "call_0123456789abcdef01234567"
_NUM_SHORT_ID_CHARACTERS: Final = 9
_NAME: Final = "probed_function"
_OTHER_NAME: Final = "first_function"
_VALUE: Final = "probed value"
_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class CallForm:
    empty_content: str | None = ""
    """The content of a turn that only calls tools."""
    arguments_as_text: bool = False
    short_ids: bool = False
    """Whether ids of calls must have nine letters and digits."""
    takes_several: bool = True
    """Whether the template shows all calls of a turn; else each call is a turn of its own, before its result."""
    takes_both: bool = True
    """Whether a turn with calls may have text and reasoning; else both become its reasoning."""

    def id(self, id: str) -> str:
        """The id of a call for the template: the same for the call and its result."""
        if not self.short_ids or (len(id) == _NUM_SHORT_ID_CHARACTERS and id.isalnum()):
            return id
        return hashlib.sha256(id.encode(errors="replace")).hexdigest()[:_NUM_SHORT_ID_CHARACTERS]

    def arguments(self, text: str) -> Any:
        """Arguments, given as JSON text, for the template. Invalid JSON from a model stays text."""
        if self.arguments_as_text:
            return text or "{}"
        try:
            return json.loads(text, strict=False) if text.strip() else {}
        except (ValueError, RecursionError):
            return text


_FORMS: Final = tuple(
    CallForm(empty_content, arguments_as_text, short_ids)
    for short_ids in (False, True)
    for arguments_as_text in (False, True)
    for empty_content in ("", None)
)


@lru_cache(maxsize=64)
def call_form(template: ChatTemplate) -> CallForm:
    """The first form in which the template shows a complete call; the usual form if there is none."""
    form = next((form for form in _FORMS if _shows(template, form)), None)
    if form is None:
        return _FORMS[0]
    return replace(
        form,
        takes_several=_shows(template, form, (_OTHER_NAME, _NAME)),
        takes_both=not _shows(template, form, content="x")
        or _shows(template, form, content="x", reasoning_content="y", thinking="y"),
    )


def _shows(template: ChatTemplate, form: CallForm, names: Sequence[str] = (_NAME,), **turn: str) -> bool:
    """Whether the template shows a turn that calls `names`, the last of them with the probed value."""
    calls, results = [], []
    for number, name in enumerate(names):
        id = form.id(f"{_ID[:-1]}{number}")
        arguments = form.arguments(json.dumps({"a": _VALUE if name == _NAME else "z"}))
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
        results.append({"role": "tool", "tool_call_id": id, "name": name, "content": "y"})
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": form.empty_content, "tool_calls": calls, **turn},
        *results,
    ]
    try:
        text = template.render(
            {
                **{"messages": messages, "tools": [_TOOL], "documents": None, "add_generation_prompt": True},
                **{"bos_token": "", "eos_token": ""},
            }
        )
    except TemplateRenderFailed:
        return False
    spells_none = form.empty_content is None and "None" in text
    return _NAME in text and _VALUE in text and not spells_none


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
        TextPiece(_DESCRIPTION.format(tools=listed, how=how), False),
        *written_calls([("function_name", {})], syntax),
        *([] if is_native and template.shows_calls else [TextPiece(_AS_TEXT, False)]),
    ]
    first, *later = spelled
    gap = TextPiece("\n\n", False)
    if first["role"] == "system":
        said = TextPiece(first["content"], False)
        return [{**first, "content": MarkupText([said, gap, *description])}, *later]
    if takes_system(template):
        return [{"role": "system", "content": MarkupText(description)}, *spelled]
    content = first["content"]
    if isinstance(content, list):
        return [{**first, "content": [*as_list(MarkupText(description)), *content]}, *later]
    return [{**first, "content": MarkupText([*description, gap, TextPiece(content, False)])}, *later]


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
    said = [TextPiece(turn["content"], False)] if turn["content"] else []
    return {**kept, "content": MarkupText([*said, *written_calls(calls, syntax)])}


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


_RESERVED: Final = frozenset({"messages", "tools"})


def variables(
    request: GenerateRequest,
    template: ChatTemplate,
    named_tokens: Mapping[str, str],
    syntax: ToolSyntax,
    pictures: PictureText | None = None,
) -> dict[str, Any]:
    """The variables for the template; raises UnsupportedModality, or InvalidValue for template arguments. `syntax`: of
    the model's calls. `pictures`: how the model's prompts have them; None: it reads text only."""
    if reserved := _RESERVED & request.template_args.keys():
        raise InvalidValue(
            f"chat_template_kwargs may not set {', '.join(sorted(reserved))}; use the request's own fields",
            param="chat_template_kwargs",
        )
    tools = [_tool(tool) for tool in request.tools]
    if is_harmony(template):
        reject_built_in_tools(request.template_args)
        tools = described_tools(tools)
    turns = messages(request.messages, template, takes_pictures=pictures is not None)
    if pictures is not None:
        turns = with_shown_pictures(turns, template, pictures)
    if not template.takes_tools:
        turns = described(turns, tools if request.tool_choice.mode != "none" else [], template, syntax)
    elif not template.shows_calls:
        turns = with_spelled_calls(turns, syntax)
    return {
        **named_tokens,
        "documents": None,
        "add_generation_prompt": True,
        **_thinking(request, template),
        **request.template_args,
        "messages": _with_system_form(turns, template),
        "tools": tools or None,
    }


def messages(
    conversation: Iterable[Message], template: ChatTemplate, *, takes_pictures: bool = False
) -> list[dict[str, Any]]:
    """The turns as plain JSON values, one for one."""
    names_by_call: dict[str, str] = {}
    rendered = []
    for position, message in enumerate(conversation):
        rendered.append(_message(message, position, template, names_by_call, takes_pictures=takes_pictures))
        names_by_call.update((part.id, part.name) for part in message.parts if isinstance(part, ToolCall))
    if any(len(turn.get("tool_calls", ())) > 1 for turn in rendered) and not call_form(template).takes_several:
        return list(_with_single_calls(rendered, call_form(template)))
    return rendered


def _with_single_calls(turns: list[dict[str, Any]], form: CallForm) -> Iterator[dict[str, Any]]:
    """The turns with a turn for each call, followed by its result."""
    results: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        if turn["role"] == "tool" and any(turn is result for result in results):
            continue  # it was put after its call
        results = list(itertools.takewhile(lambda each: each["role"] == "tool", turns[number + 1 :]))
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            results = []
            yield turn
            continue
        left = results
        for place, call in enumerate(calls):
            yield {
                **(turn if place == 0 else {"role": "assistant", "content": form.empty_content}),
                "tool_calls": [call],
            }
            yield from (result for result in left if result.get("tool_call_id") == call["id"])
            left = [result for result in left if result.get("tool_call_id") != call["id"]]
        yield from left


def _with_system_form(turns: list[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """The turns with system messages in the form that the template accepts."""
    if any(turn["role"] == "system" for turn in turns[1:]):
        return system_form(template).fit(turns)
    return turns


def _message(
    message: Message,
    position: int,
    template: ChatTemplate,
    names_by_call: Mapping[str, str],
    *,
    takes_pictures: bool,
) -> dict[str, Any]:
    value: dict[str, Any] = {"role": _role(message, template)}
    if message.name is not None:
        value["name"] = message.name
    parts = message.parts
    if message.role == "tool":
        for result in (part for part in parts if isinstance(part, ToolResult)):
            value["tool_call_id"] = call_form(template).id(result.call_id)
            if result.call_id in names_by_call:
                value.setdefault("name", names_by_call[result.call_id])
            if result.is_error:
                value["is_error"] = True
            shown = result.parts if template.mentions("is_error") else result.marked_parts
            parts = (*(part for part in parts if part is not result), *shown)
    if calls := [part for part in parts if isinstance(part, ToolCall)]:
        form = call_form(template)
        value["tool_calls"] = [_call(call, form) for call in calls]
    if reasoning := [part.text for part in parts if isinstance(part, Reasoning)]:
        # Both names, as in the reference library: templates read one or the other.
        value["reasoning_content"] = value["thinking"] = "".join(reasoning)
    if (picture := next((part for part in parts if isinstance(part, PicturePart)), None)) is not None:
        _check_picture(picture, message, position, takes_pictures=takes_pictures)
        value["content"] = content_of(part for part in parts if isinstance(part, Text | PicturePart))
        return value
    # The text parts of an assistant are pieces of one stream; those of other roles are separate blocks.
    text = ("" if message.role == "assistant" else "\n").join(part.text for part in parts if isinstance(part, Text))
    if calls and reasoning and text and not form.takes_both:
        value["reasoning_content"] = value["thinking"] = f"{value['thinking']}\n\n{text}"
        text = ""
    value["content"] = form.empty_content if calls and not text else text
    return value


def _role(message: Message, template: ChatTemplate) -> str:
    # One vendor calls `system` now `developer`; a template that does not know the role would drop the turn. Harmony has
    # one place for both.
    if message.role == "developer" and (not template.mentions("developer") or is_harmony(template)):
        return "system"
    return message.role


def _check_picture(picture: PicturePart, message: Message, position: int, *, takes_pictures: bool) -> None:
    place = picture.param or f"messages[{position}]"
    if not takes_pictures:
        raise UnsupportedModality(
            f"{place} is a picture, and this model reads text only; "
            "remove the picture, or choose a model whose capabilities include vision",
            param=picture.param or "messages",
        )
    if message.role not in ("user", "tool"):
        raise InvalidValue(
            f"{place} is a picture in a message of the {message.role}; pictures can be in messages of the user and in "
            "results of tools",
            param=picture.param or "messages",
        )


def _call(call: ToolCall, form: CallForm) -> dict[str, Any]:
    function = {"name": call.name, "arguments": form.arguments(call.arguments)}
    return {"id": form.id(call.id), "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _thinking(request: GenerateRequest, template: ChatTemplate) -> dict[str, Any]:
    """The thinking options under the names that templates use; left out if the request does not set them."""
    thinking = request.thinking
    effort, budget = thinking.effort, thinking.budget_tokens
    switch: dict[str, Any] = {}
    if thinking.switch is not None:
        switch |= {"enable_thinking": thinking.switch, "thinking": thinking.switch}
    if thinking.switch is False and template.mentions("thinking_budget"):
        budget = 0
    if effort is not None or budget:
        switch["reasoning_effort"] = effort or effort_of(budget)
    if is_harmony(template):
        switch |= known_effort(switch.get("reasoning_effort"), is_off=thinking.switch is False)
    if budget is not None or effort in EFFORT_TOKENS:
        switch["thinking_budget"] = EFFORT_TOKENS[effort] if budget is None and effort is not None else budget
    return switch


_FIRST: Final = "first probed text"
_OTHER: Final = "other probed text"
_USER: Final = {"role": "user", "content": "x"}
_ASSISTANT: Final = {"role": "assistant", "content": "y"}


@dataclass(frozen=True, slots=True)
class SystemForm:
    takes_several: bool = True
    """Whether the template accepts several at the beginning; else they become one message, joined by an empty line."""
    takes_later: bool = True
    """Whether the template accepts them after other turns; else they become user messages in the same place."""

    def fit(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`messages` in the form that the template accepts."""
        num_leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        leading, later = messages[:num_leading], messages[num_leading:]
        if not self.takes_several and num_leading > 1:
            leading = [{**leading[0], "content": "\n\n".join(message["content"] for message in leading)}]
        if not self.takes_later:
            later = [{**message, "role": "user"} if message["role"] == "system" else message for message in later]
        return [*leading, *later]


@lru_cache(maxsize=64)
def system_form(template: ChatTemplate) -> SystemForm:
    """The form that the template shows completely; the default form if it accepts no system message at all."""
    first, other = ({"role": "system", "content": text} for text in (_FIRST, _OTHER))
    if not takes_system(template):
        return SystemForm()
    return SystemForm(
        takes_several=_shows_system(template, [first, other, _USER]),
        takes_later=_shows_system(template, [first, _USER, _ASSISTANT, other, _USER]),
    )


@lru_cache(maxsize=64)
def takes_system(template: ChatTemplate) -> bool:
    """Whether the template shows a system message at the beginning."""
    return _shows_system(template, [{"role": "system", "content": _FIRST}, _USER])


def _shows_system(template: ChatTemplate, messages: list[dict[str, Any]]) -> bool:
    try:
        text = template.render({"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True})
    except TemplateRenderFailed:
        return False
    return all(message["content"] in text for message in messages if message["role"] == "system")
