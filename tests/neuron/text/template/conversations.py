"""Messages and tools for every template."""

from __future__ import annotations

import json

from cortex.wire.requests import Message, Reasoning, Role, Text, Tool, ToolCall

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where? <é>"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = (
    Tool(name="get_weather", description="The weather & more", parameters=WEATHER),
    Tool(name="stop", parameters={}),
)


def said(role: Role, text: str) -> Message:
    return Message(role=role, parts=(Text(text=text),))


ARGUMENTS = {"city": "Zürich <&>", "days": 3}
CALLING = Message(
    role="assistant",
    parts=(
        Reasoning(text="I need\nthe tool."),
        ToolCall(id="call_1", name="get_weather", arguments=json.dumps(ARGUMENTS)),
    ),
)
