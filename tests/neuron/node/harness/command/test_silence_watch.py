"""Responses of which nothing arrives."""

from __future__ import annotations

import asyncio

from cortex.neuron.node.harness.command.host import SilenceWatch

from .....waiting import NEVER_S


class Checks:
    """Counts the checks of a server that is always healthy."""

    def __init__(self) -> None:
        self.count = 0
        self._made = asyncio.Event()

    async def check(self) -> None:
        self.count += 1
        self._made.set()

    async def wait_for_more(self, number: int) -> None:
        for _ in range(number):
            self._made.clear()
            await self._made.wait()


async def test_server_is_checked_again_and_again_until_something_arrives() -> None:
    checks = Checks()
    watch = SilenceWatch(0.0, checks.check)
    watch.begin("a")
    await checks.wait_for_more(3)
    watch.end("a")
    watch.end("a")
    before = checks.count
    for _ in range(10):
        await asyncio.sleep(0)
    assert checks.count <= before + 1, "one may have begun"


async def test_server_of_responses_that_arrive_is_not_checked() -> None:
    checks = Checks()
    awaited, patient = SilenceWatch(0.0, checks.check), SilenceWatch(NEVER_S, checks.check)
    for request_id in "ab":
        awaited.begin(request_id)
        patient.begin(request_id)
    awaited.end("a")
    awaited.clear()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not checks.count
    patient.clear()
