"""Properties of arbitrary event streams in every dialect."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.wire.dialects import anthropic_messages, openai_chat, openai_completions, openai_responses
from cortex.wire.dialects.ollama import chat as ollama_chat
from cortex.wire.dialects.registry import DIALECTS, ROUTES
from cortex.wire.errors import GenerationFailed, Recovering, UpstreamInterrupted
from cortex.wire.events import (
    AnyEvent,
    Failure,
    Finish,
    FinishReason,
    Logprobs,
    ReasoningDelta,
    Start,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    ToolCallStop,
    Usage,
)
from cortex.wire.requests import GenerateRequest, Reasoning, Sampling, Text, ToolCall
from cortex.wire.response import gather
from cortex.wire.sse import Parser

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
COUNT = st.integers(0, 1000)
LOGPROB = st.builds(
    TokenLogprob,
    token=TEXT,
    token_id=st.just(-1),
    logprob=st.floats(-20, 0),
    bytes=st.just((1, 2)),
    top=st.just((TokenLogprob("x", -1, -1.0, (120,)),)),
)


@st.composite
def tool_call(draw: st.DrawFn) -> list[AnyEvent]:
    arguments = msgspec.json.encode(draw(st.dictionaries(TEXT, TEXT | COUNT, max_size=3))).decode()
    cuts = sorted(draw(st.lists(st.integers(1, len(arguments)), max_size=3, unique=True)))
    pieces = [arguments[start:end] for start, end in itertools.pairwise([0, *cuts, len(arguments)]) if end > start]
    return [
        ToolCallStart(call=0, id=draw(TEXT), name=draw(TEXT)),
        *(ToolCallDelta(call=0, arguments=piece) for piece in pieces),
        ToolCallStop(call=0),
    ]


def with_logprobs(delta: AnyEvent, tokens: list[TokenLogprob]) -> list[AnyEvent]:
    return [Logprobs(tokens=tuple(tokens)), delta] if tokens else [delta]


def run_of(delta: type[TextDelta] | type[ReasoningDelta]) -> st.SearchStrategy[list[AnyEvent]]:
    piece = st.builds(with_logprobs, st.builds(delta, text=TEXT), st.lists(LOGPROB, max_size=2))
    return st.lists(piece, min_size=1, max_size=3).map(lambda pieces: [event for piece in pieces for event in piece])


USAGE = st.builds(
    lambda prompt, cached, completion, reasoning: Usage(
        prompt_tokens=prompt + cached,
        cached_tokens=cached,
        completion_tokens=completion + reasoning,
        reasoning_tokens=reasoning,
    ),
    COUNT,
    COUNT,
    COUNT,
    COUNT,
)


@st.composite
def choice(draw: st.DrawFn, index: int = 0) -> list[AnyEvent]:
    blocks = draw(st.lists(run_of(TextDelta) | run_of(ReasoningDelta) | tool_call(), max_size=5))
    events: list[AnyEvent] = []
    calls = 0
    for block in blocks:
        if isinstance(block[0], ToolCallStart):
            block = [msgspec.structs.replace(event, call=calls) for event in block]
            calls += 1
        events += block
    usage = draw(USAGE)
    reasons: list[FinishReason] = ["length", "tool_calls"] if calls else ["stop", "length", "content_filter"]
    reason = draw(st.sampled_from(reasons))
    stop = draw(st.none() | TEXT) if reason == "stop" else None
    start = Start(id="id", model="m", created=7)
    all_events = [start, *events, Finish(reason=reason, usage=usage, stop_sequence=stop)]
    return [msgspec.structs.replace(event, index=index) for event in all_events]


@st.composite
def several_choices(draw: st.DrawFn) -> list[AnyEvent]:
    """Choices interleaved as they would come from a batch."""
    streams = [draw(choice(index)) for index in range(draw(st.integers(1, 3)))]
    events: list[AnyEvent] = []
    while any(streams):
        stream = draw(st.sampled_from([stream for stream in streams if stream]))
        events.append(stream.pop(0))
    return events


def request(n: int = 1) -> GenerateRequest:
    return GenerateRequest(model="m", sampling=Sampling(n=n), stream=True, include_usage=True)


def stream(dialect: Any, events: Iterable[AnyEvent], n: int = 1) -> bytes:
    encoder = dialect.new_encoder(request(n), id="id", created=7, model="m")
    return b"".join(encoder.encode(event) for event in events)


def payloads(data: bytes) -> list[dict[str, Any]]:
    if data.lstrip(b" ").startswith(b"{"):
        return [msgspec.json.decode(line) for line in data.splitlines()]
    return [msgspec.json.decode(frame.data) for frame in Parser().feed(data) if frame.data != "[DONE]"]


def whole(dialect: Any, events: Iterable[AnyEvent], n: int = 1) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(dialect.fold(events, request(n), id="id", created=7, model="m"))
    return body


@given(several_choices())
def test_streamed_choices_equal_the_whole_ones(events: list[AnyEvent]) -> None:
    """Drawing the events takes most of the time, so all checks of a property share them."""
    check_streamed_chat_equals_the_whole_one(events)
    check_streamed_completion_equals_the_whole_one(events)
    check_whole_body_unfolds_to_events_that_fold_to_it_again(events)


def check_streamed_chat_equals_the_whole_one(events: list[AnyEvent]) -> None:
    n = len({event.index for event in events})
    chunks = payloads(stream(openai_chat.DIALECT, events, n))
    body = whole(openai_chat.DIALECT, events, n)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == body["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in body["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        deltas = [c["delta"] for c in mine]
        assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
        message = choice["message"]
        assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert reasoning == message.get("reasoning_content", "")
        calls: list[dict[str, Any]] = []
        for piece in (call for delta in deltas for call in delta.get("tool_calls", ())):
            if "id" in piece:
                assert piece["index"] == len(calls)
                calls.append(piece)
            else:
                assert piece["index"] == len(calls) - 1, "calls never interleave"
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        assert [{k: v for k, v in call.items() if k != "index"} for call in calls] == message.get("tool_calls", [])
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        tokens = [token for c in mine if c["logprobs"] for token in c["logprobs"]["content"]]
        assert tokens == (choice["logprobs"] or {"content": []})["content"]


def check_streamed_completion_equals_the_whole_one(events: list[AnyEvent]) -> None:
    n = len({event.index for event in events})
    chunks = payloads(stream(openai_completions.DIALECT, events, n))
    body = whole(openai_completions.DIALECT, events, n)
    assert chunks[-1]["usage"] == body["usage"]
    for choice in body["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            streamed = [value for c in mine if c["logprobs"] for value in c["logprobs"][name]]
            assert streamed == (choice["logprobs"] or {name: []})[name]


@given(choice(), st.lists(st.integers(0, 10_000), max_size=6), st.integers(0, 10_000))
def test_choice_is_well_formed_and_the_same_in_every_dialect_whole_streamed_decoded_and_cut_by_a_failure(
    events: list[AnyEvent], cuts: list[int], failure: int
) -> None:
    check_streamed_message_is_well_formed_and_equals_the_whole_one(events)
    check_streamed_response_is_well_formed_and_equals_the_whole_one(events)
    check_streamed_lines_equal_the_whole_body(events)
    check_every_dialect_has_the_same_blocks(events)
    check_decoding_an_encoded_stream_gives_its_events_for_any_split(events, cuts)
    check_failure_ends_a_stream_with_an_error_and_raises_in_fold(events[: 1 + failure % (len(events) - 1)])


def check_streamed_message_is_well_formed_and_equals_the_whole_one(events: list[AnyEvent]) -> None:
    streamed = payloads(stream(anthropic_messages.DIALECT, events))
    body = whole(anthropic_messages.DIALECT, events)
    assert [event["type"] for event in streamed].count("message_start") == 1
    assert streamed[0]["type"] == "message_start"
    assert [event["type"] for event in streamed[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in streamed[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open, "blocks never interleave"
            assert event["index"] == len(blocks), "indices are dense"
            blocks.append(event["content_block"] | {"json": ""})
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        delta, block = event["delta"], blocks[-1]
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "signature_delta":
                block["signature"] += delta["signature"]
            case "input_json_delta":
                block["json"] += delta["partial_json"]
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = msgspec.json.decode(text)
    assert blocks == body["content"]
    assert streamed[-2]["usage"] == body["usage"]
    assert streamed[-2]["delta"] == {name: body[name] for name in ("stop_reason", "stop_sequence")}
    assert {
        **streamed[0]["message"],
        "content": blocks,
        **streamed[-2]["delta"],
        "usage": streamed[-2]["usage"],
    } == body


def check_streamed_response_is_well_formed_and_equals_the_whole_one(events: list[AnyEvent]) -> None:
    data = stream(openai_responses.DIALECT, events)
    streamed = payloads(data)
    body = whole(openai_responses.DIALECT, events)
    assert [frame.event for frame in Parser().feed(data)] == [event["type"] for event in streamed]
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    assert [event["type"] for event in streamed[:2]] == ["response.created", "response.in_progress"]
    assert streamed[-1]["type"] == f"response.{body['status']}"
    assert streamed[-1]["response"] == body
    items: list[dict[str, Any]] = []
    text = ""
    for event in streamed[2:-1]:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            text = ""
            continue
        assert event["output_index"] == len(items) - 1, "items never interleave"
        if event["type"].endswith(".delta"):
            assert event["item_id"] == items[-1]["id"]
            text += event["delta"]
        elif event["type"].endswith(("text.done", "arguments.done")):
            assert text == event.get("text", event.get("arguments"))
        elif event["type"] == "response.output_item.done":
            items[-1] = event["item"]
    assert items == body["output"]


def check_streamed_lines_equal_the_whole_body(events: list[AnyEvent]) -> None:
    lines = payloads(stream(ollama_chat.DIALECT, events))
    body = whole(ollama_chat.DIALECT, events)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    messages = [line.pop("message") for line in lines]
    message = body.pop("message")
    assert "".join(each["content"] for each in messages) == message["content"]
    assert "".join(each.get("thinking", "") for each in messages) == message.get("thinking", "")
    assert [call for each in messages for call in each.get("tool_calls", ())] == message.get("tool_calls", [])
    tokens = [token for line in lines for token in line.pop("logprobs", ())]
    assert tokens == body.pop("logprobs", [])
    assert lines[-1] == body


def check_every_dialect_has_the_same_blocks(events: list[AnyEvent]) -> None:
    blocks = gather(events)[0].blocks
    content = whole(anthropic_messages.DIALECT, events)["content"]
    output = whole(openai_responses.DIALECT, events)["output"]
    message = whole(openai_chat.DIALECT, events)["choices"][0]["message"]
    kinds = {Text: ("text", "message"), Reasoning: ("thinking", "reasoning"), ToolCall: ("tool_use", "function_call")}
    assert [block["type"] for block in content] == [kinds[type(block)][0] for block in blocks]
    assert [item["type"] for item in output] == [kinds[type(block)][1] for block in blocks]
    assert len(message.get("tool_calls", ())) == sum(isinstance(block, ToolCall) for block in blocks)


def check_decoding_an_encoded_stream_gives_its_events_for_any_split(events: list[AnyEvent], cuts: list[int]) -> None:
    data = stream(openai_chat.DIALECT, events)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    decoder = openai_chat.ResponseDecoder()
    decoded = [event for start, end in itertools.pairwise(edges) for event in decoder.feed(data[start:end])]
    assert decoder.ended
    assert [*decoded, *decoder.finish()] == events


def check_whole_body_unfolds_to_events_that_fold_to_it_again(events: list[AnyEvent]) -> None:
    n = len({event.index for event in events})
    body = openai_chat.fold(events, request(n), id="id", created=7, model="m")
    assert openai_chat.fold(openai_chat.unfold(body), request(n), id="id", created=7, model="m") == body


def check_failure_ends_a_stream_with_an_error_and_raises_in_fold(events: list[AnyEvent]) -> None:
    failing: list[AnyEvent] = [*events, Failure(code="recovering", message="the device failed")]
    for dialect in DIALECTS.values():
        last = payloads(stream(dialect, failing))[-1]
        assert "the device failed" in msgspec.json.encode(last).decode()
        with pytest.raises(Recovering, match="the device failed"):
            whole(dialect, failing)


def test_incomplete_response_is_not_folded() -> None:
    for dialect in DIALECTS.values():
        incomplete: list[AnyEvent] = [Start(id="i", model="m", created=1), TextDelta(text="x")]
        for events in ([], incomplete):
            with pytest.raises(UpstreamInterrupted):
                whole(dialect, events)


def test_stream_error_is_a_frame_of_its_own() -> None:
    for dialect in DIALECTS.values():
        (payload,) = payloads(dialect.stream_error(GenerationFailed("NaN in the logits")))
        assert "NaN in the logits" in msgspec.json.encode(payload).decode()


def test_keepalives_are_valid_and_without_content() -> None:
    assert Parser().feed(DIALECTS["openai_chat"].keepalive) == []
    (ping,) = Parser().feed(DIALECTS["anthropic_messages"].keepalive)
    assert (ping.event, ping.data) == ("ping", '{"type":"ping"}')
    assert msgspec.json.decode(DIALECTS["ollama_chat"].keepalive + b'{"a":1}') == {"a": 1}, (
        "it is part of the next line"
    )


def test_every_route_has_a_dialect() -> None:
    assert set(ROUTES.values()) == set(DIALECTS)
