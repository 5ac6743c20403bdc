"""Files and batches with the vendors' own clients, over fake nodes."""

from __future__ import annotations

import asyncio
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from aiohttp import web

from cortex.fleet.catalogue import Catalogue, Cost, ModelSpec
from cortex.gateway.config import BatchesSection
from cortex.gateway.ledger import keys
from cortex.wire.node.protocol import ModelState

from ...waiting import NEVER_S, at_rest, until, until_response
from ..fake_neuron import FakeNeuron, StartNeuron, plain_response
from ..fake_responses import reset_connection
from ..started_gateway import StartGateway
from .conftest import FAST, MODEL, ended, line, openai_client, results, submit

READY = {"sizes": {MODEL: 1 << 30}, "states": {MODEL: ModelState.READY}}
ONE_TRY = replace(FAST, max_tries=1)


async def test_every_line_of_a_batch_has_one_result(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    node = await neurons("one", **READY)
    client = openai_client((await start_gateway(node)).port)

    batch = await submit(client, [line(number) for number in range(40)], metadata={"job": "nightly"})
    done = await ended(client, batch.id)

    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (40, 40, 0)
    assert done.error_file_id is None
    assert done.metadata == {"job": "nightly"}
    found = await results(client, done.output_file_id)
    assert [each["custom_id"] for each in found] == [f"line-{number}" for number in range(40)]
    assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in found} == {"from one"}
    assert all(seen.headers["x-cortex-class"] == "idle" for seen in node.seen)
    listed = [each.id async for each in client.batches.list()]
    assert listed == [batch.id]


async def test_invalid_lines_are_in_the_error_file_with_their_numbers(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    client = openai_client((await start_gateway(await neurons("one", **READY))).port)
    bad = [
        b"{",
        line(1) | {"url": "/v1/embeddings"},
        line(0),
        line(4, stream=True),
        {"custom_id": "five"},
        line(6, model="unknown"),
        b"",
    ]

    done = await ended(client, (await submit(client, [line(0), *bad])).id)

    errors = await results(client, done.error_file_id)
    assert [each["error"]["line"] for each in errors[:5]] == [2, 3, 4, 5, 6]
    assert "custom_id" in errors[2]["error"]["message"]
    assert errors[5]["response"]["status_code"] == 404
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed) == (7, 1)
    assert done.errors is not None
    assert done.errors.data is not None
    assert [each.line for each in done.errors.data] == [2, 3, 4, 5, 6]


