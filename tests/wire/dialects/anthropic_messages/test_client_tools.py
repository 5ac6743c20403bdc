"""Tools that the client runs, of types that Anthropic publishes: the model is shown their schemas."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.anthropic_messages import parse
from cortex.wire.errors import InvalidValue
from cortex.wire.requests import Tool


def read(**tool: Any) -> Tool:
    (found,) = parse(
        msgspec.json.encode(
            {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
        )
    ).tools
    return found


@pytest.mark.parametrize(
    ("kind", "name", "properties", "choices"),
    [
        ("bash_20250124", "bash", {"command", "restart"}, set()),
        ("text_editor_20241022", "str_replace_editor", {"command", "path", "new_str"}, {"undo_edit"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command", "insert_text"}, {"insert", "view"}),
        ("memory_20250818", "memory", {"command", "path", "old_path", "new_path"}, {"rename", "delete"}),
        ("computer_20241022", "computer", {"action", "coordinate", "text"}, {"left_click_drag"}),
        ("computer_20250124", "computer", {"action", "scroll_direction", "duration"}, {"triple_click"}),
        ("computer_20991231", "computer", {"action", "scroll_direction"}, {"scroll"}),
    ],
)
def test_the_model_is_shown_the_published_schema(kind: str, name: str, properties: set[str], choices: set[str]) -> None:
    tool = read(type=kind, name=name)
    assert tool.name == name
    assert tool.description
    assert properties <= set(tool.parameters["properties"])
    enumerated = tool.parameters["properties"].get("command", {}).get("enum", [])
    enumerated = enumerated or tool.parameters["properties"].get("action", {}).get("enum", [])
    assert choices <= set(enumerated)


def test_options_are_part_of_what_the_model_sees() -> None:
    screen = {"type": "computer_20251124", "name": "computer", "display_width_px": 1024, "display_height_px": 768}
    tool = read(**screen, enable_zoom=True)
    assert "1024x768" in str(tool.description)
    assert "zoom" in tool.parameters["properties"]["action"]["enum"]
    assert "zoom" not in read(**screen).parameters["properties"]["action"]["enum"]
    assert "9000 characters" in str(read(type="text_editor_20250728", name="e", max_characters=9000).description)
    with pytest.raises(InvalidValue):
        read(**screen | {"display_width_px": "wide"})
