"""Batches over gateways that are killed, paused and replaced: one result and one charge for every line."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cortex.gateway.batches import runner, tables
from cortex.gateway.batches.files import FileStore
from cortex.gateway.batches.results import BatchResults
from cortex.gateway.config import BatchesSection
from cortex.gateway.database import Database, Execute, Rows, StoreError
from cortex.gateway.ledger import keys
from cortex.gateway.ledger.store import LedgerSection
from cortex.wire.node.protocol import ModelState

from ...waiting import WAIT_S
from ..fake_neuron import FakeNeuron, StartNeuron, plain_response
from ..started_gateway import SpawnGateway, StartGateway, until
from .conftest import MODEL, ended, line, openai_client, results, submit

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
    deadline = time.monotonic() + WAIT_S
    while (await client.batches.retrieve(id)).request_counts.completed < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "LOST_AFTER_S", 4.0)
    gate = Gate(6)
    node = await neurons("one", sizes={MODEL: 1 << 30}, states={MODEL: ModelState.READY}, respond=gate.respond)
    new = keys.generate("ada")
    first = await spawn(node, f'[ledger]\ndatabase = "{postgres_url}"\n{keys.as_toml(new.section)}')
    second = await start_gateway(node, keys=(new.section,), ledger=LedgerSection(database=postgres_url))
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
    start_gateway: StartGateway, neurons: StartNeuron, tmp_path: Any
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
            change = partial(_execute, "UPDATE batch SET owner = ?, renewed_s = ?", (owner, renewed))
            database.run(change)
            if owner:
                gate.opened.set()
                await until(lambda: node.seen[0].ended)
                await asyncio.sleep(0.3)
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
