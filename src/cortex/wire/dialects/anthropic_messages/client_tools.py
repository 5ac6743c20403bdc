"""Tools of a type that the vendor publishes and the client runs: `bash_*`, `text_editor_*`, `memory_*`, `computer_*`.

The client sends only type and name, because the vendor's models know the schema. Other models get it in the prompt. An
unknown version gets the schema of the latest one.
"""

from __future__ import annotations

import re
from typing import Any, Final

from cortex.wire.fields.body import Fields
from cortex.wire.requests import Tool

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
