"""Harmony's messages as a client sees them: well written, sloppy, and cut off."""

from __future__ import annotations

import itertools

import pytest

from cortex.neuron.text.output import harmony
from cortex.neuron.text.output.harmony import HarmonyParser
from cortex.wire.events import TextDelta

from ..conftest import random_splits
from ..responses import Parts, call, parse
from ..syntax_names import S

H = S.HARMONY
STOP = call("stop")
ANALYSIS = "<|channel|>analysis<|message|>I look.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.\n"
THOUGHT, TEXT = ("thought", "I look."), ("text", "It rains.\n")

CASES: list[tuple[str, Parts]] = [
    (ANALYSIS + FINAL, [THOUGHT, TEXT]),
    (FINAL.removeprefix("<|start|>assistant") + "<|return|>", [("text", "It rains.")]),
    # reasoning again after a message to the user, which is set apart from the answer
    (
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{ANALYSIS}{FINAL}",
        [THOUGHT, ("text", "Wait."), ("thought", "\n\nI look."), ("text", "\n\nIt rains.\n")],
    ),
    (f"{ANALYSIS}<|start|>assistant{ANALYSIS}{FINAL}", [("thought", "I look.\n\nI look."), TEXT]),
    # a call: announced or not, with or without a body, in the analysis channel
    (
        "<|channel|>commentary<|message|>I stop.<|end|><|start|>assistant to=functions.stop<|channel|>commentary"
        "<|message|>{}<|call|>",
        [("text", "I stop."), STOP],
    ),
    ("<|channel|>commentary to=functions.stop <|constrain|>json<|message|><|call|>", [STOP]),
    ("<|channel|>commentary to=functions.stop<|call|>", [STOP]),
    ("<|channel|>commentary to=functions.stop", [STOP]),
    ("<|channel|>analysis to=functions.stop code<|message|> {} <|call|>", [STOP]),
    (" to=functions.stop<|channel|>commentary<|message|>{}trailing", [STOP]),
    ("<|channel|>commentary to=functions.new<|message|>{}", [call("new")]),
    # lines of a header
    ("<|channel|>commentary to=functions.stop\n<|message|>{}<|call|>", [STOP]),
    ("<|channel|>commentary\nto=functions.stop <|constrain|>json\n<|message|>{}<|call|>", [STOP]),
    ("<|channel|>\ncommentary to=functions.stop\njson\n\n<|message|>{}<|call|>", [STOP]),
    ("\n to=functions.stop\n<|channel|>commentary\n<|constrain|>\njson<|message|>{}<|call|>", [STOP]),
    (
        "<|channel|>analysis\n<|message|>I look.<|end|>\n<|start|>assistant\n<|channel|>final\n<|message|>It rains.\n",
        [THOUGHT, TEXT],
    ),
    ("<|channel|>final\nto be or not", [("text", "\nto be or not")]),
    ("<|channel|>final\njust text", [("text", "\njust text")]),
    # a name never has a marker in it
    ("<|channel|>commentary to=functions.stop<|channel|>commentary<|message|>{}", [STOP]),
    ("<|channel|>commentary to=functions.stop<|constrain|>json<|message|>{}", [STOP]),
    ("<|channel|>commentary to=functions.<|message|>Hm.", [("text", "Hm.")]),
    # arguments that are no object are text
    ("<|channel|>commentary to=functions.stop<|message|>now!<|call|>", [("text", "now!")]),
    ('<|channel|>commentary to=functions.stop<|message|>{"a": 1<|call|>', [("cut off", "stop", '{"a": 1')]),
    # tools that the client does not have are not calls
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", [("thought", "print(1)")]),
    ('<|channel|>commentary to=browser.search<|message|>{"q": 1}<|call|>', [("thought", '{"q": 1}')]),
    ("<|channel|>commentary to=tools.stop<|message|>{}", [STOP]),
    # messages of others that the model makes up
    (f"{ANALYSIS}<|start|>functions.stop to=assistant<|channel|>commentary<|message|>1<|end|>{FINAL}", [THOUGHT, TEXT]),
    (f"{ANALYSIS}<|start|>user<|message|>And?<|end|>{FINAL}", [THOUGHT, TEXT]),
    # what models leave out or write twice
    ("It rains.\n", [TEXT]),
    ("to be or not", [("text", "to be or not")]),
    (f"{ANALYSIS}<|channel|>final<|message|>It rains.\n", [THOUGHT, TEXT]),
    (f"{ANALYSIS}assistant<|channel|>final<|message|>It rains.\n", [THOUGHT, TEXT]),
    (f"{ANALYSIS}It rains.\n", [THOUGHT, TEXT]),
    ("<|channel|>analysis<|message|>I look.<|start|>assistant<|channel|>final<|message|>It rains.\n", [THOUGHT, TEXT]),
    ("<|channel|>final It rains.\nYes.", [("text", " It rains.\nYes.")]),
    ("<|message|>It rains.\n", [TEXT]),
    ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", [("text", "abc")]),
    ("<|channel|>final<|message|>a <| b <|x|> c<|", [("text", "a <| b <|x|> c<|")]),
    ("<|channel|>other<|message|>a", [("text", "a")]),
    ("<|channel|>final", []),
    ("<|end|><|end|><|return|>", []),
    ("<|channel|>" + "x" * 600, [("text", "x" * 600)]),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_messages_are_read_the_same_streaming_or_not(text: str, expected: Parts) -> None:
    assert parse([text], H) == expected
    for cut in range(len(text)) if len(text) < 300 else ():
        assert parse([text[:cut], text[cut:]], H) == expected
    for pieces in random_splits(text, seed=len(text), count=20):
        assert parse(pieces, H) == expected


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_response_cut_off_anywhere_shows_no_marker(text: str, expected: Parts) -> None:
    del expected
    for cut in range(min(len(text), 300)):
        parts = parse([text[:cut]], H, is_cut=True)
        assert not [shown for _, *each in parts for shown in each for marker in harmony.MARKERS if marker in shown]


def test_continues_the_message_that_the_prompt_has_begun() -> None:
    opened = "assistant<|channel|>final<|message|>It "
    parser = HarmonyParser((), lambda: "c", 0, opened)
    assert parser.is_over
    assert parser.push("rains.") == [TextDelta(index=0, text="rains.")]
    thinking = HarmonyParser((), lambda: "c", 0, "assistant<|channel|>analysis<|message|>")
    assert thinking.is_thinking


def test_knows_when_it_reasons_and_when_the_response_begins() -> None:
    parser = HarmonyParser((), lambda: "c", 0)
    text = f"{ANALYSIS}<|start|>assistant{ANALYSIS}<|start|>assistant<|channel|>final<|message|>It rains."
    states = []
    for character in text:
        parser.push(character)
        states.append((parser.is_thinking, parser.is_over))
    assert [state for state, _ in itertools.groupby(states)] == [
        (False, False),
        (True, False),
        (False, False),
        (True, False),
        (False, False),
        (False, True),
    ]


def test_without_tools_a_call_is_text() -> None:
    parser = HarmonyParser(None, lambda: "c", 0)
    events = parser.push("<|channel|>commentary to=functions.f<|message|>{}<|call|>") + parser.finish()
    assert events == [TextDelta(index=0, text="{}")]
