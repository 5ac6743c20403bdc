"""Tools of a published type that the client runs: `local_shell`, `shell`, `apply_patch`, and groups of tools.

To the model each is a function; to the client its calls and their results are items of their own types. A call whose
arguments do not fit its type is a `function_call`, which the client rejects with an error that the model can read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from cortex.wire.errors import shorten
from cortex.wire.fields.body import Fields, json_text
from cortex.wire.fields.custom_tools import read_custom_tool
from cortex.wire.fields.tools import ToolList, read_function
from cortex.wire.requests import Tool, ToolCall

Shape = Literal["local_shell", "shell", "apply_patch"]
SHAPES: Final[tuple[Shape, ...]] = ("local_shell", "shell", "apply_patch")
ID_PREFIXES: Final[dict[Shape, str]] = {"local_shell": "lsh", "shell": "sh", "apply_patch": "apc"}
CALLS: Final[dict[str, Shape]] = {f"{shape}_call": shape for shape in SHAPES}
OUTPUTS: Final = frozenset(f"{shape}_call_output" for shape in SHAPES)

_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_TEXTS: Final = {"type": "array", "items": _TEXT, "minItems": 1}
_DEFINITIONS: Final[dict[Shape, tuple[str, dict[str, Any], list[str]]]] = {
    "local_shell": (
        'Runs a program on the user\'s machine. `command` is its arguments, for example ["bash", "-lc", "ls"].',
        {
            "command": _TEXTS,
            "working_directory": _TEXT,
            "timeout_ms": _COUNT,
            "env": {"type": "object", "additionalProperties": _TEXT},
        },
        ["command"],
    ),
    "shell": (
        "Runs shell commands on the user's machine, each in a shell of its own.",
        {"commands": _TEXTS, "timeout_ms": _COUNT, "max_output_length": _COUNT},
        ["commands"],
    ),
    "apply_patch": (
        "Creates, updates or deletes one file. `diff` has the changes in hunks that begin with `@@`, with lines that "
        "begin with a space (context), `-` (removed) or `+` (added); of a new file every line begins with `+`.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": _TEXT,
            "diff": {"type": "string", "description": "Not for delete_file."},
        },
        ["type", "path"],
    ),
}


def add_tool(found: ToolList, tool: Fields, kind: str) -> None:
    """Adds a tool of any type to `found`. Raises `InvalidValue`."""
    if kind == "namespace":
        found.tools += _children(tool, found)
    elif (shape := _shape(kind)) is not None and not _runs_in_container(tool):
        description, properties, required = _DEFINITIONS[shape]
        parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        found.tools.append(Tool(name=shape, parameters=parameters, description=description, shape=shape))
    else:
        found.add(tool, kind)


def check_names(found: ToolList, fields: Fields) -> None:
    """Raises `InvalidValue` when a tool of a namespace and another one have the same name to the model."""
    counted = Counter(tool.name for tool in found.tools)
    for tool in found.tools:
        if tool.namespace is not None and counted[tool.name] > 1:
            raise fields.invalid("tools", f"two tools are named '{shorten(tool.name)}'; rename one of them")


def full_name(namespace: str | None, name: str) -> str:
    """The name by which the model calls a tool of a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def _shape(kind: str) -> Shape | None:
    return next((shape for shape in SHAPES if shape == kind), None)


def _runs_in_container(tool: Fields) -> bool:
    """Whether a shell is not the client's, but one in a container of the vendor."""
    environment = tool.object("environment")
    return environment is not None and environment.text("type") not in (None, "local")


def _children(group: Fields, found: ToolList) -> Iterator[Tool]:
    """The tools of a group. Its description is shown with its first tool."""
    namespace = group.required_text("name")
    heading = group.text("description")
    for child in group.objects("tools"):
        kind = child.text("type") or "function"
        if kind not in ("function", "custom"):
            found.dropped.append(kind)
            continue
        tool = read_function(child) if kind == "function" else read_custom_tool(child)
        about = [text for text in (heading and f"{namespace}: {heading}", tool.description) if text]
        heading = None
        yield msgspec.structs.replace(
            tool,
            name=full_name(namespace, tool.name),
            description="\n\n".join(about) or None,
            namespace=namespace,
            own_name=tool.name,
        )


def call_fields(shape: Shape, call: ToolCall) -> dict[str, Any] | None:
    """The fields of a call's item that its type has; None when the arguments do not fit."""
    try:
        arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
    match shape:
        case "local_shell":
            command = _texts(arguments.pop("command", None), "bash", "-lc")
            action = {"type": "exec", "env": {}, **_given(arguments, "env", "timeout_ms", "working_directory")}
            return None if command is None else {"action": {**action, "command": command}}
        case "shell":
            commands = _texts(arguments.pop("commands", None))
            limits: dict[str, Any] = {"timeout_ms": None, "max_output_length": None}
            limits |= _given(arguments, *limits)
            return None if commands is None else {"action": {"commands": commands, **limits}}
        case "apply_patch":
            operation = _given(arguments, "type", "path", "diff")
            kind, path, diff = (operation.get(name) for name in ("type", "path", "diff"))
            if not isinstance(path, str) or not isinstance(diff, str | None):
                return None
            if kind == "delete_file":
                return {"operation": {"type": kind, "path": path}}
            fits = kind in ("create_file", "update_file") and diff is not None
            return {"operation": operation} if fits else None


def _texts(value: Any, *shell: str) -> list[str] | None:
    """A list of texts. Models write one text, too: it is a command of `shell`."""
    if isinstance(value, str) and value:
        return [*shell, value]
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return value
    return None


def _given(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def read_call(item: Fields, shape: Shape) -> ToolCall:
    """An earlier call that the client sends back."""
    body = item.mapping("operation" if shape == "apply_patch" else "action") or {}
    names = _DEFINITIONS[shape][1]
    arguments = {name: value for name, value in body.items() if name in names and value not in (None, {})}
    return ToolCall(id=item.text("call_id") or item.required_text("id"), name=shape, arguments=json_text(arguments))
