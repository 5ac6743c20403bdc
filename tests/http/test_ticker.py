from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from cortex.http.ticker import Ticker


class Timer:
    def __init__(self, when_s: float, call: Callable[[], None]) -> None:
        self.when_s = when_s
        self.call = call

    def when(self) -> float:
        return self.when_s


class StoppedLoop:
    """Its clock is moved by the test, and it has one timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timer: Timer | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.timer = Timer(self.now + delay_s, call)
        return self.timer

    def fire(self, late_s: float = 0.0) -> None:
        assert self.timer is not None
        timer, self.timer = self.timer, None
        self.now = timer.when_s + late_s
        timer.call()


class Member:
    def __init__(self) -> None:
        self.ticks: list[float] = []

    def on_tick(self, now: float) -> None:
        self.ticks.append(now)


def test_late_tick_is_skipped_once_so_that_what_came_meanwhile_is_read_first() -> None:
    loop, member = StoppedLoop(), Member()
    ticker = Ticker(cast(asyncio.AbstractEventLoop, loop), interval_s=1.0)
    ticker.add(member)
    loop.fire()
    loop.fire(late_s=60.0)
    assert member.ticks == [1.0]
    loop.fire()
    assert member.ticks == [1.0, 63.0]


def test_process_that_is_always_late_still_checks_deadlines() -> None:
    loop, member = StoppedLoop(), Member()
    ticker = Ticker(cast(asyncio.AbstractEventLoop, loop), interval_s=1.0)
    ticker.add(member)
    for _ in range(6):
        loop.fire(late_s=5.0)
    assert len(member.ticks) == 3


def test_stops_without_members() -> None:
    loop, member = StoppedLoop(), Member()
    ticker = Ticker(cast(asyncio.AbstractEventLoop, loop), interval_s=1.0)
    ticker.add(member)
    ticker.discard(member)
    loop.fire()
    assert loop.timer is None
    assert member.ticks == []
