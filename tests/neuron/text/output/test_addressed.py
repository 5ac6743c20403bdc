"""Messages of a model that addresses each one: reasoning, text and calls, for any split."""

from __future__ import annotations

import itertools

import pytest

from cortex.neuron.families.family import ADDRESSED
from cortex.neuron.text.output.addressed import AddressedSplitter
from cortex.neuron.text.output.parser import OutputEvent, OutputParser
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.detect import reasoning_markers
from cortex.neuron.text.tools.scanner import CallScanner
from cortex.neuron.text.tools.syntaxes import call_syntax
from cortex.wire.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart

from ..conftest import random_splits
from ..responses import TOOLS
from ..syntax_names import S

CALL = (
    '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="days">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
CASES = [
    (" to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Hi", ["thought hm", "text Hi"]),
    (" to=self<|message|>hm<|eom|>assistant to=user<|message|>Hi", ["thought hm", "text Hi"]),
    ("to=user<|message|>Hi", ["text Hi"]),
    ("<|message|>Hi", ["text Hi"]),
    ("Hi to=self<|message", ["text Hi to=self<|message"]),
    ("assist me", ["text assist me"]),
    (" to=self<|message|>a<|eom|><|start|>assistant to=self<|message|>b<|eom|>", ["thought ab"]),
    (" to=self<|message|>cut <|eo", ["thought cut <|eo"]),
    (" to=self<|message|>hm<|eom|><|start|>assistant to=us", ["thought hm"]),
    (f" to=get_weather<|message|>{CALL}", ["call get_weather", 'arguments {"days": 3}']),
    (
        f" to=user<|message|>Wait.<|eom|><|start|>assistant to=get_weather<|message|>{CALL}",
        ["text Wait.", "call get_weather", 'arguments {"days": 3}'],
    ),
]


def shown(events: list[OutputEvent]) -> list[str]:
    """Joined deltas, in order."""
    parts: list[tuple[str, str]] = []
    for event in events:
        match event:
            case TextDelta(text=text):
                parts.append(("text", text))
            case ReasoningDelta(text=text):
                parts.append(("thought", text))
            case ToolCallStart(name=name):
                parts.append(("call", name))
            case ToolCallDelta(arguments=arguments):
                parts.append(("arguments", arguments))
            case _:
                pass
    grouped = itertools.groupby(parts, key=lambda part: part[0])
    return [f"{kind} {''.join(text for _, text in members)}" for kind, members in grouped]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_messages_become_the_same_events_for_any_split(text: str, expected: list[str]) -> None:
    for pieces in ([text], *random_splits(text, seed=1, count=20)):
        scanner = CallScanner(call_syntax(S.MUSE_XML, TOOLS), lambda: "call_0", 0)
        reading = OutputParser(AddressedSplitter(starts_in_reasoning=False), scanner, 0)
        events = [event for piece in pieces for event in reading.push(piece)] + reading.finish()
        assert shown(events) == expected


def test_reasoning_that_the_prompt_opened_ends_with_its_message() -> None:
    splitter = AddressedSplitter(starts_in_reasoning=True)
    seen = []
    for text in ("hm", "<|eom|>", "assistant to=user<|message|>Hi"):
        pieces = splitter.push(text)
        seen.append(([tuple(piece) for piece in pieces], splitter.is_thinking, splitter.is_over))
    assert seen == [([(True, "hm")], True, False), ([], False, False), ([(False, "Hi")], False, True)]


def test_template_with_addressed_messages_is_recognised() -> None:
    assert reasoning_markers(ChatTemplate("{{ '<|start|>assistant to=self<|message|>x<|eom|>' }}")) is ADDRESSED
