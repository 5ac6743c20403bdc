"""Bodies parsed in this process and in another: the same results, and bounds for the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cortex.parsing.parser import LARGE_BYTES, BodyParser
from cortex.parsing.protocol import ParsedText
from cortex.wire import openai_chat
from cortex.wire.dialects import DIALECTS
from cortex.wire.errors import MAX_ECHO, InvalidValue, MalformedJSON, PreparationLimitExceeded
from cortex.wire.node import Dialect
from cortex.wire.packed_request import PackedRequest, unpack
from cortex.wire.raw_fields import replace_model

LONG = "x" * LARGE_BYTES
BILLING = {"type": "text", "text": "x-anthropic-billing-header: v=1"}


def body(text: str, **fields: Any) -> bytes:
    turns = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": turns, "input": text, "max_tokens": 9, **fields}).encode()


@pytest.fixture
async def parser() -> AsyncIterator[BodyParser]:
    parser = BodyParser()
    yield parser
    await parser.close()


@pytest.mark.parametrize("text", ["short", LONG], ids=["here", "elsewhere"])
async def test_request_is_parsed_packed_and_translated(parser: BodyParser, text: str) -> None:
    dialects: list[Dialect] = ["openai_chat", "openai_responses", "anthropic_messages"]
    for dialect in dialects:
        expected = DIALECTS[dialect].parse(body(text))
        packed = await parser.parse(dialect, body(text))
        assert unpack(packed.whole) == expected
        assert not packed.head.messages
        head, translated = await parser.translate(dialect, body(text), "m")
        assert head == packed.head
        assert translated == openai_chat.build(expected)
    assert await parser.rename(body(text), "other") == replace_model(body(text), "other")
    tokens = await parser.parse_tokenize(json.dumps({"model": "m", "prompt": text}).encode())
    assert tokens == ParsedText("m", text)
    assert isinstance(await parser.parse_tokenize(body(text)), PackedRequest)
    stripped = await parser.parse("anthropic_messages", body(text, system=[BILLING]), strip_billing=True)
    assert stripped.whole == (await parser.parse("anthropic_messages", body(text))).whole


async def test_errors_keep_their_class_and_field(parser: BodyParser) -> None:
    with pytest.raises(InvalidValue) as invalid:
        await parser.parse("openai_chat", body(LONG, temperature="hot"))
    assert invalid.value.param == "temperature"
    with pytest.raises(MalformedJSON):
        await parser.parse("openai_chat", body(LONG)[:-1])


async def test_body_that_takes_too_much_memory_is_rejected_and_the_next_one_is_parsed() -> None:
    parser = BodyParser(memory_bytes=48 << 20)
    with pytest.raises(PreparationLimitExceeded, match="memory"):
        await parser.parse("openai_chat", body("x", extra=[[]] * 2_000_000))
    assert (await parser.parse("openai_chat", body(LONG))).head.model == "m"
    await parser.close()


async def test_cancelled_calls_end_their_work(parser: BodyParser) -> None:
    await parser.parse("openai_chat", body(LONG))
    calls = [asyncio.create_task(parser.parse("openai_chat", body(LONG * 20))) for _ in range(6)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    assert (await parser.parse("openai_chat", body(LONG))).head.model == "m"


async def test_head_holds_little_of_what_is_only_reported(parser: BodyParser) -> None:
    name = "z" * LARGE_BYTES
    patterns = {f"{name[:300]}{number}": {"pattern": "(?=a)"} for number in range(400)}
    schema = {"type": "object", "properties": patterns}
    response_format = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    packed = await parser.parse("openai_chat", body("x", response_format=response_format, **{name: 1, "other": 2}))
    assert packed.head.ignored_fields == ("input", name[:MAX_ECHO], "other")
    assert packed.head.unenforced
    assert all(len(path) <= MAX_ECHO for path in packed.head.unenforced)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"allOf": [{}] * 1_000_000}}}},
            "response_format",
        ),
        ({"chat_template_kwargs": {"z": "z" * 3_000_000}}, "chat_template_kwargs"),
    ],
    ids=["schema", "template"],
)
async def test_rejects_head_that_would_block_the_loop(parser: BodyParser, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue, match=param) as invalid:
        await parser.parse("openai_chat", body("x", **fields))
    assert invalid.value.param == param
    assert (await parser.parse("openai_chat", body("x" * 3_000_000))).head.model == "m"
