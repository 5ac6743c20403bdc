"""Batches over gateways that are killed, paused and replaced: one result and one charge for every line."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from cortex.gateway.batches import tables
from cortex.gateway.batches.files import FileStore
from cortex.gateway.batches.results import BatchResults, Finished
from cortex.gateway.batches.runner import BatchRunner
from cortex.gateway.batches.tables import LineResult
from cortex.gateway.config import BatchesSection
from cortex.gateway.database import Database, Execute, Rows, StoreError
from cortex.gateway.ledger import keys
from cortex.gateway.ledger.store import LedgerSection
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.wire.node.protocol import ModelState

from ...waiting import WAIT_S, until, until_response
from ..fake_neuron import FakeNeuron, StartNeuron, plain_response
from ..fake_responses import reset_connection
from ..started_gateway import SpawnGateway, StartGateway
from .conftest import FAST, MODEL, ended, line, openai_client, results, submit

NUM_LINES = 24
TOKENS = 10
"""Of one response of a fake node."""


class Gate:
    """Lets some lines through, and then none until it is open."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.opened = asyncio.Event()

    async def respond(self, node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.num_free -= 1
        if self.num_free < 0:
            await self.opened.wait()
        return await plain_response(node, request, body)


def _execute(statement: str, values: tuple[Any, ...], execute: Execute) -> Rows:
    return execute(statement, values)


async def _recorded(client: Any, id: str, count: int) -> None:
    await until_response(lambda: client.batches.retrieve(id), lambda batch: batch.request_counts.completed >= count)


async def test_a_killed_gateway_loses_no_line_and_charges_none_twice(spawn: SpawnGateway, neurons: StartNeuron) -> None:
    gate = Gate(6)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY}, respond=gate.respond)
    new = keys.generate("ada", balance_tokens=1_000_000)
    section = keys.as_toml(new.section)
    first = await spawn(node, section)
    client = openai_client(first.port, new.text)
    batch = await submit(client, [line(number, max_tokens=8) for number in range(NUM_LINES)])
    await _recorded(client, batch.id, 1)
    await until(lambda: sum(not seen.ended for seen in node.seen) > 0)

    first.process.send_signal(signal.SIGKILL)
    await first.process.wait()
    gate.opened.set()
    second = await spawn(node, section)

    client = openai_client(second.port, new.text)
    done = await ended(client, batch.id)
    found = await results(client, done.output_file_id)
    assert sorted(each["custom_id"] for each in found) == sorted(f"line-{number}" for number in range(NUM_LINES))
    assert len(node.seen) >= NUM_LINES
    used = await client.get("/../fleet/usage?by=key", cast_to=dict[str, Any])
    assert [(row["requests"], row["total_tokens"]) for row in used["rows"]] == [(NUM_LINES, NUM_LINES * TOKENS)]


async def test_another_gateway_takes_over_the_batch_of_a_killed_one(
    spawn: SpawnGateway,
    start_gateway: StartGateway,
    neurons: StartNeuron,
    postgres_url: str,
) -> None:
    gate = Gate(6)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY}, respond=gate.respond)
    new = keys.generate("ada")
    first = await spawn(node, f'[ledger]\ndatabase = "{postgres_url}"\n{keys.as_toml(new.section)}')
    second = await start_gateway(
        node,
        keys=(new.section,),
        ledger=LedgerSection(database=postgres_url),
        batch_limits=replace(FAST, lost_after_s=4.0),
    )
    client, other = openai_client(first.port, new.text), openai_client(second.port, new.text)
    batch = await submit(client, [line(number) for number in range(NUM_LINES)])
    await _recorded(other, batch.id, 1)
    assert (await other.batches.retrieve(batch.id)).status == "in_progress"

    first.process.send_signal(signal.SIGKILL)
    await first.process.wait()
    gate.opened.set()

    done = await ended(other, batch.id)
    found = await results(other, done.output_file_id)
    assert sorted(each["custom_id"] for each in found) == sorted(f"line-{number}" for number in range(NUM_LINES))
    used = await other.get("/../fleet/usage?by=key", cast_to=dict[str, Any])
    assert [row["requests"] for row in used["rows"]] == [NUM_LINES]


async def test_a_gateway_that_lost_its_batch_records_and_charges_nothing(
    start_gateway: StartGateway, neurons: StartNeuron, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(0)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY}, respond=gate.respond)
    new = keys.generate("ada")
    gateway = await start_gateway(node, keys=(new.section,))
    client = openai_client(gateway.port, new.text)
    batch = await submit(client, [line(0)])
    await until(lambda: node.seen)
    # As another gateway does that takes this one for dead.
    database = Database(str(tmp_path / "cortex-spend.db"))
    try:
        for owner, renewed in (("other", int(time.time()) + 1000), ("", 0)):
            change = partial(_execute, "UPDATE batch SET owner = $1, renewed_s = $2", (owner, renewed))
            database.run(change)
            if owner:
                gate.opened.set()
                await until(lambda: node.seen[0].ended)
                await until(lambda: f"another gateway runs batch {batch.id} now" in caplog.text)
                [(rows, charged)] = database.run(
                    lambda execute: execute(
                        "SELECT (SELECT COUNT(*) FROM batch_result), (SELECT COALESCE(SUM(requests), 0) FROM spend)", ()
                    )
                )
                assert (rows, charged) == (0, 0)
    finally:
        database.close_connection()

    done = await ended(client, batch.id)

    assert len(await results(client, done.output_file_id)) == 1
    used = await client.get("/../fleet/usage?by=key", cast_to=dict[str, Any])
    assert [row["requests"] for row in used["rows"]] == [1]


