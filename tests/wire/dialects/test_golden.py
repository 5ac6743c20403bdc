"""One response in each dialect, stored in files, and read by the vendors' SDKs.

The files under `golden/` are the contract with clients: clients see every change of them. To accept a change, delete
the file and run this test, which writes it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import msgspec
import openai
import pytest

from cortex.wire.dialects.anthropic_messages.errors import ANTHROPIC
from cortex.wire.dialects.openai_chunks import SYSTEM_FINGERPRINT
from cortex.wire.dialects.registry import DIALECTS, ROUTES
from cortex.wire.error_encoding import BY_CODE, OPENAI, headers
from cortex.wire.errors import InvalidValue, Overloaded, Recovering
from cortex.wire.events import (
    AnyEvent,
    Failure,
    Finish,
    Logprobs,
    ReasoningDelta,
    Start,
    TextDelta,
    Timing,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    ToolCallStop,
    Usage,
)
from cortex.wire.requests import GenerateRequest

GOLDEN = Path(__file__).parent / "golden"
ARGUMENTS = '{"city": "Ulm", "days": 2}'
USAGE = Usage(prompt_tokens=12, cached_tokens=8, completion_tokens=9, reasoning_tokens=3)
TIMING = Timing(gateway_s=0.5, queue_s=0.25, prefill_s=0.125, decode_s=2.0)
START = Start(id="id", model="m", created=1_700_000_000, prompt_tokens=12, cached_tokens=8)
AGENT_TURN: list[AnyEvent] = [
    START,
    ReasoningDelta(text="Let me "),
    ReasoningDelta(text="look."),
    TextDelta(text="I'll check "),
    TextDelta(text='the "wëather".'),
    ToolCallStart(call=0, id="call_a", name="weather"),
    ToolCallDelta(call=0, arguments=ARGUMENTS[:9]),
    ToolCallDelta(call=0, arguments=ARGUMENTS[9:]),
    ToolCallStop(call=0),
    ToolCallStart(call=1, id="call_b", name="clock"),
    ToolCallDelta(call=1, arguments="{}"),
    ToolCallStop(call=1),
    Finish(reason="tool_calls", usage=USAGE, timing=TIMING),
]
PLAIN: list[AnyEvent] = [
    START,
    Logprobs(tokens=(TokenLogprob("Hi", 5, -0.25, (72, 105), (TokenLogprob("Hi", 5, -0.25, (72, 105)),)),)),
    TextDelta(text="Hi"),
    TextDelta(text=" there"),
    Finish(reason="stop", usage=USAGE, timing=TIMING, stop_sequence="END"),
]
FAILED: list[AnyEvent] = [*PLAIN[:3], Failure(code=Recovering.code, message="the device is coming back")]
TRANSCRIPTS = {"agent_turn": AGENT_TURN, "plain": PLAIN, "failed": FAILED}


def streamed(dialect: str, events: Iterable[AnyEvent]) -> bytes:
    codec = DIALECTS[dialect]
    request = GenerateRequest(model="m", stream=True, include_usage=True)
    encoder = codec.new_encoder(request, id=codec.id_prefix + "1", created=START.created, model="m")
    data = codec.keepalive + b"".join(encoder.encode(event) for event in events)
    return data.replace(SYSTEM_FINGERPRINT.encode(), b"fp_cortex_0.0.0")  # not another golden file for each version


def folded(dialect: str, events: Iterable[AnyEvent]) -> bytes:
    codec = DIALECTS[dialect]
    request = GenerateRequest(model="m")
    return codec.fold(events, request, id=codec.id_prefix + "1", created=START.created, model="m")


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_completions"])
def test_response_has_a_system_fingerprint(dialect: str) -> None:
    assert msgspec.json.decode(folded(dialect, PLAIN))["system_fingerprint"] == SYSTEM_FINGERPRINT
    assert b'"system_fingerprint":"fp_cortex_0.0.0"' in streamed(dialect, PLAIN)


def golden_file(dialect: str, name: str) -> Path:
    return GOLDEN / f"{dialect}.{name}.{'ndjson' if dialect.startswith('ollama') else 'sse'}"


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "openai_compaction"])  # which has no streams
@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_encoded_bytes_match_the_golden_files(dialect: str, name: str) -> None:
    path = golden_file(dialect, name)
    data = streamed(dialect, TRANSCRIPTS[name])
    if not path.exists():
        path.write_bytes(data)
        pytest.fail(f"{path.name} was missing and has been written: read it, then keep it")
    assert data == path.read_bytes()


def transport(body: bytes, content_type: str, status_code: int = 200, extra: dict[str, str] | None = None) -> Any:
    def respond(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path in ROUTES
        return httpx2.Response(status_code, content=body, headers={"content-type": content_type, **(extra or {})})

    return httpx2.Client(transport=httpx2.MockTransport(respond))


def openai_client(body: bytes, content_type: str = "text/event-stream", *rest: Any) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="k", base_url="http://test/v1", http_client=transport(body, content_type, *rest), max_retries=0
    )


def anthropic_client(body: bytes, content_type: str = "text/event-stream", *rest: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        api_key="k", base_url="http://test", http_client=transport(body, content_type, *rest), max_retries=0
    )


HELLO: Any = [{"role": "user", "content": "hello"}]


def golden(dialect: str, name: str) -> bytes:
    return golden_file(dialect, name).read_bytes()


def test_openai_sdk_reads_a_chat_stream() -> None:
    client = openai_client(golden("openai_chat", "agent_turn"))
    with client.chat.completions.stream(model="m", messages=HELLO) as stream:
        stream.until_done()
        completion = stream.get_final_completion()
    message = completion.choices[0].message
    assert message.role == "assistant"
    assert message.content == 'I\'ll check the "wëather".'
    assert message.tool_calls is not None
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("call_a", "weather", ARGUMENTS),
        ("call_b", "clock", "{}"),
    ]
    assert completion.choices[0].finish_reason == "tool_calls"
    assert completion.usage is not None
    assert completion.usage.total_tokens == 21
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 8
    chunks = list(openai_client(golden("openai_chat", "agent_turn")).chat.completions.create(
        model="m", messages=HELLO, stream=True))  # fmt: skip
    reasoning = "".join(getattr(chunk.choices[0].delta, "reasoning_content", "") for chunk in chunks[:-1])
    assert reasoning == "Let me look."


def test_openai_sdk_reads_a_whole_chat_like_the_streamed_one() -> None:
    completion = openai_client(folded("openai_chat", PLAIN), "application/json").chat.completions.create(
        model="m", messages=HELLO
    )
    assert completion.choices[0].message.content == "Hi there"
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.content is not None
    assert completion.choices[0].logprobs.content[0].top_logprobs[0].token == "Hi"
    with openai_client(golden("openai_chat", "plain")).chat.completions.stream(model="m", messages=HELLO) as stream:
        stream.until_done()
        again = stream.get_final_completion()
    assert again.choices[0].message.content == completion.choices[0].message.content
    assert again.choices[0].logprobs.model_dump() == completion.choices[0].logprobs.model_dump()
    assert again.usage == completion.usage


def test_openai_sdk_reads_completions() -> None:
    chunks = list(
        openai_client(golden("openai_completions", "plain")).completions.create(model="m", prompt="x", stream=True)
    )
    whole = openai_client(folded("openai_completions", PLAIN), "application/json").completions.create(
        model="m", prompt="x"
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text == "Hi there"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == "stop"


def test_openai_sdk_reads_a_response_stream() -> None:
    client = openai_client(golden("openai_responses", "agent_turn"))
    with client.responses.stream(model="m", input="hello") as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output_text == 'I\'ll check the "wëather".'
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        ("call_a", "weather", ARGUMENTS),
        ("call_b", "clock", "{}"),
    ]
    (reasoning,) = [item for item in response.output if item.type == "reasoning"]
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Let me look."
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 8
    assert response.usage.output_tokens_details.reasoning_tokens == 3
    whole = openai_client(folded("openai_responses", AGENT_TURN), "application/json").responses.create(
        model="m", input="hello"
    )
    assert whole.output_text == response.output_text
    assert [getattr(item, "id", None) for item in whole.output] == [
        getattr(item, "id", None) for item in response.output
    ]


def test_anthropic_sdk_reads_a_message_stream() -> None:
    client = anthropic_client(golden("anthropic_messages", "agent_turn"))
    with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
        message = stream.get_final_message()
    thinking, text, weather, clock = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Let me look."
    assert thinking.signature
    assert text.type == "text"
    assert text.text == 'I\'ll check the "wëather".'
    assert weather.type == "tool_use"
    assert (weather.id, weather.name, weather.input) == ("call_a", "weather", {"city": "Ulm", "days": 2})
    assert clock.type == "tool_use"
    assert clock.input == {}
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (4, 8)
    assert message.usage.output_tokens == 9
    whole = anthropic_client(folded("anthropic_messages", AGENT_TURN), "application/json").messages.create(
        model="m", max_tokens=9, messages=HELLO
    )
    assert whole.content[2].model_dump(include={"id", "name", "input"}) == weather.model_dump(
        include={"id", "name", "input"}
    )
    assert whole.usage.output_tokens == message.usage.output_tokens


def test_anthropic_sdk_reads_the_stop_sequence() -> None:
    client = anthropic_client(golden("anthropic_messages", "plain"))
    with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
        message = stream.get_final_message()
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def test_failure_inside_a_stream_reaches_the_caller() -> None:
    with pytest.raises(openai.APIError, match="coming back"):
        list(openai_client(golden("openai_chat", "failed")).chat.completions.create(
            model="m", messages=HELLO, stream=True))  # fmt: skip
    with pytest.raises(anthropic.APIStatusError, match="coming back"):
        list(anthropic_client(golden("anthropic_messages", "failed")).messages.create(
            model="m", max_tokens=9, messages=HELLO, stream=True))  # fmt: skip
    events = list(openai_client(golden("openai_responses", "failed")).responses.create(
        model="m", input="x", stream=True))  # fmt: skip
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "the device is coming back"


def test_errors_become_exceptions_of_the_sdk() -> None:
    invalid = InvalidValue("temperature is too low", param="temperature")
    body = msgspec.json.encode(OPENAI.envelope(invalid))
    with pytest.raises(openai.BadRequestError) as rejected:
        openai_client(body, "application/json", 400).chat.completions.create(model="m", messages=HELLO)
    assert (rejected.value.code, rejected.value.param) == ("invalid_value", "temperature")
    full = Overloaded("try later", retry_after_s=3)
    body = msgspec.json.encode(ANTHROPIC.envelope(full))
    with pytest.raises(anthropic.APIStatusError) as overloaded:
        anthropic_client(body, "application/json", ANTHROPIC.status(full), headers(full)).messages.create(
            model="m", max_tokens=9, messages=HELLO
        )
    assert overloaded.value.status_code == 529
    assert overloaded.value.response.headers["retry-after"] == "3"
    assert "invalid_value" in BY_CODE
