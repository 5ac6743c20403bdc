"""Bodies parsed in this process and in another: the same results, and bounds for the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from cortex.ipc.pool import HelperPool
from cortex.parsing import envelope as envelopes
from cortex.parsing.conversations import Completion, find_references
from cortex.parsing.cost import LARGE_BYTES, LARGE_RELAYED_BYTES
from cortex.parsing.functions import ParsedText, edit_fields
from cortex.parsing.items import StoredTexts
from cortex.parsing.parser import BodyParser
from cortex.wire.dialects import openai_chat
from cortex.wire.dialects.anthropic_messages import BILLED
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import (
    MAX_ECHO,
    BodyTooLarge,
    InvalidValue,
    ItemNotFound,
    MalformedJSON,
    PreparationLimitExceeded,
    RateLimitExceeded,
)
from cortex.wire.fields.body import replace_fields
from cortex.wire.packed_request import PackedRequest, unpack

from ..waiting import WAIT_S, until

LONG = "x" * LARGE_BYTES
CLIENT = "alice"
BILLING = {"type": "text", "text": "x-anthropic-billing-header: v=1"}


def body(text: str, **fields: Any) -> bytes:
    turns = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": turns, "input": text, "max_tokens": 9, **fields}).encode()


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parser() -> AsyncIterator[BodyParser]:
    parser = BodyParser()
    yield parser
    await parser.close()


@pytest.mark.parametrize("text", ["short", LONG], ids=["here", "elsewhere"])
async def test_request_is_parsed_packed_and_translated(parser: BodyParser, text: str) -> None:
    dialects = ["openai_chat", "openai_responses", "anthropic_messages"]
    for dialect in dialects:
        expected = DIALECTS[dialect].parse(body(text))
        packed = await parser.parse(dialect, body(text), CLIENT)
        assert unpack(packed.whole()) == expected
        assert not packed.head.messages
        head, translated = await parser.translate(dialect, body(text), "m", CLIENT)
        assert head == packed.head
        unlimited = msgspec.structs.replace(expected.sampling, max_tokens=None)
        assert translated.body == openai_chat.build(msgspec.structs.replace(expected, sampling=unlimited))
    assert await parser.run(edit_fields, {"model": "other"}, body=body(text), client=CLIENT) == replace_fields(
        body(text), {"model": "other"}
    )
    tokens = await parser.parse_tokenize(json.dumps({"model": "m", "prompt": text}).encode(), CLIENT)
    assert tokens == ParsedText("m", text)
    assert isinstance(await parser.parse_tokenize(body(text), CLIENT), PackedRequest)
    stripped = await parser.parse("anthropic_messages", body(text, system=[BILLING]), CLIENT, strip_billing=True)
    assert stripped.whole() == (await parser.parse("anthropic_messages", body(text), CLIENT)).whole()


async def test_errors_keep_their_class_and_field(parser: BodyParser) -> None:
    with pytest.raises(InvalidValue) as invalid:
        await parser.parse("openai_chat", body(LONG, temperature="hot"), CLIENT)
    assert invalid.value.param == "temperature"
    with pytest.raises(MalformedJSON):
        await parser.parse("openai_chat", body(LONG)[:-1], CLIENT)


async def test_body_that_takes_too_much_memory_is_rejected_and_the_next_one_is_parsed() -> None:
    parser = BodyParser(memory_bytes=48 << 20)
    with pytest.raises(PreparationLimitExceeded, match="memory"):
        await parser.parse("openai_chat", body("x", extra=[[]] * 2_000_000), CLIENT)
    assert (await parser.parse("openai_chat", body(LONG), CLIENT)).head.model == "m"
    await parser.close()


async def test_cancelled_calls_end_their_work(parser: BodyParser) -> None:
    await parser.parse("openai_chat", body(LONG), CLIENT)
    calls = [asyncio.create_task(parser.parse("openai_chat", body(LONG * 20), CLIENT)) for _ in range(6)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    assert (await parser.parse("openai_chat", body(LONG), CLIENT)).head.model == "m"


async def test_head_holds_little_of_what_is_only_reported(parser: BodyParser) -> None:
    name = "z" * LARGE_BYTES
    patterns = {f"{name[:300]}{number}": {"pattern": "(?=a)"} for number in range(400)}
    schema = {"type": "object", "properties": patterns}
    response_format = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    packed = await parser.parse(
        "openai_chat", body("x", response_format=response_format, **{name: 1, "other": 2}), CLIENT
    )
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
        await parser.parse("openai_chat", body("x", **fields), CLIENT)
    assert invalid.value.param == param
    assert (await parser.parse("openai_chat", body("x" * 3_000_000), CLIENT)).head.model == "m"


@pytest.mark.parametrize("text", ["short", "y" * (LARGE_RELAYED_BYTES // 2)], ids=["here", "elsewhere"])
@pytest.mark.parametrize("fields", [{}, {"system": [BILLING]}, {"stream": True, "n": 3}, {"previous_response_id": "r"}])
async def test_relayed_body_reads_the_same_here_and_elsewhere(
    parser: BodyParser, text: str, fields: dict[str, Any]
) -> None:
    sent = body(text, prompt=["a", "b"], **fields)
    dialects = ["openai_chat", "openai_completions", "openai_responses", "anthropic_messages"]
    for dialect in dialects:
        for generates in (True, False):
            here = envelopes.read_relayed(sent, dialect, generates=generates, strip_billing=True)
            elsewhere = await parser.read_relayed(dialect, sent, CLIENT, generates=generates, strip_billing=True)
            assert elsewhere.body == here.body
            assert elsewhere.is_stripped == here.is_stripped == (dialect in BILLED and "system" in fields)
            assert elsewhere.envelope.summary == here.envelope.summary
            assert list(map(bytes, elsewhere.envelope.conversation)) == list(map(bytes, here.envelope.conversation))


async def test_relayed_body_with_lone_surrogates_is_repaired_elsewhere(parser: BodyParser) -> None:
    sent = body("@" + LONG).replace(b"@", rb"\ud83d")
    read = await parser.read_relayed("openai_chat", sent, CLIENT, generates=True, strip_billing=False)
    assert read.body == sent.replace(rb"\ud83d", rb"\ufffd")
    with pytest.raises(MalformedJSON):
        await parser.read_relayed("openai_chat", sent[:-1], CLIENT, generates=True, strip_billing=False)


async def test_flood_of_one_client_does_not_delay_another(parser: BodyParser, monkeypatch: pytest.MonkeyPatch) -> None:
    floods, others, begun = body("flood" + LONG), body(LONG), list[bytes]()
    call = HelperPool.call

    async def endless_floods(self: HelperPool, *values: Any, body: bytes, **options: Any) -> Any:
        begun.append(body)
        if body == floods:
            await asyncio.Event().wait()
        return await call(self, *values, body=body, **options)

    monkeypatch.setattr(HelperPool, "call", endless_floods)
    calls = [asyncio.create_task(parser.parse("openai_chat", floods, CLIENT)) for _ in range(12)]
    await until(lambda: begun == [floods, floods])
    async with asyncio.timeout(WAIT_S):
        assert (await parser.parse("openai_chat", others, "bob")).head.model == "m"
    assert begun == [floods, floods, others], "alice has two of the three places"
    for each in calls:
        each.cancel()
    await asyncio.wait(calls)


async def test_burst_of_one_client_is_parsed(parser: BodyParser) -> None:
    calls = [parser.parse("openai_chat", body(LONG), CLIENT) for _ in range(100)]
    assert {packed.head.model for packed in await asyncio.gather(*calls)} == {"m"}


async def test_number_of_waiting_bodies_is_bounded_for_each_client() -> None:
    parser = BodyParser(max_waiting_per_client=16)
    calls = [asyncio.create_task(parser.parse("openai_chat", body(LONG), CLIENT)) for _ in range(30)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    rejected = [result for result in results if isinstance(result, BaseException)]
    assert 0 < len(rejected) < len(calls)
    assert all(isinstance(result, RateLimitExceeded) for result in rejected)
    await parser.close()


def stored(letter: str, text: str) -> StoredTexts:
    """A stored response whose id consists of one letter."""
    said = {"type": "message", "id": f"msg_{letter * 32}_0", "role": "assistant", "content": "ü" + text}
    asked = {"type": "message", "id": f"msg_{letter * 32}_in0", "role": "user", "content": "ö" + text}
    body = {"id": f"resp_{letter * 32}", "status": "completed", "output": [said]}
    asked_text, body_text = json.dumps([asked], ensure_ascii=False), json.dumps(body, ensure_ascii=False)
    return StoredTexts(f"resp_{letter * 32}", asked_text, body_text)


@pytest.mark.parametrize("text", ["short", LONG], ids=["here", "elsewhere"])
async def test_conversation_is_completed_with_history_and_references(parser: BodyParser, text: str) -> None:
    reference = {"type": "item_reference", "id": f"msg_{'b' * 32}_0"}
    foreign = {"type": "message", "role": "user", "content": "last"}
    fields = {"model": "m", "input": [reference, foreign], "previous_response_id": "x", "top_p": 0.5}
    sent = json.dumps(fields).encode()
    found = await parser.run(find_references, True, body=sent, client=CLIENT)
    assert found == (True, (f"resp_{'b' * 32}",))
    completion = Completion(generates=True, in_background=True, stored_as=f"resp_{'c' * 32}", max_body_mb=64)
    earlier, referred = [stored("a", text)], [stored("b", text)]
    read, own = await parser.complete(sent, earlier, referred, completion, CLIENT)
    whole, envelope = read.body, read.envelope
    request = json.loads(whole)
    ids = [item.get("id") for item in request.pop("input")]
    assert ids == [f"msg_{'a' * 32}_in0", f"msg_{'a' * 32}_0", f"msg_{'b' * 32}_0", None]
    assert request == {"model": "m", "top_p": 0.5, "stream": True}
    assert envelope.summary.stream
    assert json.loads(bytes(envelope.input)) == json.loads(whole)["input"]
    assert own is not None
    assert [item["id"] for item in json.loads(own)] == [f"msg_{'b' * 32}_0", f"msg_{'c' * 32}_in1"]


@pytest.mark.parametrize("text", ["short", LONG], ids=["here", "elsewhere"])
async def test_conversation_that_becomes_too_large_or_refers_to_nothing_is_rejected(
    parser: BodyParser, text: str
) -> None:
    completion = Completion(generates=True, in_background=False, stored_as=None, max_body_mb=1)
    large = [stored(letter, "x" * 300_000) for letter in "ab"]
    with pytest.raises(BodyTooLarge):
        await parser.complete(b'{"model":"m","input":"x"}', large, [], completion, CLIENT)
    sent = {"model": "m", "input": [{"type": "item_reference", "id": f"msg_{'b' * 32}_0"}]}
    with pytest.raises(ItemNotFound):
        await parser.complete(json.dumps(sent).encode(), [stored("a", text)], [], completion, CLIENT)


@pytest.mark.parametrize("text", ["short", LONG], ids=["here", "elsewhere"])
async def test_items_of_a_chain_are_listed_in_pages(parser: BodyParser, text: str) -> None:
    chain = [stored("a", text), stored("b", text)]
    page = json.loads(await parser.list_items(chain, CLIENT, limit=2, ascending=True, after=None))
    assert [item["id"] for item in page["data"]] == [f"msg_{'a' * 32}_in0", f"msg_{'a' * 32}_0"]
    assert page["has_more"]
    rest = json.loads(await parser.list_items(chain, CLIENT, limit=2, ascending=True, after=page["last_id"]))
    assert [item["id"] for item in rest["data"]] == [f"msg_{'b' * 32}_in0"]
    assert not rest["has_more"]
