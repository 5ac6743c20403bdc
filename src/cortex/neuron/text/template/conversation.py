"""A request's conversation as the variables that chat templates expect.

Nothing is dropped. If templates differ about a form, the template itself decides. A template without a place for tools
gets them in the system message, and one that shows a single call for each turn gets a turn for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from cortex.neuron.families.tool_calls import ToolSyntax
from cortex.neuron.text.template import generic_tools
from cortex.neuron.text.template.call_form import CallForm, call_form
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.harmony_form import (
    described_tools,
    is_harmony,
    known_effort,
    reject_built_in_tools,
)
from cortex.neuron.text.template.pictures import content_of, with_shown_pictures
from cortex.neuron.text.template.system_form import system_form
from cortex.neuron.vision.spec import PictureText
from cortex.wire.errors import InvalidValue, UnsupportedModality
from cortex.wire.requests import (
    EFFORT_TOKENS,
    GenerateRequest,
    Image,
    Message,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    effort_of,
)

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
        turns = generic_tools.described(turns, tools if request.tool_choice.mode != "none" else [], template, syntax)
    elif not template.shows_calls:
        turns = generic_tools.with_spelled_calls(turns, syntax)
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
    if (image := next((part for part in parts if isinstance(part, Image)), None)) is not None:
        _check_image(image, message, position, takes_pictures=takes_pictures)
        value["content"] = content_of(part for part in parts if isinstance(part, Text | Image))
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


def _check_image(image: Image, message: Message, position: int, *, takes_pictures: bool) -> None:
    place = image.param or f"messages[{position}]"
    if not takes_pictures:
        raise UnsupportedModality(
            f"{place} is an image, and this model reads text only; "
            "remove the image, or choose a model whose capabilities include vision",
            param=image.param or "messages",
        )
    if message.role not in ("user", "tool"):
        raise InvalidValue(
            f"{place} is an image in a message of the {message.role}; images can be in messages of the user and in "
            "results of tools",
            param=image.param or "messages",
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
