"""A response as its client sees it, for the tests of every syntax."""

from __future__ import annotations

import itertools
import json
from typing import Any

from cortex.neuron.families.family import ReasoningMarkers
from cortex.neuron.families.tool_calls import ToolSyntax
from cortex.neuron.text.output.harmony import HarmonyParser
from cortex.neuron.text.output.parser import OutputParser
from cortex.neuron.text.output.reasoning import ReasoningSplitter
from cortex.neuron.text.tools.scanner import CallScanner
from cortex.neuron.text.tools.syntaxes import call_syntax
from cortex.wire.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart, ToolCallStop
from cortex.wire.requests import Tool

from .syntax_names import S

THINK = ReasoningMarkers("<think>", "</think>", response_tags=("<answer>", "</answer>"))
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "where": {"type": "object"},
        "maybe": {"type": ["integer", "null"]},
    },
}
TOOLS = (Tool(name="get_weather", parameters=SCHEMA), Tool(name="stop", parameters={}))

Parts = list[tuple[str, ...]]


def parser(syntax: ToolSyntax | None, *, thinks: bool = False, opened: bool = False) -> OutputParser | HarmonyParser:
    numbers = itertools.count()
    if syntax is S.HARMONY:
        return HarmonyParser([tool.name for tool in TOOLS], lambda: f"call_{next(numbers)}", 0)
    splitter = ReasoningSplitter(THINK, starts_in_reasoning=opened) if thinks or opened else None
    if syntax is None:
        return OutputParser(splitter, None, 0)
    return OutputParser(splitter, CallScanner(call_syntax(syntax, TOOLS), lambda: f"call_{next(numbers)}", 0), 0)


def parse(pieces: list[str], syntax: ToolSyntax | None, *, is_cut: bool = False, **how: bool) -> Parts:
    """The client's view at the end: joined deltas, in order, and ("cut off",) for a call that was cut off before its
    arguments. Also checks the order of blocks."""
    reading = parser(syntax, **how)
    events = [event for piece in pieces for event in reading.push(piece)] + reading.finish(is_cut=is_cut)
    parts: Parts = []
    open_call: int | None = None
    for event in events:
        match event:
            case TextDelta(text=text) | ReasoningDelta(text=text):
                assert text
                assert open_call is None
                kind = "text" if isinstance(event, TextDelta) else "thought"
                if parts and parts[-1][0] == kind:
                    parts[-1] = (kind, parts[-1][1] + text)
                else:
                    parts.append((kind, text))
            case ToolCallStart():
                assert open_call is None
                open_call = event.call
                assert open_call == sum(kind in ("call", "malformed", "cut off") for kind, *_ in parts)
                parts.append(("call", event.name, ""))
            case ToolCallDelta():
                assert event.call == open_call
                parts[-1] = (*parts[-1][:2], parts[-1][2] + event.arguments)
            case ToolCallStop():
                assert event.call == open_call
                is_whole = is_object(parts[-1][2])
                if not event.is_complete:
                    assert not is_whole, "half a call must not parse"
                    parts[-1] = ("cut off", *parts[-1][1:])
                elif not is_whole:
                    parts[-1] = ("malformed", *parts[-1][1:])
                open_call = None
    assert open_call is None
    if reading.broke_off and not (parts and parts[-1][0] == "cut off"):
        parts.append(("cut off",))
    assert reading.broke_off is bool(parts and parts[-1][0] == "cut off")
    return parts


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def call(name: str, **arguments: Any) -> tuple[str, str, str]:
    return ("call", name, json.dumps(arguments, ensure_ascii=False))