async def test_a_batch_without_a_valid_line_fails(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    client = openai_client((await start_gateway(await neurons("one", **READY))).port)

    done = await ended(client, (await submit(client, [b"nonsense"])).id)

    assert done.status == "failed"
    assert done.errors is not None
    assert done.errors.data is not None
    assert done.errors.data[0].line == 1


async def test_a_cancelled_batch_keeps_its_results_and_names_the_other_lines(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    gate = asyncio.Event()

    async def respond(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["messages"][0]["content"] != "hello 0":
            await gate.wait()
        return await plain_response(node, request, body)

    node = await neurons("one", **READY, respond=respond)
    client = openai_client((await start_gateway(node)).port)
    batch = await submit(client, [line(number) for number in range(5)])
    await until_response(lambda: client.batches.retrieve(batch.id), lambda batch: batch.request_counts.completed)

    await client.batches.cancel(batch.id)
    done = await ended(client, batch.id)

    assert done.status == "cancelled"
    assert [each["custom_id"] for each in await results(client, done.output_file_id)] == ["line-0"]
    errors = await results(client, done.error_file_id)
    assert [each["custom_id"] for each in errors] == ["line-1", "line-2", "line-3", "line-4"]
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    await until(lambda: all(seen.ended for seen in node.seen))
    with pytest.raises(openai.BadRequestError):
        await client.batches.cancel(batch.id)


async def test_a_batch_whose_lines_end_at_once_is_cancelled(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    client = openai_client((await start_gateway(await neurons("one", **READY))).port)
    batch = await submit(client, [line(number, model="unknown") for number in range(2000)])
    await until_response(
        lambda: client.batches.retrieve(batch.id), lambda batch: batch.request_counts and batch.request_counts.failed
    )

    await client.batches.cancel(batch.id)
    done = await ended(client, batch.id)

    assert done.status == "cancelled"
    errors = await results(client, done.error_file_id)
    assert len({each["custom_id"] for each in errors}) == 2000


async def test_a_batch_expires_with_its_completion_window(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    async def respond(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["messages"][0]["content"] == "hello 1":
            await node.stream_gate.wait()
        return await plain_response(node, request, body)

    node = await neurons("one", **READY, respond=respond, stream_gate=asyncio.Event())
    client = openai_client((await start_gateway(node)).port)

    done = await ended(client, (await submit(client, [line(0), line(1)], completion_window="2s")).id)

    assert done.status == "expired"
    errors = await results(client, done.error_file_id)
    assert "batch_expired" in {each["error"]["code"] for each in errors}
    assert len(errors) + len(await results(client, done.output_file_id)) == 2


async def test_lines_run_again_where_a_node_dies(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    async def dies(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await reset_connection(request)

    dying, living = await neurons("dying", **READY, respond=dies), await neurons("living", **READY)
    client = openai_client((await start_gateway(dying, living)).port)

    done = await ended(client, (await submit(client, [line(number) for number in range(8)])).id)

    found = await results(client, done.output_file_id)
    assert sorted(each["custom_id"] for each in found) == [f"line-{number}" for number in range(8)]


@pytest.mark.parametrize("state", [ModelState.READY, ModelState.COLD])
async def test_lines_are_paced_where_an_engine_runs_them_also_after_a_load(
    state: ModelState, start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    async def waits(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await node.stream_gate.wait()
        return await plain_response(node, request, body)

    engine = await neurons("engine", sizes=READY["sizes"], states={MODEL: state}, respond=waits)
    server = await neurons("server", sizes={"other": 1}, states={"other": ModelState.READY}, respond=waits)
    gateway = await start_gateway(engine, foreign=(server,))
    caps, client = gateway.gateway._services.idle_caps, openai_client(gateway.port)  # noqa: SLF001
    nodes = engine, server
    for node in nodes:
        node.stream_gate.clear()
    batch = await submit(client, [line(0), line(1, model="other")])
    await until(lambda: engine.seen and server.seen)
    assert [(caps.lines[node.name], caps.paced[node.name]) for node in nodes] == [(1, 1), (1, 0)]
    for node in nodes:
        node.stream_gate.set()
    await ended(client, batch.id)
    assert {*caps.lines.values(), *caps.paced.values()} == {0}


@pytest.mark.parametrize("status", [503, 429])
async def test_a_busy_node_is_asked_again_and_counts_as_no_failure(
    status: int, start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    async def respond(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(node.seen) <= 2:
            return web.json_response({"error": {"message": "full", "code": "overloaded"}}, status=status)
        return await plain_response(node, request, body)

    node = await neurons("one", **READY, respond=respond)
    client = openai_client((await start_gateway(node, batch_limits=ONE_TRY)).port)

    done = await ended(client, (await submit(client, [line(0), line(1)])).id)

    assert done.status == "completed"
    assert len(await results(client, done.output_file_id)) == 2


async def test_a_batch_without_budget_does_not_delay_one_of_another_key(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    poor, rich = keys.generate("ada", balance_tokens=0), keys.generate("bob")
    patient = replace(FAST, min_backoff_s=NEVER_S, max_backoff_s=NEVER_S)
    node = await neurons("one", **READY)
    gateway = await start_gateway(node, keys=(poor.section, rich.section), batch_limits=patient)
    await submit(openai_client(gateway.port, poor.text), [line(0)])
    bearer = f"Bearer {poor.text}"
    await gateway.get_until("/fleet/activity", lambda page: page["requests"], Authorization=bearer)

    client = openai_client(gateway.port, rich.text)

    assert (await ended(client, (await submit(client, [line(0)])).id)).status == "completed"


async def test_a_line_waits_while_another_one_holds_the_budget(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    async def respond(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await node.stream_gate.wait()
        return await plain_response(node, request, body)

    new, gate = keys.generate("ada", balance_tokens=1000), asyncio.Event()
    nodes = [await neurons(name, **READY, respond=respond, stream_gate=gate) for name in ("one", "two")]
    gateway = await start_gateway(*nodes, keys=(new.section,), batch_limits=ONE_TRY)
    client = openai_client(gateway.port, new.text)
    batch = await submit(client, [line(number, max_tokens=1000) for number in range(2)])
    bearer = f"Bearer {new.text}"
    await gateway.get_until("/fleet/activity", lambda page: page["requests"], Authorization=bearer)

    gate.set()

    done = await ended(client, batch.id)
    assert len(await results(client, done.output_file_id)) == 2


async def test_lines_wait_for_the_window_of_a_budget_to_move_on(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    new = keys.generate("ada", window_tokens=60)
    node = await neurons("one", **READY)
    gateway = await start_gateway(node, keys=(new.section,), batch_limits=ONE_TRY)
    client = openai_client(gateway.port, new.text)
    id = (await submit(client, [line(number, max_tokens=3) for number in range(12)])).id
    batch = await until_response(lambda: client.batches.retrieve(id), lambda batch: batch.request_counts.completed)
    await at_rest(lambda: len(node.seen))
    await client.batches.cancel(batch.id)

    done = await ended(client, batch.id)

    codes = {each["error"]["code"] for each in await results(client, done.error_file_id) if each["error"]}
    assert codes == {"batch_cancelled"}, "no line failed for want of a budget that comes back"
    assert done.request_counts is not None
    assert 0 < done.request_counts.completed < 12


async def test_a_line_for_a_model_that_its_key_may_not_use_fails_and_is_not_counted(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    new = keys.generate("ada", models=("other",))
    gateway = await start_gateway(await neurons("one", **READY), keys=(new.section,))
    client = openai_client(gateway.port, new.text)

    done = await ended(client, (await submit(client, [line(0)])).id)

    [error] = await results(client, done.error_file_id)
    assert error["response"]["status_code"] == 403
    _, used = await gateway.get("/fleet/usage?by=key", Authorization=f"Bearer {new.text}")
    assert used["rows"] == []


async def test_a_batch_loads_its_model_where_room_is_free_and_evicts_nothing(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    full = await neurons(
        "full", sizes={MODEL: 20 << 30, "other": 20 << 30}, states={"other": ModelState.READY}, total_bytes=24 << 30
    )
    gateway = await start_gateway(full)
    client = openai_client(gateway.port)
    batch = await submit(client, [line(0)])
    await until(lambda: gateway.gateway.event_log.decisions)
    assert not full.unload_requests
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"

    full.total_bytes = 48 << 30

    assert (await ended(client, batch.id)).status == "completed"
    assert not full.unload_requests
    assert full.states[MODEL] is ModelState.READY


async def test_lines_are_charged_once_at_the_batch_price_and_not_by_request_rates(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    new = keys.generate("ada", requests_per_min=1, balance_cost=1.0)
    catalogue = Catalogue(models=(ModelSpec(id=MODEL, cost=Cost(input=1000.0, cached_input=1000.0, output=1000.0)),))
    gateway = await start_gateway(await neurons("one", **READY), keys=(new.section,), catalogue=catalogue)
    client = openai_client(gateway.port, new.text)

    done = await ended(client, (await submit(client, [line(number, max_tokens=3) for number in range(6)])).id)

    assert done.request_counts is not None
    assert done.request_counts.completed == 6
    assert done.to_dict()["cost"] == pytest.approx(6 * 10 * 1000 / 1e6 / 2)
    auth = {"Authorization": f"Bearer {new.text}"}
    _, used = await gateway.get("/fleet/usage?by=key", **auth)
    assert [(row["requests"], row["total_tokens"], row["cost"]) for row in used["rows"]] == [(6, 60, 0.03)]
    _, shown = await gateway.get("/keys", **auth)
    assert shown["keys"][0]["balance_left_cost"] == pytest.approx(1 - 0.03)


async def test_lines_beyond_a_budget_fail_and_are_not_charged(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    new = keys.generate("ada", balance_tokens=0)
    gateway = await start_gateway(await neurons("one", **READY), keys=(new.section,))
    client = openai_client(gateway.port, new.text)

    done = await ended(client, (await submit(client, [line(0)])).id)

    [error] = await results(client, done.error_file_id)
    assert error["response"]["status_code"] == 429
    assert error["response"]["body"]["error"]["code"] == "insufficient_quota"


@pytest.mark.parametrize("more", [{}, {"max_tokens": 10**6}, {"n": 4}])
async def test_lines_at_a_foreign_server_end_at_the_budget(
    start_gateway: StartGateway, neurons: StartNeuron, more: dict[str, Any]
) -> None:
    new = keys.generate("ada", balance_tokens=2000)
    foreign = await neurons("elsewhere", **READY)
    gateway = await start_gateway(foreign=(foreign,), keys=(new.section,), batch_limits=ONE_TRY)
    client = openai_client(gateway.port, new.text)
    long = [{"role": "user", "content": "x" * 1200}]

    done = await ended(client, (await submit(client, [line(0, **more), line(1, messages=long, **more)])).id)

    assert len(await results(client, done.output_file_id)) == 2
    for seen in foreign.seen:
        body = seen.body
        assert len(json.dumps(body["messages"])) + body["max_tokens"] * body.get("n", 1) <= 2000


async def test_a_line_that_a_budget_can_never_cover_fails(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    new = keys.generate("ada", balance_tokens=2000)
    foreign = await neurons("elsewhere", **READY)
    gateway = await start_gateway(foreign=(foreign,), keys=(new.section,), batch_limits=ONE_TRY)
    client = openai_client(gateway.port, new.text)
    long = [{"role": "user", "content": "x" * 3000}]

    done = await ended(client, (await submit(client, [line(0, messages=long)])).id)

    [error] = await results(client, done.error_file_id)
    assert error["response"]["body"]["error"]["code"] == "insufficient_quota"
    assert not foreign.seen


async def test_a_key_sees_neither_files_nor_batches_of_another(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    ada, bob = keys.generate("ada"), keys.generate("bob")
    gateway = await start_gateway(await neurons("one", **READY), keys=(ada.section, bob.section))
    hers, his = openai_client(gateway.port, ada.text), openai_client(gateway.port, bob.text)
    batch = await submit(hers, [line(0)])

    for attempt in (
        his.files.retrieve(batch.input_file_id),
        his.files.content(batch.input_file_id),
        his.files.delete(batch.input_file_id),
        his.batches.retrieve(batch.id),
        his.batches.cancel(batch.id),
        his.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt
    assert [each async for each in his.files.list()] == []
    assert [each async for each in his.batches.list()] == []
    _, seen = await gateway.get("/fleet/batches", Authorization=f"Bearer {bob.text}")
    assert seen["batches"] == []


async def test_uploads_beyond_the_quota_of_a_key_are_rejected(
    start_gateway: StartGateway, neurons: StartNeuron, tmp_path: Path
) -> None:
    section = BatchesSection(max_mb_per_key=1, max_files_per_key=2, max_batches_per_key=1)
    node = await neurons("one", sizes={MODEL: 1}, states={})
    client = openai_client((await start_gateway(node, batches=section)).port)

    async def upload(num_bytes: int) -> Any:
        return await client.files.create(file=("a.jsonl", io.BytesIO(b"x" * num_bytes)), purpose="user_data")

    with pytest.raises(openai.RateLimitError, match="max_mb_per_key"):
        await upload((1 << 20) + 1)
    first = await upload(10)
    await upload(10)
    with pytest.raises(openai.RateLimitError, match="max_files_per_key"):
        await upload(10)
    await client.files.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(first.id)
    assert len(list((tmp_path / "files").iterdir())) == 1


async def test_a_large_file_comes_back_as_it_was_sent(
    start_gateway: StartGateway, neurons: StartNeuron, tmp_path: Path
) -> None:
    client = openai_client((await start_gateway(await neurons("one", **READY))).port)
    content = bytes(range(256)) * 4096 * 12

    file = await client.files.create(
        file=("big.bin", io.BytesIO(content)),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )

    assert (file.bytes, file.filename, file.purpose) == (len(content), "big.bin", "user_data")
    assert file.expires_at == file.created_at + 7200
    assert (await client.files.content(file.id)).read() == content
    assert [each.id async for each in client.files.list(purpose="user_data")] == [file.id]
    assert [each.id async for each in client.files.list(purpose="batch")] == []


async def test_batches_run_only_in_their_hours(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    now = time.localtime()
    later = f"{(now.tm_hour + 2) % 24:02}:00-{(now.tm_hour + 3) % 24:02}:00"
    node = await neurons("one", **READY)
    gateway = await start_gateway(node, batches=BatchesSection(hours=(later,)))
    client = openai_client(gateway.port)
    batch = await submit(client, [line(0)])
    later = await submit(client, [line(1)])
    for id in (batch.id, later.id):
        await until_response(lambda id=id: client.batches.retrieve(id), lambda found: found.status != "validating")  # type: ignore[misc]
    assert not node.seen

    open_config = msgspec.structs.replace(gateway.gateway.config, batches=BatchesSection())
    await gateway.gateway.reconfigure(open_config, Catalogue())

    assert (await ended(client, batch.id)).status == "completed"


async def test_anthropic_batches_with_the_real_client(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    async def respond(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["max_tokens"] == 1:
            error = {"type": "invalid_request_error", "message": "too few"}
            return web.json_response({"type": "error", "error": error}, status=400)
        message = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "stop_reason": "end_turn",
        }
        usage = {"input_tokens": 3, "output_tokens": 2}
        content = [{"type": "text", "text": body["messages"][0]["content"]}]
        return web.json_response(message | {"stop_sequence": None, "content": content, "usage": usage})

    gateway = await start_gateway(await neurons("one", **READY, respond=respond))
    client = anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0)

    def request(number: int, max_tokens: int) -> Any:
        messages = [{"role": "user", "content": f"hello {number}"}]
        params = {"model": MODEL, "max_tokens": max_tokens, "messages": messages}
        return {"custom_id": f"line-{number}", "params": params}

    made = await client.messages.batches.create(requests=[request(0, 8), request(1, 1), request(2, 8)])
    assert made.processing_status == "in_progress"
    assert made.request_counts.processing == 3
    batch = await until_response(
        lambda: client.messages.batches.retrieve(made.id), lambda batch: batch.processing_status == "ended"
    )

    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (2, 1)
    found = {each.custom_id: each.result async for each in await client.messages.batches.results(made.id)}
    assert found["line-1"].type == "errored"
    first = found["line-0"]
    assert first.type == "succeeded"
    assert first.message.content[0].to_dict()["text"] == "hello 0"
    assert [each.id async for each in client.messages.batches.list()] == [made.id]
    cancelled = await client.messages.batches.cancel(made.id)
    assert cancelled.processing_status == "ended"
    await client.messages.batches.delete(made.id)
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.retrieve(made.id)
    with pytest.raises(anthropic.BadRequestError, match="custom_id"):
        await client.messages.batches.create(requests=[request(0, 8), request(0, 8)])


async def test_other_endpoints_run_in_batches(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    node = await neurons("one", **READY)
    client = openai_client((await start_gateway(node)).port)
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"model": MODEL, "input": "hello"}},
        {
            "custom_id": "b",
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": MODEL, "previous_response_id": "x"},
        },
    ]

    done = await ended(client, (await submit(client, lines, endpoint="/v1/responses")).id)

    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    [error] = await results(client, done.error_file_id)
    assert error["error"]["param"] == "body.previous_response_id"
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await submit(client, lines, endpoint="/v1/images")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        await submit(client, lines, endpoint="/v1/responses", completion_window="soon")


async def test_a_large_batch_does_not_hold_up_a_small_one(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    gate = asyncio.Event()

    async def respond(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await gate.wait()
        return await plain_response(node, request, body)

    node = await neurons("one", **READY, respond=respond)
    gateway = await start_gateway(node, batches=BatchesSection(max_lines_per_node=1))
    client = openai_client(gateway.port)
    large = await submit(client, [line(number) for number in range(20)])
    small = await submit(client, [line(100)])
    await gateway.get_until(f"/v1/batches/{small.id}", lambda batch: batch["status"] == "in_progress")
    gate.set()

    await ended(client, small.id)
    await ended(client, large.id)

    contents = [json.loads(seen.raw)["messages"][0]["content"] for seen in node.seen]
    assert contents.index("hello 100") < 6


async def test_listings_have_the_newest_first_also_within_a_second(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    client = openai_client((await start_gateway(await neurons("one", **READY))).port)
    made = [await submit(client, [line(0)]) for _ in range(5)]

    found = [each.id async for each in client.batches.list(limit=2)]

    assert found == [each.id for each in reversed(made)]
    files = [each.id async for each in client.files.list(limit=2, purpose="batch", order="asc")]
    assert files == [each.input_file_id for each in made]


async def test_a_file_in_use_is_not_deleted(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    node = await neurons("one", **READY, respond=None)
    node.states.clear()
    node.load_gate = asyncio.Event()
    client = openai_client((await start_gateway(node)).port)
    batch = await submit(client, [line(0)])

    with pytest.raises(openai.BadRequestError, match="reads this file"):
        await client.files.delete(batch.input_file_id)

    await client.batches.cancel(batch.id)
    node.load_gate.set()
    done = await ended(client, batch.id)
    assert done.request_counts is not None
    assert done.request_counts.total == 1
    await client.files.delete(batch.input_file_id)


async def test_lines_with_one_beginning_run_one_after_the_other(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    node = await neurons("one", **READY)
    gateway = await start_gateway(node, batches=BatchesSection(max_lines_per_node=1))
    client = openai_client(gateway.port)
    systems = ["alpha " * 20, "beta " * 20]
    lines = [
        line(number, messages=[{"role": "system", "content": systems[number % 2]}, {"role": "user", "content": "x"}])
        for number in range(8)
    ]

    await ended(client, (await submit(client, lines)).id)

    assert [json.loads(seen.raw)["messages"][0]["content"] for seen in node.seen] == [systems[0]] * 4 + [systems[1]] * 4
