from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.ollama import chat, generate
from cortex.wire.dialects.ollama.request import duration_s
from cortex.wire.errors import InvalidValue, MissingModel
from cortex.wire.requests import Message, PicturePart, Reasoning, Text, Thinking, ToolCall, ToolResult

HELLO = [{"role": "user", "content": "hello"}]


def parse_chat(**fields: Any) -> Any:
    return chat.parse(msgspec.json.encode({"model": "m", "messages": HELLO} | fields))


def parse_generate(**fields: Any) -> Any:
    return generate.parse(msgspec.json.encode({"model": "m", "prompt": "hello"} | fields))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("qwen3", "qwen3"),
        ("qwen3:latest", "qwen3"),
        ("qwen3:4b", "qwen3:4b"),
        ("hf.co/owner/name:Q4_K_M", "owner/name:Q4_K_M"),
        ("HF.co/owner/name", "owner/name"),
        ("huggingface.co/owner/name:latest", "owner/name"),
    ],
)
def test_model_names_are_ours(name: str, model: str) -> None:
    assert parse_chat(model=name).model == model


def test_a_name_that_is_only_a_tag_is_no_name() -> None:
    with pytest.raises(MissingModel):
        parse_chat(model=":latest")


def test_a_request_without_a_prompt_loads_the_model() -> None:
    assert parse_chat(messages=[]).loads_only
    assert parse_chat(messages=None).loads_only
    assert parse_generate(prompt="").loads_only
    assert parse_generate(prompt=None, system="Be brief.").loads_only
    assert not parse_chat().loads_only
    assert not parse_generate(prompt="", images=["iVBORw0KGgo="]).loads_only


def test_streams_unless_told_otherwise() -> None:
    assert parse_chat().stream
    assert not parse_chat(stream=False).stream


@pytest.mark.parametrize(
    ("think", "thinking"),
    [
        (True, Thinking(enabled=True)),
        (False, Thinking(enabled=False)),
        ("low", Thinking(enabled=True, effort="low")),
        ("max", Thinking(enabled=True, effort="high")),
    ],
)
def test_think_is_a_switch_or_an_effort(think: Any, thinking: Thinking) -> None:
    assert parse_chat(think=think).thinking == thinking


@pytest.mark.parametrize("field", [{"think": "much"}, {"format": "xml"}, {"format": 3}, {"keep_alive": "soon"}])
def test_values_without_a_meaning_are_rejected_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_chat(**field)
    assert caught.value.param == next(iter(field))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("-1m", -60.0),
        ("0", 0.0),
        ("-1", -1.0),
        ("1.5h", 5400.0),
        ("300ms", 0.3),
        ("", None),
        ("m", None),
        ("1d", None),
        ("1" * 80, None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration_s(text) == (None if seconds is None else pytest.approx(seconds))


def test_keep_alive_is_a_number_of_seconds_or_a_duration() -> None:
    assert parse_chat().keep_alive_s is None
    assert parse_chat(keep_alive=0).keep_alive_s == 0
    assert parse_chat(keep_alive=-1).keep_alive_s == -1
    assert parse_chat(keep_alive="10m").keep_alive_s == 600


def test_a_repeat_window_of_zero_disables_the_penalty() -> None:
    sampling = parse_chat(options={"repeat_penalty": 1.3, "repeat_last_n": 0}).sampling
    assert (sampling.repetition_penalty, sampling.repetition_window) == (1.0, None)
    assert parse_chat(options={"repeat_penalty": 1.3, "repeat_last_n": -1}).sampling.repetition_window == 0


def test_options_that_are_not_known_are_listed() -> None:
    request = parse_chat(options={"mirostat": 2, "temperature": 0.1, "num_gpu": 1, "ignore_eos": True}, other=1)
    assert request.ignored_fields == ("other", "options.mirostat", "options.ignore_eos")
    assert request.sampling.temperature == 0.1
    assert not request.sampling.ignore_eos


def test_results_find_their_calls_by_id_by_name_and_in_order() -> None:
    calls = [
        {"function": {"name": "weather", "arguments": {"city": "Ulm"}}},
        {"id": "mine", "function": {"name": "clock", "arguments": {}}},
        {"function": {"name": "weather", "arguments": {"city": "Bonn"}}},
    ]
    results = [
        {"role": "tool", "content": "12:00", "tool_name": "clock"},
        {"role": "tool", "content": "sun", "tool_name": "weather"},
        {"role": "tool", "content": "rain"},
    ]
    request = parse_chat(
        messages=[*HELLO, {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls}, *results]
    )
    assert request.messages[1:] == (
        Message(
            role="assistant",
            parts=(
                Reasoning(text="Hm."),
                ToolCall(id="call_0", name="weather", arguments='{"city":"Ulm"}'),
                ToolCall(id="mine", name="clock", arguments="{}"),
                ToolCall(id="call_2", name="weather", arguments='{"city":"Bonn"}'),
            ),
        ),
        Message(role="tool", parts=(ToolResult(call_id="mine", parts=(Text(text="12:00"),)),), name="clock"),
        Message(role="tool", parts=(ToolResult(call_id="call_0", parts=(Text(text="sun"),)),), name="weather"),
        Message(role="tool", parts=(ToolResult(call_id="call_2", parts=(Text(text="rain"),)),)),
    )


def test_images_are_parts_of_their_message() -> None:
    request = parse_chat(messages=[{"role": "user", "content": "What?", "images": ["/9j/4AAQ", "iVBORw0K"]}])
    assert request.messages[0].parts == (
        Text(text="What?"),
        PicturePart(data=b"\xff\xd8\xff\xe0\0\x10", param="messages[0].images[0]"),
        PicturePart(data=b"\x89PNG\r\n", param="messages[0].images[1]"),
    )
    assert parse_generate(images=["UklGRg=="]).messages[0].parts[1] == PicturePart(data=b"RIFF", param="images[0]")


def test_generate_is_a_turn_or_a_raw_prompt() -> None:
    assert parse_generate(system="Be brief.").messages == (
        Message(role="system", parts=(Text(text="Be brief."),)),
        Message(role="user", parts=(Text(text="hello"),)),
    )
    raw = parse_generate(raw=True)
    assert (raw.prompt, raw.messages) == ("hello", ())
    with pytest.raises(InvalidValue, match="raw"):
        parse_generate(raw=True, system="Be brief.")


def test_a_schema_constrains_the_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    output = parse_chat(format=schema).output
    assert (output.kind, output.schema, output.param) == ("json_schema", schema, "format")
    assert parse_chat(format="json").output.kind == "json_object"
    assert parse_chat(format="").output is None
