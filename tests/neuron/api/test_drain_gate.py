from __future__ import annotations

import asyncio

import pytest

from cortex.neuron.api.drain_gate import DrainGate
from cortex.wire.errors import ShuttingDown

from ...waiting import WAIT_S


class Work:
    """What a request waits for; it ends when it may, or is cancelled."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        self.was_cancelled = False

    async def run(self) -> str:
        self.began.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "done"


async def test_returns_what_it_waits_for_and_raises_what_that_raises() -> None:
    gate, work = DrainGate(), Work()
    work.may_end.set()
    assert await gate.wait_for(work.run()) == "done"

    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await gate.wait_for(fail())


async def test_close_ends_every_wait_and_the_work_in_it() -> None:
    gate, works = DrainGate(), [Work(), Work()]
    waiting = [asyncio.create_task(gate.wait_for(work.run())) for work in works]
    for work in works:
        await work.began.wait()
    gate.close()
    gate.close()
    ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), WAIT_S)
    assert [type(each) for each in ended] == [ShuttingDown, ShuttingDown]
    assert all(work.was_cancelled for work in works)
    assert not any(task.cancelling() for task in waiting), "the request goes on to its error response"


async def test_closed_gate_waits_for_nothing() -> None:
    gate, work = DrainGate(), Work()
    gate.close()
    with pytest.raises(ShuttingDown):
        await gate.wait_for(work.run())
    assert not work.began.is_set()


async def test_request_that_its_client_left_stays_cancelled_when_the_gate_closes() -> None:
    gate, work = DrainGate(), Work()
    waiting = asyncio.create_task(gate.wait_for(work.run()))
    await work.began.wait()
    waiting.cancel()
    gate.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_cancelled_wait_leaves_the_gate_to_others() -> None:
    gate, work = DrainGate(), Work()
    waiting = asyncio.create_task(gate.wait_for(work.run()))
    await work.began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with gate.enter():
        assert gate.num_requests == 1
    assert await gate.drained(WAIT_S)


async def test_wait_that_had_another_one_within_it_is_still_interrupted() -> None:
    gate = DrainGate()
    begun = asyncio.Event()

    async def outer() -> None:
        await gate.wait_for(asyncio.sleep(0))
        begun.set()
        await asyncio.Event().wait()

    waiting = asyncio.create_task(gate.wait_for(outer()))
    await begun.wait()
    gate.close()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ShuttingDown):
            await waiting
    assert waiting.cancelling() == 0
