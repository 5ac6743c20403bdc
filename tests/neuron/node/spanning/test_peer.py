"""The part of a model that a node holds for another one: errors are reported, and only a stuck worker is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from cortex.neuron.engine.request import EngineInfo, LoadSpec, RankSpec, RendezvousAddress
from cortex.neuron.node.loading.device_choice import ChosenDevices
from cortex.neuron.node.loading.library import KnownModel
from cortex.neuron.node.memory.sleep_budget import SleepBudget, SleepingModel
from cortex.neuron.node.spanning import hosted_share
from cortex.neuron.node.spanning.peer import HostedShares
from cortex.neuron.node.spanning.protocol import (
    LoadShare,
    PrepareShare,
    ShareEnding,
    ShareFailed,
    ShareLoaded,
    SharePrepared,
    ShareSlept,
    ShareUnloaded,
    ShareWoken,
    SleepShare,
    UnloadShare,
    WakeShare,
    decode_from_peer,
    encode,
)
from cortex.neuron.worker.device_claims import DeviceClaims
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Resident
from cortex.wire.node.orders import LoadRequest

from ....waiting import WAIT_S

NODES = ("first", "second")
PREPARE = PrepareShare(LoadRequest(model_id="m", tensor_parallel=2, nodes=NODES), "digest")
ADDRESS = RendezvousAddress("127.0.0.1", 1, 2, "secret", "127.0.0.1")
LOAD = LoadShare(LoadSpec("m", rank=RankSpec(1, 2, "", "tcp", rendezvous=ADDRESS)))
INFO = EngineInfo("llama", "float32", 512, 100, weight_bytes=4, kv_bytes=1, page_tokens=32, num_pages=1)


class LeadEnd:
    """The connection to the lead: what it sends, and what it gets."""

    local_host = "127.0.0.1"

    def __init__(self) -> None:
        self._sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._got: asyncio.Queue[bytes] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._sent.get()) is not None:
            yield message

    async def send(self, message: bytes) -> None:
        self._got.put_nowait(message)

    async def close(self) -> None:
        self._sent.put_nowait(None)

    def say(self, message: Any) -> None:
        self._sent.put_nowait(encode(message))

    async def reply(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            return decode_from_peer(await self._got.get())


class FakeGroup:
    device_indices = (0,)
    freed_at_s = 0.0

    def __init__(self) -> None:
        self.resident: Resident | None = None
        self.load_error: Exception | None = None
        self.sleep_error: Exception | None = None
        self.freed = asyncio.Event()
        self.killed = asyncio.Event()

    async def load(self, sink: Any) -> Resident:
        if self.load_error is not None:
            raise self.load_error
        self.resident = Resident(INFO, measured_bytes=1, process_bytes=1)
        return self.resident

    async def sleep(self) -> Resident:
        if self.sleep_error is not None:
            raise self.sleep_error
        self.resident = Resident(INFO, measured_bytes=1, process_bytes=1, host_bytes=INFO.weight_bytes)
        return self.resident

    async def wake(self) -> Resident:
        return await self.load(None)

    async def unload(self) -> Reclaimed:
        await self.freed.wait()
        self.resident = None
        return Reclaimed(1, 1)

    def kill(self, reason: str) -> None:
        self.killed.set()
        self.freed.set()


class FakePlace:
    """A node with one device."""

    def __init__(self, group: FakeGroup) -> None:
        self.library: Any = SimpleNamespace(
            is_configured=lambda _: True, adopt=lambda _: KnownModel(id="m", source="m")
        )
        self.loader: Any = SimpleNamespace(find_local=self._find_local)
        self.harness: Any = SimpleNamespace(inspect=self._inspect, spec=lambda *_: LoadSpec("m"))
        self.room: Any = SimpleNamespace(for_load=self._for_load, for_wake=self._for_load)
        self.devices: Any = SimpleNamespace(claims=DeviceClaims(), sharded_host=lambda *_, **__: group)
        self.rests: list[int] = []
        """What sleeping models left of the budget, each time that it changed."""
        self.sleep_budget = SleepBudget(
            lambda _: 10, lambda: self._sleeping(group), lambda _: asyncio.sleep(0), self.rests.append
        )
        self.find_error: Exception | None = None

    async def _inspect(self, *_: Any) -> Any:
        return SimpleNamespace(digest="digest")

    async def _find_local(self, model: KnownModel) -> str:
        if self.find_error is not None:
            raise self.find_error
        return "m"

    def _sleeping(self, group: FakeGroup) -> list[SleepingModel]:
        host_bytes = group.resident.host_bytes if group.resident is not None else 0
        return [SleepingModel("m", host_bytes, 0.0, can_be_unloaded=False)] if host_bytes else []

    @asynccontextmanager
    async def _for_load(self, *_: Any) -> AsyncIterator[Any]:
        device: Any = SimpleNamespace(index=0, kind="cpu")
        yield SimpleNamespace(chosen=ChosenDevices((device,)))


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def place(group: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(hosted_share, "FREE_S", 0.02)
    return FakePlace(group)


@pytest_asyncio.fixture(loop_scope="session")
async def served(place: Any) -> AsyncIterator[tuple[HostedShares, LeadEnd, asyncio.Task[None]]]:
    shares, lead = HostedShares(place), LeadEnd()
    serving = asyncio.create_task(shares.serve(lead))
    yield shares, lead, serving
    await lead.close()
    async with asyncio.timeout(WAIT_S):
        await serving
    assert shares.statuses() == ()


async def loaded(lead: LeadEnd) -> None:
    lead.say(PREPARE)
    assert isinstance(await lead.reply(), SharePrepared)
    lead.say(LOAD)
    assert isinstance(await lead.reply(), ShareLoaded)


async def test_unexpected_error_while_files_are_sought_is_reported_to_the_lead(place: Any, served: Any) -> None:
    _, lead, _ = served
    place.find_error = PermissionError("cannot read the cache")
    lead.say(PREPARE)
    reply = await lead.reply()
    assert isinstance(reply, ShareFailed)
    assert "cannot read the cache" in reply.message


async def test_lead_of_another_version_gets_the_reason(served: Any) -> None:
    _, lead, serving = served
    lead.say(PREPARE)
    assert isinstance(await lead.reply(), SharePrepared)
    lead.say({"type": "LoadShare", "spec": {"path": "m", "rank": {"rank": 1, "backend": "of the past"}}})
    reply = await lead.reply()
    assert isinstance(reply, ShareFailed)
    assert "need the same version" in reply.message
    await serving


async def test_unexpected_error_during_the_load_is_reported_and_releases_the_device(
    place: Any, group: FakeGroup, served: Any
) -> None:
    _, lead, _ = served
    group.load_error = OSError("no space left")
    lead.say(PREPARE)
    assert isinstance(await lead.reply(), SharePrepared)
    lead.say(LOAD)
    reply = await lead.reply()
    assert isinstance(reply, ShareFailed)
    assert "no space left" in reply.message
    assert place.devices.claims.conflicts(spans=True) == {}


async def test_unexpected_error_while_it_falls_asleep_is_reported_to_the_lead(group: FakeGroup, served: Any) -> None:
    _, lead, _ = served
    await loaded(lead)
    group.sleep_error = OSError("no space left")
    lead.say(SleepShare())
    reply = await lead.reply()
    assert isinstance(reply, ShareFailed)
    assert "no space left" in reply.message
    group.freed.set()


async def test_host_memory_of_a_part_is_for_others_when_it_has_woken_did_not_sleep_or_is_gone(
    place: Any, group: FakeGroup, served: Any
) -> None:
    _, lead, serving = served
    await loaded(lead)
    lead.say(SleepShare())
    assert isinstance(await lead.reply(), ShareSlept)
    assert place.rests == [6]
    lead.say(WakeShare())
    assert isinstance(await lead.reply(), ShareWoken)
    assert place.rests == [6, 10]
    group.sleep_error = OSError("no space left")
    lead.say(SleepShare())
    assert isinstance(await lead.reply(), ShareFailed)
    assert place.rests == [6, 10, 6, 10]
    group.sleep_error = None
    lead.say(SleepShare())
    assert isinstance(await lead.reply(), ShareSlept)
    group.freed.set()
    await lead.close()
    async with asyncio.timeout(WAIT_S):
        await serving
    assert place.rests == [6, 10, 6, 10, 6, 10]


async def test_drain_goes_on_where_a_share_ends_while_another_lead_is_notified(place: Any, group: FakeGroup) -> None:
    class SlowLead(LeadEnd):
        async def send(self, message: bytes) -> None:
            await super().send(message)
            if isinstance(decode_from_peer(message), ShareEnding):
                await other.close()
                await servings[1]

    group.freed.set()
    shares, slow, other = HostedShares(place), SlowLead(), LeadEnd()
    servings = [asyncio.create_task(shares.serve(lead)) for lead in (slow, other)]
    for lead in (slow, other):
        await loaded(lead)
    async with asyncio.timeout(WAIT_S):
        draining = asyncio.create_task(shares.drain(WAIT_S))
        assert isinstance(await slow.reply(), ShareEnding)
        slow.say(UnloadShare())
        await draining
        await servings[0]
    assert shares.statuses() == ()


async def test_unload_waits_for_a_worker_that_is_busy_with_another_model(group: FakeGroup, served: Any) -> None:
    _, lead, _ = served
    await loaded(lead)
    lead.say(UnloadShare())
    await asyncio.sleep(5 * hosted_share.FREE_S)
    assert not group.killed.is_set()
    group.freed.set()
    assert isinstance(await lead.reply(), ShareUnloaded)
    assert not group.killed.is_set()


async def test_worker_that_does_not_leave_its_step_is_killed_when_the_lead_is_gone(
    group: FakeGroup, served: Any
) -> None:
    _, lead, serving = served
    await loaded(lead)
    await lead.close()
    async with asyncio.timeout(WAIT_S):
        await serving
    assert group.killed.is_set()


async def test_shutdown_does_not_wait_for_an_unload(group: FakeGroup, served: Any) -> None:
    shares, lead, _ = served
    await loaded(lead)
    lead.say(UnloadShare())
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await shares.close()
    assert group.killed.is_set()


async def test_closed_node_takes_no_more_shares(place: Any, served: Any) -> None:
    shares, lead, serving = served
    await shares.close()
    lead.say(PREPARE)
    async with asyncio.timeout(WAIT_S):
        await serving
    assert shares.statuses() == ()