async def test_a_gateway_that_ends_gives_its_batches_away(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    gate = Gate(2)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY}, respond=gate.respond)
    first = await start_gateway(node)
    client = openai_client(first.port)
    batch = await submit(client, [line(number) for number in range(6)])
    await _recorded(client, batch.id, 1)

    await first.gateway.close()
    gate.opened.set()
    second = await start_gateway(node)

    client = openai_client(second.port)
    done = await ended(client, batch.id)
    assert len(await results(client, done.output_file_id)) == 6


async def test_a_batch_that_failed_while_the_database_was_away_is_run_again(
    start_gateway: StartGateway, neurons: StartNeuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY})
    client = openai_client((await start_gateway(node)).port)
    finalise, release, faults = BatchResults.finalise, tables.release, ["release", "finalise"]

    async def fails_once(self: BatchResults) -> None:
        if "finalise" in faults:
            faults.remove("finalise")
            raise OSError("the storage is away")
        await finalise(self)

    def fails_too(execute: Execute, id: str, owner: str) -> None:
        if "release" in faults:
            faults.remove("release")
            raise StoreError("the database is away")
        release(execute, id, owner)

    monkeypatch.setattr(BatchResults, "finalise", fails_once)
    monkeypatch.setattr(tables, "release", fails_too)

    done = await ended(client, (await submit(client, [line(0)])).id)

    assert (done.status, faults) == ("completed", [])


async def test_what_killed_gateways_left_on_disk_is_deleted_after_a_day(
    start_gateway: StartGateway, neurons: StartNeuron, tmp_path: Path
) -> None:
    gate = Gate(1)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY}, respond=gate.respond)
    gateway = await start_gateway(node)
    client = openai_client(gateway.port)
    batch = await submit(client, [line(0), line(1)])
    await _recorded(client, batch.id, 1)
    folder = tmp_path / "files"
    needed = {path.name for path in folder.iterdir()}
    left = {f"file-{'0' * 24}", f".file-{'1' * 24}.abcd", f"batch_{'2' * 24}.owner"}
    for name in (*left, "a file of somebody else"):
        (folder / name).touch()
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    (folder / f"file-{'3' * 24}").touch()  # one that another gateway is about to add to the database

    database = Database(str(tmp_path / "cortex-spend.db"))
    await FileStore(database, BatchesSection(), folder).purge()
    await database.close()

    assert {path.name for path in folder.iterdir()} == needed | {f"file-{'3' * 24}", "a file of somebody else"}
    gate.opened.set()
    assert (await ended(client, batch.id)).status == "completed"


async def test_a_batch_whose_results_are_gone_fails(
    start_gateway: StartGateway, neurons: StartNeuron, tmp_path: Path
) -> None:
    gate = Gate(1)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY}, respond=gate.respond)
    client = openai_client((await start_gateway(node)).port)
    batch = await submit(client, [line(0), line(1)])
    await _recorded(client, batch.id, 1)
    for segment in (tmp_path / "files").glob("batch_*"):
        segment.unlink()
    gate.opened.set()

    done = await ended(client, batch.id)

    assert done.status == "failed"
    assert done.errors is not None
    assert done.errors.data is not None
    assert [each.code for each in done.errors.data] == ["results_lost"]


async def test_a_response_that_is_cut_off_is_asked_for_again(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    async def cut_off(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(node.seen) == 1:
            response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
            await response.prepare(request)
            await response.write(b'{"id": ')
            await reset_connection(request)
        return await plain_response(node, request, body)

    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY}, respond=cut_off)
    client = openai_client((await start_gateway(node)).port)

    done = await ended(client, (await submit(client, [line(0)])).id)

    assert len(await results(client, done.output_file_id)) == 1


async def test_a_line_that_is_cancelled_before_it_starts_keeps_no_slot_and_runs_later(
    start_gateway: StartGateway, neurons: StartNeuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump, cancelled = BatchRunner._pump, list[asyncio.Task[None]]()  # noqa: SLF001

    def cancels_first(self: BatchRunner) -> None:
        pump(self)
        if not cancelled:
            cancelled.extend(task for run in self._runs.values() for task in run.running)
            for task in cancelled:
                task.cancel()

    monkeypatch.setattr(BatchRunner, "_pump", cancels_first)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY})
    client = openai_client((await start_gateway(node)).port)

    done = await ended(client, (await submit(client, [line(0), line(1)])).id)

    assert cancelled
    assert len(await results(client, done.output_file_id)) == 2


