"""Reasoning and tool calls: the same events for any split, and no text is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.families.registry import SYNTAXES
from cortex.neuron.families.tool_calls import ToolSyntax
from cortex.neuron.text.output import harmony
from cortex.neuron.text.tools.syntaxes import call_syntax
from cortex.neuron.text.tools.tags import typed
from cortex.wire.events import ToolCallDelta, ToolCallStart

from ....examples import MANY
from ..conftest import random_splits
from ..responses import Parts, call, parse, parser
from ..syntax_names import S

HERMES = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich }\\" </tool_call>", "days": 3}}\n</tool_call>'
)
HERMES_CALL = call("get_weather", city='Zürich }" </tool_call>', days=3)
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
XML_CALL = call("get_weather", city="Zürich", days=3)
LLAMA = '{"name": "get_weather", "parameters": {"city": "Zürich {"}}'
LLAMA_CALL = call("get_weather", city="Zürich {")

Q, H, L, P = S.QWEN_XML, S.HERMES_JSON, S.LLAMA_JSON, S.PLAIN_JSON

Case = tuple[str, ToolSyntax | None, dict[str, bool], Parts]


def only_text(text: str, syntax: ToolSyntax) -> Case:
    return text, syntax, {}, [("text", text)]


def only_markup(text: str, syntax: ToolSyntax) -> Case:
    return text, syntax, {}, [("cut off",)]


def cut_off(text: str, syntax: ToolSyntax, name: str, arguments: str) -> Case:
    return text, syntax, {}, [("cut off", name, arguments)]


CASES: list[Case] = [
    # reasoning
    ("<think>\nhm\n\nso\n</think>\n\nHi\n", None, {"thinks": True}, [("thought", "hm\n\nso"), ("text", "Hi\n")]),
    ("hm\n</think>\n\nHi", None, {"opened": True}, [("thought", "hm"), ("text", "Hi")]),
    ("<think>again</think>Hi", None, {"opened": True}, [("thought", "again"), ("text", "Hi")]),
    ("cut off in the mid", None, {"opened": True}, [("thought", "cut off in the mid")]),
    ("cut off </thi", None, {"opened": True}, [("thought", "cut off </thi")]),
    ("<think>\n\n</think>\n\nHi", None, {"thinks": True}, [("text", "Hi")]),
    ("I say <think>no</think>", None, {"thinks": True}, [("text", "I say <think>no</think>")]),
    ("  <thi", None, {"thinks": True}, [("text", "  <thi")]),
    ("a</think>b</think>c", None, {"opened": True}, [("thought", "a"), ("text", "b</think>c")]),
    ("", None, {"opened": True}, []),
    # tags around the response
    ("hm</think>\n<answer>\nHi\n</answer>", None, {"opened": True}, [("thought", "hm"), ("text", "Hi")]),
    ("<answer>Hi</answer>\n bye", None, {"thinks": True}, [("text", "Hi bye")]),
    ("<answer>\na </answe r> b", None, {"thinks": True}, [("text", "a </answe r> b")]),
    ("<think>a</think> <answe", None, {"thinks": True}, [("thought", "a"), ("text", " <answe")]),
    ("See <answer>", None, {"thinks": True}, [("text", "See <answer>")]),
    # Hermes
    (HERMES, H, {}, [HERMES_CALL]),
    (f"Sure.\n{HERMES}\n{HERMES}\n", H, {}, [("text", "Sure."), HERMES_CALL, HERMES_CALL]),
    (f"{HERMES}\n\nDone.\n", H, {}, [HERMES_CALL, ("text", "Done.\n")]),
    (f"<think>\nuse it\n</think>\n\n{HERMES}", H, {"thinks": True}, [("thought", "use it"), HERMES_CALL]),
    (f"<think>\nlike {HERMES}", H, {"thinks": True}, [("thought", f"like {HERMES}")]),
    ('<tool_call>{"name": "stop"}</tool_call>', H, {}, [call("stop")]),
    ('<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>', H, {}, [call("stop", a=1)]),
    ('<tool_call>{"name": "stop", "arguments": {"a": "x\ny"}}</tool_call>', H, {}, [call("stop", a="x\ny")]),
    ('<tool_call>{"name": "stop", "arguments": {}}', H, {}, [call("stop")]),
    *(
        only_text(text, H)
        for text in (
            '<tool_call>{"name": "stop", "arguments": [1]}</tool_call>',
            '<tool_call>{"arguments": {}}</tool_call> and more',
            "<tool_call>stop()</tool_call>",
            "a < b <tool_ <tool_call",
            "  \n",
        )
    ),
    *(
        only_markup(text, H)
        for text in (
            "<tool_call>",
            '<tool_call>\n{"name": "Bash',
            '<tool_call>{"name": "stop"',
            '<tool_call>{"name": "stop", "arguments": ',
            '<tool_call>{"arguments": {"a": 1}, "na',
        )
    ),
    (f'{HERMES}\n<tool_call>{{"na', H, {}, [HERMES_CALL, ("cut off",)]),
    ('<tool_call>{"name": "stop", "arguments": {"a": "cut', H, {}, [("cut off", "stop", '{"a": "cut')]),
    (
        '<tool_call>{"name": "stop", "arguments": {"a": }}</tool_call>.',
        H,
        {},
        [("malformed", "stop", '{"a": }'), ("text", ".")],
    ),
    (
        '<tool_call>{"name": "stop", "arguments": {"a": "say "hi" now"}}</tool_call>',
        H,
        {},
        [("malformed", "stop", '{"a": "say "hi" now"}')],
    ),
    ('<tool_call>{"name": "stop"} oops </tool_call>', H, {}, [call("stop"), ("text", "oops </tool_call>")]),
    ('<tool_call>{"name": "stop", "arguments": {}}, <tool', H, {}, [call("stop"), ("text", ", <tool")]),
    ('<tool_call>{"name": "stop", "arguments": {}\n</tool_call>Bye', H, {}, [call("stop"), ("text", "Bye")]),
    ('<tool_call>{"name": "stop", "arguments": {}, "id": "}"}</tool_call>', H, {}, [call("stop")]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "stop"}</tool_call>', H, {}, [call("stop", a=1)]),
    ('<tool_call>{"name": "stop\\u0021", "arguments": {}}</tool_call>', H, {}, [call("stop!")]),
    (f"<tool_call>no <tool_call> {HERMES}", H, {}, [("text", "<tool_call>no <tool_call>"), HERMES_CALL]),
    # Qwen XML
    (XML, Q, {}, [XML_CALL]),
    (f"Let me look.\n\n{XML}\n{XML}", Q, {}, [("text", "Let me look."), XML_CALL, XML_CALL]),
    (XML.removeprefix("<tool_call>\n"), Q, {}, [XML_CALL]),
    (XML.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") + "\nBye", Q, {}, [XML_CALL, ("text", "Bye")]),
    ("<tool_call>\n<function=stop>\n</function>\nwhat?", Q, {}, [call("stop"), ("text", "what?")]),
    (
        "<tool_call>\n<function=stop>\n</function>\n<function=stop>\n</function>\n</tool_call>",
        Q,
        {},
        [call("stop"), call("stop")],
    ),
    (XML.removesuffix("_call>"), Q, {}, [XML_CALL]),
    ("<tool_call><function=stop></function></tool_call>", Q, {}, [call("stop")]),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n  a </parameter> b\n</tool_call>\n\n</parameter>\n"
        '<parameter=where>\n{"x": [1]}\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n'
        "</function>\n</tool_call>",
        Q,
        {},
        [call("get_weather", city="  a </parameter> b\n</tool_call>\n", where={"x": [1]}, metric=True)],
    ),
    *(
        only_text(text, Q)
        for text in (
            "<tool_call>\n<function=get_weather>\nZürich</function></tool_call>",
            "<tool_call>\n<function=\n>",
        )
    ),
    *(
        only_markup(text, Q)
        for text in ("<tool_call>\n<fun", "<tool_call>\n<function=get_w", "<function=get_weather>\n<parameter=ci")
    ),
    (
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nZür"ich\n</para',
        Q,
        {},
        [("cut off", "get_weather", '{"city": "Zür\\"ich')],
    ),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n1",
        Q,
        {},
        [("cut off", "get_weather", '{"days": ')],
    ),
    (
        "<function=get_weather><parameter=city>\n\na\n</parameter>\n<parameter=\n\n</parameter></function>",
        Q,
        {},
        [call("get_weather", city="\na\n</parameter>\n<parameter=\n")],
    ),
    # Llama and plain JSON
    (LLAMA, L, {}, [LLAMA_CALL]),
    (f"<|python_tag|>{LLAMA}", L, {}, [LLAMA_CALL]),
    (f"I look. <|python_tag|> {LLAMA}; {LLAMA}", L, {}, [("text", "I look."), LLAMA_CALL, LLAMA_CALL]),
    (f" {LLAMA}\n{LLAMA}", P, {}, [LLAMA_CALL, LLAMA_CALL]),
    ('{"type": "function", "function": {"name": "stop", "arguments": {}}}', P, {}, [call("stop")]),
    *(
        only_text(text, syntax)
        for syntax in (L, P)
        for text in (
            '{"temperature": 3}',
            '{"name": "unknown", "parameters": {}}',
            '{"name": "steve',
            f"For example {LLAMA}",
            "{ not json }",
            "{",
        )
    ),
    *(cut_off('{"name": "stop", "parameters": {"a": 1', syntax, "stop", '{"a": 1') for syntax in (L, P)),
    *(only_markup(text, each) for each in (L, P) for text in ('{"name": "st', '{"name": "stop", "parameters": ')),
    only_markup('<|python_tag|>{"na', L),
    ("<|python_tag|>print(1)", L, {}, [("text", "print(1)")]),
    (f"{LLAMA}; and so on", L, {}, [LLAMA_CALL, ("text", "; and so on")]),
]


@pytest.mark.parametrize(("text", "syntax", "how", "expected"), CASES)
def test_output_is_parsed_the_same_streaming_or_not(
    text: str, syntax: ToolSyntax | None, how: dict[str, bool], expected: Parts
) -> None:
    assert parse([text], syntax, **how) == expected
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]], syntax, **how) == expected
    for pieces in random_splits(text, seed=len(text), count=20):
        assert parse(pieces, syntax, **how) == expected


FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "\n", " ", "a", "{", "}", '"', "<", ";", "é"),
        *("<tool_call>", "</tool_call>", "<function=", "stop>", "</function>", "<parameter=x>", "</parameter>"),
        *(
            '{"name": "stop", "arguments": {}}',
            '{"name": "stop", "parameters": {"a": "<"}}',
            '{"name": "stop", "arguments": {"a": "\\',
            '"}}',
            HERMES,
            XML,
        ),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "```json\n",
            "\n```",
            "<｜tool▁call▁end｜>",
        ),
        *("<|tool_call_begin|>", "functions.stop:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        *(
            "<｜DSML｜function_calls>",
            '<｜DSML｜invoke name="stop">',
            "<｜DSML｜",
            "</｜DSML｜invoke>",
            "stop\n",
            "[stop(",
        ),
        *("<answer>", "</answer>", "<TOOLCALL>", "</TOOLCALL>", "<|function_call|>", "<|tool_call:name|>"),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", ",", "stop", "(", ")", "a=1", "'", "\\", "\ud800"),
        *("<|python_tag|>", "<|tool_call|>", "<|/tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>", "<tool_calls>"),
        *("<|tool_call_start|>", "<|tool_call_end|>", "<function_calls>", "</function_calls>", "</tool_calls>"),
        *("<|tool_call>", "call:stop{", '<|"|>', "<tool_call|>", "<seed:tool_call>", "</seed:tool_call>"),
        *("<minimax:tool_call>", '<invoke name="stop">', '<parameter name="x">', "</invoke>", "</minimax:tool_call>"),
        *(
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        *harmony.MARKERS,
        *("assistant", "analysis", "commentary", "final", " to=functions.stop", " to=python", "user", "json"),
    ]
)


@MANY
@given(
    pieces=st.lists(FRAGMENTS, max_size=12),
    syntax=st.sampled_from([None, *SYNTAXES.values()]),
    thinks=st.booleans(),
    opened=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_text_gives_the_same_events_for_any_split(
    pieces: list[str], syntax: ToolSyntax | None, thinks: bool, opened: bool, seed: int
) -> None:
    text = "".join(pieces)
    whole = parse([text], syntax, thinks=thinks, opened=opened)
    for split in (pieces, *random_splits(text, seed, 3)):
        assert parse(split, syntax, thinks=thinks, opened=opened) == whole
    if any(marker in text for marker in harmony.MARKERS) and syntax is S.HARMONY:
        assert not [part for part in whole for shown in part[1:] for marker in harmony.MARKERS if marker in shown]
    elif all(kind == "text" for kind, *_ in whole) and not (thinks or opened):
        assert "".join(parts[1] for parts in whole) == without_control_tokens(text, syntax)


def without_control_tokens(text: str, syntax: ToolSyntax | None) -> str:
    for marker in call_syntax(syntax, ()).never_text if syntax not in (None, S.HARMONY) else ():
        text = text.replace(marker, "")
    return text


def test_response_streams_before_its_end() -> None:
    reading = parser(H)
    assert [event.text for event in reading.push("Hello wor")] == ["Hello wor"]  # type: ignore[union-attr]
    reading = parser(P)
    assert reading.push('{"temp') == []
    assert [event.text for event in reading.push('erature": ')] == ['{"temperature":']  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "syntax", "pieces"),
    [
        (
            '<tool_call>{"name": "stop", "arguments": {"a": "one two"}}</tool_call>',
            H,
            ["stop", "{", '"', "a", '"', ":", " ", '"', "o", "n", "e"],
        ),
        ('{"name": "stop", "parameters": {"a": 1}}', L, ["stop", "{", '"', "a", '"', ":", " ", "1", "}"]),
        (
            "<tool_call><function=get_weather><parameter=city>Zür\nich</parameter>",
            Q,
            ["get_weather", '{"city": "', "Z", "ü", "r", "\\ni", "c", "h"],
        ),
    ],
)
def test_arguments_stream_while_they_are_written(text: str, syntax: ToolSyntax, pieces: list[str]) -> None:
    reading = parser(syntax)
    parts: list[str] = []
    for event in (event for character in text for event in reading.push(character)):
        if isinstance(event, ToolCallStart):
            parts.append(event.name)
        elif isinstance(event, ToolCallDelta):
            parts.append(event.arguments)
    assert parts[: len(pieces)] == pieces


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "integer"}, 12),
        ("12", {"type": "string"}, "12"),
        ("12", {}, "12"),
        ("1.5", {"type": "number"}, 1.5),
        ("1.5", {"type": "integer"}, "1.5"),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["integer", "null"]}, None),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("2", {"enum": [1, 2]}, 2),
        ('{"a": 1}', {"$ref": "#/$defs/x"}, {"a": 1}),
        ("text", {"type": ["string", "integer"]}, "text"),
    ],
)
def test_raw_values_are_typed_by_the_schema(text: str, schema: dict[str, Any], value: Any) -> None:
    assert typed(text, schema) == value
    assert type(typed(text, schema)) is type(value)
