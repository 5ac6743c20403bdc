"""A server on GPUs: measured by its processes, put to sleep and woken by requests, and its memory verified."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from cortex.http.ticker import Ticker
from cortex.neuron.node.harness.command.estimates import SizeOfModel
from cortex.neuron.node.harness.command.host import (
    CommandHost,
    ServerCommand,
    ServerTimes,
    free_port,
)
from cortex.neuron.node.harness.command.server_memory import ServerMemory
from cortex.neuron.servers.entry import HarnessEntry, StateRequest
from cortex.neuron.worker.model_host import Damaged, SleepRejected

from .....waiting import WAIT_S
from .commands import START, NotedSizes, servers

GIB = 1 << 30


@dataclass
class Card:
    """A GPU whose free memory the test decides."""

    free_bytes: int = 80 * GIB
    process_bytes: int | None = None
    earlier: list[int] = field(default_factory=list)
    """What is read first, one after the other."""

    def read(self) -> int:
        return self.earlier.pop(0) if self.earlier else self.free_bytes


class Sink:
    def on_progress(self, *_: Any) -> None: ...


def host_on(card: Card, measured: list[int], reclaim_s: float = WAIT_S, **entry: Any) -> CommandHost:
    fake = HarnessEntry(name="fake", cmd=START, **entry)
    start = list(START[:-1])

    return CommandHost(
        "m",
        fake,
        ServerCommand(lambda port: [*start, str(port)], lambda *_: [], lambda _: {}),
        ServerMemory((0,), card.read, GIB, lambda _: card.process_bytes),
        None,
        Ticker(asyncio.get_running_loop()),
        free_port,
        cast(SizeOfModel, NotedSizes(measured, 2 * GIB)),
        times=ServerTimes(reclaim_s=reclaim_s),
    )


async def state_of(host: CommandHost) -> str:
    assert host.pool is not None
    response = await host.pool.fetch(b"GET", b"/health", timeout_s=WAIT_S)
    return str(json.loads(response.body)["state"])


STATES: dict[str, Any] = {"sleep": StateRequest("/sleep?level=1"), "wake": StateRequest("/wake_up")}


async def test_sleeps_and_wakes_by_requests() -> None:
    card, measured = Card(process_bytes=20 * GIB), list[int]()
    host = host_on(card, measured, **STATES)
    sink: Any = Sink()
    resident = await host.load(sink)
    assert (resident.measured_bytes, measured) == (20 * GIB, [20 * GIB])
    card.earlier, card.free_bytes = [60 * GIB] * 3, 79 * GIB  # the driver frees it a moment later
    asleep = await host.sleep()
    assert await state_of(host) == "sleep?level=1"
    assert (asleep.measured_bytes, asleep.process_bytes) == (20 * GIB, GIB)
    assert asleep.host_bytes > 0
    awake = await host.wake()
    assert (awake.process_bytes, awake.host_bytes, await state_of(host)) == (20 * GIB, 0, "wake_up")
    card.earlier, card.free_bytes = [60 * GIB], 80 * GIB
    assert (await host.unload()).is_complete
    assert not servers()


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ({}, "the harness fake has no sleep"),
        ({**STATES, "sleep": StateRequest("/sleep?refuses")}, "asked to sleep and responded with status 500"),
        (STATES, "freed 0 MiB only"),
    ],
)
async def test_a_sleep_that_frees_nothing_is_rejected(states: dict[str, Any], reason: str) -> None:
    host = host_on(Card(process_bytes=20 * GIB), [], reclaim_s=0.05, **states)
    sink: Any = Sink()
    await host.load(sink)
    with pytest.raises(SleepRejected, match=reason):
        await host.sleep()
    await host.unload()


async def test_a_server_that_does_not_wake_is_ended() -> None:
    card = Card(process_bytes=GIB)
    host = host_on(card, [], **{**STATES, "wake": StateRequest("/wake_up?refuses")})
    sink: Any = Sink()
    await host.load(sink)
    card.earlier, card.free_bytes = [80 * GIB], 81 * GIB
    await host.sleep()
    with pytest.raises(Damaged, match="asked to wake and responded with status 500"):
        await host.wake()
    assert not servers()


async def test_free_memory_counts_where_the_driver_does_not_know_the_processes() -> None:
    card, measured = Card(), list[int]()
    host = host_on(card, measured)
    readings = iter([80 * GIB, 73 * GIB, 73 * GIB])
    memory = ServerMemory((0,), lambda: next(readings, 80 * GIB), GIB)
    host.memory = memory
    sink: Any = Sink()
    assert (await host.load(sink)).measured_bytes == 7 * GIB
    await host.unload()


async def test_a_small_measurement_counts_only_for_what_an_unload_frees() -> None:
    host = host_on(Card(), [])
    readings = iter([80 * GIB, 79 * GIB])
    host.memory = ServerMemory((0,), lambda: next(readings, 80 * GIB), GIB, lambda _: GIB)
    sink: Any = Sink()
    resident = await host.load(sink)
    assert (resident.measured_bytes, resident.process_bytes) == (2 * GIB, GIB)
    assert (await host.unload()).is_complete
