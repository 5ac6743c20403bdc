"""Responses as other servers really send them."""

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.openai_chat import ResponseDecoder, unfold
from cortex.wire.dialects.openai_chat.upstream_response import foreign_error
from cortex.wire.errors import UpstreamInterrupted
from cortex.wire.events import (
    AnyEvent,
    Failure,
    Finish,
    ReasoningDelta,
    Start,
    TextDelta,
    Timing,
    ToolCallDelta,
    ToolCallStart,
    ToolCallStop,
    Usage,
)

START = Start(id="x", model="m", created=1)


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **rest: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {"id": "x", "model": "m", "created": 1, "choices": choices, **rest}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def decode(*data: bytes) -> list[AnyEvent]:
    decoder = ResponseDecoder()
    return [event for piece in data for event in decoder.feed(piece)] + decoder.finish()


DONE = b"data: [DONE]\n\n"
ENDED = Finish(reason="stop", usage=Usage())


def test_decodes_reasoning_under_both_names() -> None:
    events = decode(chunk({"reasoning": "a"}), chunk({"reasoning_content": "b"}), chunk({"content": "c"}, "stop"))
    assert events == [START, ReasoningDelta(text="a"), ReasoningDelta(text="b"), TextDelta(text="c"), ENDED]


def test_ignores_empty_tool_calls_and_null_content() -> None:
    events = decode(chunk({"role": "assistant", "content": None, "tool_calls": []}), chunk({"content": "c"}, "stop"))
    assert events == [START, TextDelta(text="c"), ENDED]


def test_id_repeated_on_every_piece_is_one_call() -> None:
    def piece(arguments: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": arguments}}]}

    assert decode(chunk(piece('{"a"')), chunk(piece(": 1}"), "stop"), DONE) == [
        START,
        ToolCallStart(call=0, id="c1", name="f"),
        ToolCallDelta(call=0, arguments='{"a"'),
        ToolCallDelta(call=0, arguments=": 1}"),
        ToolCallStop(call=0),
        Finish(reason="tool_calls", usage=Usage()),
    ]


def test_decodes_calls_without_index_and_arguments_as_object() -> None:
    calls = [
        {"id": "a", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "b", "function": {"name": "g", "arguments": None}},
    ]
    assert decode(chunk({"tool_calls": calls}, "tool_calls")) == [
        START,
        ToolCallStart(call=0, id="a", name="f"),
        ToolCallDelta(call=0, arguments='{"x":1}'),
        ToolCallStop(call=0),
        ToolCallStart(call=1, id="b", name="g"),
        ToolCallStop(call=1),
        Finish(reason="tool_calls", usage=Usage()),
    ]


def test_decodes_usage_after_the_finish_reason() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    events = decode(chunk({"content": "c"}, "length"), chunk(usage=usage), DONE)
    assert events[-1] == Finish(reason="length", usage=Usage(prompt_tokens=5, cached_tokens=3, completion_tokens=2))


def test_incomplete_stream_is_an_error() -> None:
    with pytest.raises(UpstreamInterrupted, match="in the middle"):
        decode(chunk({"content": "c"}))


@pytest.mark.parametrize("data", [b"data: nope\n\n", b"data: 3\n\n", b'data: {"choices": [3]}\n\n', DONE])
def test_malformed_stream_raises_our_error(data: bytes) -> None:
    with pytest.raises(UpstreamInterrupted):
        decode(data)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"choices": [{"index": "x"}]}', b"{}"])
def test_malformed_body_raises_our_error(body: bytes) -> None:
    with pytest.raises(UpstreamInterrupted):
        unfold(body)


def test_error_in_the_stream_is_a_failure_and_ends_it() -> None:
    error = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
    assert decode(chunk({"content": "c"}), error, DONE) == [
        START,
        TextDelta(text="c"),
        Failure(code="upstream_interrupted", message="out of memory"),
    ]


def test_rejects_interleaved_calls() -> None:
    def piece(index: int) -> bytes:
        return chunk({"tool_calls": [{"index": index, "function": {"name": "f", "arguments": "{"}}]})

    with pytest.raises(UpstreamInterrupted, match="several tool calls"):
        decode(piece(0), piece(1), piece(0))


@pytest.mark.parametrize(
    ("timings", "timing"),
    [
        ({"prompt_ms": 250.0, "predicted_ms": 1500}, Timing(prefill_s=0.25, decode_s=1.5)),
        ({"prompt_ms": None}, Timing()),
        ({"prompt_ms": -1, "predicted_ms": 5}, Timing()),
        ({"predicted_ms": 1e30}, Timing()),
        ({"predicted_ms": 10**400}, Timing()),
        ({"prompt_ms": [250.0], "predicted_ms": 1500}, Timing()),
        ({"prompt_ms": "soon"}, Timing()),
        ("soon", Timing()),
    ],
)
def test_durations_of_llama_cpp_are_read(timings: Any, timing: Timing) -> None:
    *_, finish = decode(chunk({"content": "c"}, "stop", timings=timings), DONE)
    assert isinstance(finish, Finish)
    assert finish.timing == timing


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (Timing(), Timing(gateway_s=1, queue_s=2, prefill_s=3, decode_s=4)),
        (Timing(prefill_s=1, decode_s=5), Timing(gateway_s=1, queue_s=3, prefill_s=1, decode_s=5)),
        (Timing(prefill_s=1, decode_s=50), Timing(gateway_s=1, queue_s=2, prefill_s=3, decode_s=4)),
    ],
)
def test_reported_durations_are_part_of_the_measured_time(reported: Timing, expected: Timing) -> None:
    assert Timing(gateway_s=1, queue_s=2, prefill_s=3, decode_s=4).with_reported(reported) == expected


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "context_length_exceeded", "context_length_exceeded"),
        (422, "context_length_exceeded", "context_length_exceeded"),
        (400, "string_above_max_length", "invalid_value"),
        (400, "invalid_api_key", "invalid_value"),
        (400, 400, "invalid_value"),
        (401, "context_length_exceeded", "upstream_unavailable"),
    ],
)
def test_error_of_a_request_keeps_a_code_that_is_known_here(status: int, code: object, expected: str) -> None:
    body = msgspec.json.encode({"error": {"message": "because", "code": code}})
    error = foreign_error(status, body)
    assert (error.code, error.message) == (expected, "because")