async def test_results_wait_for_room_on_the_disk_and_no_line_runs_twice(
    start_gateway: StartGateway, neurons: StartNeuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, faults = BatchResults._append, [OSError(errno.ENOSPC, "No space left on device")] * 3  # noqa: SLF001

    def is_full_at_first(self: BatchResults, batch: list[Finished]) -> list[tuple[LineResult, Finished]]:
        if faults:
            raise faults.pop()
        return append(self, batch)

    monkeypatch.setattr(BatchResults, "_append", is_full_at_first)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY})
    client = openai_client((await start_gateway(node)).port)

    done = await ended(client, (await submit(client, [line(0), line(1)])).id)

    assert len(await results(client, done.output_file_id)) == 2
    assert len(node.seen) == 2


async def test_a_line_that_fails_unexpectedly_is_not_tried_again_at_once(
    start_gateway: StartGateway, neurons: StartNeuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = list[float]()

    def fails(*_: object) -> None:
        attempts.append(time.monotonic())
        if len(attempts) < 3:
            raise OSError(errno.EIO, "Input/output error")
        monkeypatch.undo()

    monkeypatch.setattr(BatchRunner, "_send", fails)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY})
    client = openai_client((await start_gateway(node)).port)
    await submit(client, [line(0)])

    await until(lambda: len(attempts) >= 3)

    assert attempts[2] - attempts[0] >= FAST.min_backoff_s


async def test_models_that_are_ready_nowhere_are_tried_a_few_at_a_time(
    start_gateway: StartGateway, neurons: StartNeuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump, most = BatchRunner._pump, 0  # noqa: SLF001

    def counts(self: BatchRunner) -> None:
        nonlocal most
        pump(self)
        most = max(most, sum(len(run.running) for run in self._runs.values()))

    monkeypatch.setattr(BatchRunner, "_pump", counts)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY})
    client = openai_client((await start_gateway(node, batches=BatchesSection(max_lines_per_node=4))).port)
    models = [line(number, model=f"unknown-{number}") for number in range(20)]

    done = await ended(client, (await submit(client, models)).id)

    assert len(await results(client, done.error_file_id)) == 20
    assert most <= 4


async def test_batches_that_end_while_the_gateway_does_are_no_failure(
    start_gateway: StartGateway, neurons: StartNeuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(0)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY}, respond=gate.respond)
    first = await start_gateway(node)
    client = openai_client(first.port)
    for number in range(3):
        await submit(client, [line(number)])
    batches = first.gateway._batches._runner  # noqa: SLF001
    await until(lambda: len(batches._runs) == 3)  # noqa: SLF001
    abort = BatchRunner._abort  # noqa: SLF001

    async def ends(self: BatchRunner, run: Any) -> Any:
        self._runs.pop(run.batch.id, None)
        return await abort(self, run)

    monkeypatch.setattr(BatchRunner, "_abort", ends)

    await batches.close()

    assert not batches._batch_tasks  # noqa: SLF001


async def test_a_file_that_cannot_be_read_to_its_end_breaks_the_response(
    start_gateway: StartGateway, neurons: StartNeuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = openai_client((await start_gateway(await neurons("one"))).port)
    file = await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")

    async def fails(self: FileStore, exchange: Exchange, id: str, headers: Headers) -> None:
        exchange.start(200, headers, 1000)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(FileStore, "send", fails)

    with pytest.raises(openai.APIConnectionError):
        async with asyncio.timeout(WAIT_S):
            await client.files.content(file.id)


def test_results_that_are_written_twice_are_where_their_rows_say(tmp_path: Path) -> None:
    """A gateway that ends may write again what a thread is writing still."""
    database = Database(str(tmp_path / "spend.db"))
    batch = tables.Batch(
        id=f"batch_{'0' * 24}",
        key_id="",
        key_name="",
        kind="openai",
        endpoint="",
        completion_window="",
        metadata="null",
        input_file_id="",
        output_file_id="",
        error_file_id="",
        status="in_progress",
        created_s=0,
        expires_s=0,
        times="{}",
        problems="[]",
    )
    written = BatchResults(FileStore(database, BatchesSection(), tmp_path / "files"), batch, "owner")
    texts = {number: b"%d" % number * (number % 7) + b"\n" for number in range(1000)}
    finished = [Finished(number, "succeeded", text) for number, text in texts.items()]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _: written._append(finished), range(4)))  # noqa: SLF001
    finally:
        sys.setswitchinterval(interval)
    written.close()
    segment = (tmp_path / "files" / f"{batch.id}.owner").read_bytes()
    for each in (result for written_once in found for result, _ in written_once):
        assert segment[each.start : each.start + each.num_bytes] == texts[each.number]
