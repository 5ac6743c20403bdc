"""Parses a messages body into a `GenerateRequest`. The field table has the treatment of each field.

Of tools that the vendor publishes and the client runs (`bash_*`, `text_editor_*`, `memory_*`, `computer_*`) the client
sends only type and name, because the vendor's models know the schema. Other models get it in the prompt. An unknown
version gets the schema of the latest one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from cortex.wire.dialects.anthropic_messages.fields import FIELDS
from cortex.wire.dialects.openai_chat.request import CONTINUE
from cortex.wire.errors import UnsupportedModality, shorten
from cortex.wire.fields.body import LARGEST_COUNT, Fields
from cortex.wire.fields.request_class import TIER, asked_class
from cortex.wire.fields.sampling import ANTHROPIC, read_response_format, read_speculation, read_stops
from cortex.wire.fields.tools import ToolList, read_arguments
from cortex.wire.pictures.parts import from_base64, from_url
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import (
    GenerateRequest,
    Message,
    OutputFormat,
    Part,
    PicturePart,
    Reasoning,
    Role,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from cortex.wire.tenant import read_tenant

_TYPE: Final = re.compile(r"(bash|text_editor|memory|computer)_(\d{8})")
_NAMES: Final = {
    "bash": "bash",
    "text_editor": "str_replace_based_edit_tool",
    "memory": "memory",
    "computer": "computer",
}
_DESCRIPTIONS: Final = {
    "bash": "Runs a command in a bash session that persists between calls. With `restart`, starts a new session.",
    "text_editor": "Views, creates and edits text files. `view` shows a file with line numbers, or lists a directory;"
    " `create` writes a file; `str_replace` replaces the only occurrence of `old_str`; `insert` inserts text after a"
    " line.",
    "memory": "Stores and recalls information between conversations, in files under /memories. Look there before"
    " starting a task.",
    "computer": "Controls a computer's screen, mouse and keyboard. Coordinates are [x, y] in pixels from the upper left"
    " corner. Take a screenshot to see the result of an action.",
}
_TEXT: Final = {"type": "string"}
_PATH: Final = {"type": "string", "description": "Absolute path of a file or directory."}
_POINT: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_VIEW_RANGE: Final = {
    **_POINT,
    "description": "For `view` of a file: the first and last line, counted from 1; -1 is the end of the file.",
}
_INSERT_LINE: Final = {"type": "integer", "description": "For `insert`: the line after which to insert, 0 for the top."}
_ACTIONS: Final = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click"),
    *("screenshot", "cursor_position"),
)
_ACTIONS_OF_2025: Final = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")


def read_blocks(fields: Fields) -> Iterator[Part]:
    """The parts of a turn's `content`. Raises `InvalidValue` for a block of an unknown type: the model would not see
    it."""
    content = fields.raw("content")
    if isinstance(content, str):
        if content:
            yield Text(text=content)
        return
    for block in fields.objects("content"):
        match block.text("type"):
            case "tool_use":
                yield ToolCall(
                    id=block.required_text("id"),
                    name=block.required_text("name"),
                    arguments=read_arguments(block, "input"),
                )
            case "tool_result":
                yield ToolResult(
                    call_id=block.required_text("tool_use_id"),
                    parts=tuple(_read_result(block)),
                    is_error=block.flag("is_error") or False,
                )
            case "thinking":
                yield Reasoning(text=block.text("thinking") or "", signature=block.text("signature"))
            case "redacted_thinking":
                pass  # encrypted for the vendor's models
            case _:
                yield from _read_text_or_picture(block)


def block_pictures(fields: Fields) -> Iterator[str]:
    """The pictures that `read_blocks` finds in `content`, in base64 or as URLs, unchecked."""
    if not isinstance(fields.raw("content"), list):
        return
    for block in fields.objects("content"):
        kind, source = block.text("type"), block.raw("source")
        if kind == "image" and isinstance(source, dict):
            name = "data" if source.get("type") == "base64" else "url"
            yield Fields(source, block.param("source")).required_text(name)
        elif kind in ("tool_result", "search_result"):
            yield from block_pictures(block)
        elif kind == "document" and isinstance(source, dict) and source.get("type") == "content":
            yield from block_pictures(Fields(source, block.param("source")))


def read_text_blocks(fields: Fields, name: str) -> Iterator[Text]:
    """The blocks of a system prompt, which hold text only."""
    for block in fields.objects(name):
        yield Text(text=block.required_text("text"))


def _read_result(fields: Fields) -> Iterator[Text | PicturePart]:
    content = fields.raw("content")
    if isinstance(content, str):
        yield Text(text=content)
        return
    for block in fields.objects("content"):
        yield from _read_text_or_picture(block)


def _read_text_or_picture(block: Fields) -> Iterator[Text | PicturePart]:
    kind = block.text("type")
    match kind:
        case "image":
            yield _read_picture(block)
        case "document":
            yield from _read_document(block)
        case "search_result":
            yield Text(text=f"{block.text('title') or ''}\n{block.text('source') or ''}")
            yield from _read_result(block)
        case _ if block.raw("text") is not None:
            yield Text(text=block.required_text("text"))
        case _:
            raise block.invalid("type", f"blocks of type '{shorten(kind or '')}' are not supported; remove the block")


def _read_picture(block: Fields) -> PicturePart:
    source = block.object("source")
    if source is None:
        raise block.invalid("source", "an image block needs one")
    match source.text("type"):
        case "base64":
            return from_base64(source.required_text("data"), source.text("media_type") or "", block.path)
        case "url":
            return from_url(source.required_text("url"), block.path)
        case "file":
            raise source.invalid("type", "no files are stored here; send the picture as base64")
        case other:
            raise source.invalid("type", f"'{shorten(other or '')}' is not known; send the picture as base64 or url")


def _read_document(block: Fields) -> Iterator[Text | PicturePart]:
    """Only plain text documents are supported. Raises `UnsupportedModality` for others, such as PDF."""
    source = block.object("source")
    if source is not None and source.text("type") == "text":
        yield Text(text=source.required_text("data"))
    elif source is not None and source.text("type") == "content":
        yield from _read_result(source)
    else:
        raise UnsupportedModality(
            "The models here cannot read documents of this kind; send their text.", param=block.param("source")
        )


_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def read_summary(fields: Fields) -> RequestSummary:
    """Raises `MissingModel` or `InvalidValue`."""
    limit = fields.integer("max_tokens", low=0, high=LARGEST_COUNT)
    return RequestSummary(fields.model(), fields.flag("stream") or False, limit, 1)


def pictures(fields: Fields) -> Iterator[str]:
    """All pictures that `parse` finds, in base64 or as URLs, unchecked."""
    for message in fields.objects("messages"):
        if _ROLES.get(message.text("role") or "") != "system":  # which holds text only
            yield from block_pictures(message)


def parse(body: bytes, *, generates: bool = True) -> GenerateRequest:
    """Without `generates` for `/v1/messages/count_tokens`, whose body is the same without `max_tokens`.

    Raises `MalformedJSON`, `MissingModel`, `InvalidValue` or `UnsupportedModality`.
    """
    fields = FIELDS.read(body)
    summary = read_summary(fields)
    max_tokens = summary.completion_limit
    if generates and max_tokens is None:
        raise fields.invalid("max_tokens", "it is required: the most tokens of the response")
    if not fields.array("messages"):
        raise fields.invalid("messages", "it is required and must hold at least one message")
    messages: list[Message] = []
    if system := _read_system(fields, "system"):
        messages.append(Message(role="system", parts=system))
    for message in fields.objects("messages"):
        messages += _read_message(message)
    if not messages:
        raise fields.invalid("messages", "no message has content; send at least one that has")
    found = _read_tools(fields)
    output, thinking = _read_output_config(fields)
    budget = thinking.budget_tokens
    # With tools, the budget may be that of several calls, which other requests continue.
    if generates and max_tokens is not None and budget is not None and budget >= max_tokens and not found.tools:
        raise fields.invalid("thinking.budget_tokens", f"{budget} is not below 'max_tokens', which is {max_tokens}")
    metadata = fields.object("metadata")
    return GenerateRequest(
        model=summary.model,
        messages=tuple(messages),
        tools=tuple(found.tools),
        tool_choice=_read_tool_choice(fields, found),
        output=output,
        thinking=thinking,
        sampling=Sampling(
            temperature=fields.number("temperature", low=0, high=ANTHROPIC.temperature),
            top_k=fields.integer("top_k", low=0, high=LARGEST_COUNT),
            top_p=fields.number("top_p", low=0, high=1),
            max_tokens=max_tokens,
            stop=read_stops(fields, "stop_sequences") if fields.array("stop_sequences") else (),
            speculation=read_speculation(fields),
        ),
        stream=summary.stream,
        include_usage=True,
        template_args={CONTINUE: True} if _is_prefilled(messages) else {},
        user=metadata.text("user_id") if metadata else None,
        dropped_tools=tuple(found.dropped),
        ignored_fields=fields.unknown,
        tenant=read_tenant(fields),
        request_class=asked_class(fields, FIELDS.envelope),
        echoes_tier=TIER in fields,
    )


def _read_system(fields: Fields, name: str) -> tuple[Text, ...]:
    value = fields.raw(name)
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (Text(text=value),)
    return tuple(read_text_blocks(fields, name))


def _read_message(fields: Fields) -> Iterator[Message]:
    """A user turn with tool results becomes tool messages and user messages, in the order of its blocks."""
    role = fields.role(_ROLES)
    if fields.raw("content") is None:
        raise fields.invalid("content", "it is required: a string or an array of blocks")
    if role == "system":
        if parts := _read_system(fields, "content"):
            yield Message(role="system", parts=parts)
        return
    blocks = list(read_blocks(fields))
    if role == "assistant":
        yield Message(role="assistant", parts=tuple(blocks))
        return
    parts_so_far: list[Part] = []
    for block in blocks:
        if not isinstance(block, ToolResult):
            parts_so_far.append(block)
            continue
        if parts_so_far:
            yield Message(role="user", parts=tuple(parts_so_far))
            parts_so_far = []
        yield Message(role="tool", parts=(block,))
    if parts_so_far or not blocks:
        yield Message(role="user", parts=tuple(parts_so_far))


def _is_prefilled(messages: list[Message]) -> bool:
    """Whether the conversation ends with text of the assistant, which this dialect continues."""
    last = messages[-1]
    return last.role == "assistant" and bool(last.parts) and all(isinstance(part, Text) for part in last.parts)


def _read_tools(fields: Fields) -> ToolList:
    """The tools that the client runs. Others run on the vendor's servers and are dropped."""
    found = ToolList()
    for tool in fields.objects("tools"):
        kind = tool.text("type") or "custom"
        if kind != "custom":
            published = read_client_tool(tool, kind)
            if published is None:
                found.dropped.append(kind)
            else:
                found.tools.append(published)
            continue
        parameters = tool.mapping("input_schema")
        if parameters is None:
            raise tool.invalid("input_schema", "it is required: the JSON schema of the arguments")
        found.tools.append(
            Tool(
                name=tool.required_text("name"),
                parameters=parameters,
                description=tool.text("description"),
                strict=tool.flag("strict") or False,
            )
        )
    names = [tool.name for tool in found.tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise fields.invalid("tools", f"two of them are named '{shorten(twice)}'; give each a name of its own")
    return found


def _read_tool_choice(fields: Fields, found: ToolList) -> ToolChoice:
    choice = fields.object("tool_choice")
    if choice is None:
        return found.resolve(fields, "auto", None, parallel=True)
    kind = choice.text("type") or "auto"
    parallel = not choice.flag("disable_parallel_tool_use")
    return found.resolve(fields, "named" if kind == "tool" else kind, choice.text("name"), parallel=parallel)


def _read_output_config(fields: Fields) -> tuple[OutputFormat | None, Thinking]:
    config = fields.object("output_config")
    output = fields.object("output_format")
    if config is not None:
        output = config.object("format") or output
    effort = config.text("effort") if config is not None else None
    if config is not None and effort is not None and effort not in _EFFORTS:
        raise config.invalid("effort", f"'{shorten(effort)}' is not known; use {', '.join(_EFFORTS)}")
    thinking = _read_thinking(fields.object("thinking"), effort)
    return (read_response_format(output) if output is not None else None), thinking


def _read_thinking(requested: Fields | None, effort: str | None) -> Thinking:
    """Without `thinking` there is none. `adaptive` leaves the decision to the model's template."""
    if requested is None:
        return Thinking(effort=effort, shown=False, off_by_default=True)
    match requested.text("type"):
        case "disabled":
            return Thinking(enabled=False, effort=effort, shown=False)
        case "enabled" | "adaptive" as kind:
            budget_tokens = requested.integer("budget_tokens", low=0, high=LARGEST_COUNT)
            if kind == "enabled" and budget_tokens is None:
                raise requested.invalid("budget_tokens", "it is required; without a budget, use the type `adaptive`")
            return Thinking(
                enabled=True if kind == "enabled" else None,
                effort=effort,
                budget_tokens=budget_tokens,
                shown=requested.text("display") != "omitted",
            )
        case other:
            raise requested.invalid("type", f"'{shorten(other or '')}' is not known; use enabled, disabled or adaptive")


def read_client_tool(tool: Fields, kind: str) -> Tool | None:
    """The tool with its published schema; None for a type that is not of this kind.

    Raises `InvalidValue` for options with wrong values."""
    found = _TYPE.fullmatch(kind)
    if found is None:
        return None
    family, version = found.groups()
    match family:
        case "bash":
            parameters = _object({"command": _TEXT, "restart": {"type": "boolean"}})
        case "text_editor":
            parameters = _text_editor(version)
        case "memory":
            parameters = _memory()
        case _:
            parameters = _computer(tool, version)
    description = _DESCRIPTIONS[family]
    if family == "computer":
        width, height = (tool.integer(f"display_{side}_px", low=1, high=100_000) for side in ("width", "height"))
        description += f" The screen has {width}x{height} pixels." if width and height else ""
    if (most := tool.integer("max_characters", low=1, high=2**53)) is not None:
        description += f" `view` shows at most {most} characters of a file."
    return Tool(
        name=tool.text("name") or _NAMES[family],
        parameters=parameters,
        description=description,
        strict=tool.flag("strict") or False,
    )


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


def _text_editor(version: str) -> dict[str, Any]:
    names = ["view", "create", "str_replace", "insert"]
    if version < "20250429":
        names.append("undo_edit")
    properties = {
        "command": _commands(*names),
        "path": _PATH,
        "view_range": _VIEW_RANGE,
        "file_text": {"type": "string", "description": "For `create`: the content of the file."},
        "old_str": {"type": "string", "description": "For `str_replace`: the text to replace, which occurs once."},
        "new_str": {"type": "string", "description": "For `str_replace`: the text that replaces it."},
        "insert_line": _INSERT_LINE,
    }
    inserted = "insert_text" if version >= "20250728" else "new_str"
    properties.setdefault(inserted, {"type": "string", "description": "For `insert`: the text to insert."})
    return _object(properties, "command", "path")


def _memory() -> dict[str, Any]:
    properties = {
        "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
        "path": {"type": "string", "description": "Path under /memories, of every command but `rename`."},
        "view_range": _VIEW_RANGE,
        "file_text": {"type": "string", "description": "For `create`: the content of the file."},
        "old_str": {"type": "string", "description": "For `str_replace`: the text to replace."},
        "new_str": {"type": "string", "description": "For `str_replace`: the text that replaces it."},
        "insert_line": _INSERT_LINE,
        "insert_text": {"type": "string", "description": "For `insert`: the text to insert."},
        "old_path": {"type": "string", "description": "For `rename`: the present path."},
        "new_path": {"type": "string", "description": "For `rename`: the new path."},
    }
    return _object(properties, "command")


def _computer(tool: Fields, version: str) -> dict[str, Any]:
    actions = list(_ACTIONS)
    properties: dict[str, Any] = {
        "action": _TEXT,
        "coordinate": {**_POINT, "description": "Where the action is, or where a drag ends."},
        "text": {"type": "string", "description": "For `type` the text; for `key` and `hold_key` keys, as `ctrl+s`."},
    }
    if version >= "20250124":
        actions += _ACTIONS_OF_2025
        properties |= {
            "start_coordinate": {**_POINT, "description": "For `left_click_drag`: where it starts."},
            "duration": {"type": "number", "description": "For `hold_key` and `wait`: seconds."},
            "scroll_direction": _commands("up", "down", "left", "right"),
            "scroll_amount": {"type": "integer", "description": "For `scroll`: clicks of the wheel."},
        }
    if version >= "20251124" and tool.flag("enable_zoom"):
        actions.append("zoom")
        corners = {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4}
        properties["region"] = {**corners, "description": "For `zoom`: [x0, y0, x1, y1]."}
    return _object(properties | {"action": _commands(*actions)}, "action")
