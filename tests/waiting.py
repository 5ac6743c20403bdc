"""How long tests wait for what must happen, and how they wait for what no event tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

WAIT_S = 120.0
"""Limit of every wait for something that happens in a healthy run: only reached on failure, on a slow machine, too.
The limit of a whole test is `timeout` in pyproject.toml."""

NEVER_S = 10 * WAIT_S
"""How long something lasts that a test ends, or that must not end while a test runs."""


async def until(found: Callable[[], T], problem: str = "it did not happen in time") -> T:
    """What `found` returns, once that is true. Fails with `problem` after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while not (result := found()):
        assert time.monotonic() < deadline, problem
        await asyncio.sleep(0.005)
    return result


async def until_response(ask: Callable[[], Awaitable[T]], holds: Callable[[T], object] = bool) -> T:
    """The first response to `ask` that `holds`, for what is only known over HTTP. Fails with the last one."""
    deadline = time.monotonic() + WAIT_S
    while not holds(response := await ask()):
        assert time.monotonic() < deadline, response
        await asyncio.sleep(0.02)
    return response


async def at_rest(count: Callable[[], int], for_s: float = 0.2) -> int:
    """What `count` returns, once it stays the same `for_s`: no event reports that a sender is held back."""
    last = count()
    deadline = time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < deadline, f"it still grows, and is {last}"
        await asyncio.sleep(for_s)
        if last == (last := count()):
            return last


def wait_until(
    found: Callable[[], T], problem: str | Callable[[], str] = "it did not happen in time", *, limit_s: float = WAIT_S
) -> T:
    """`until` without a loop, for what other programs do."""
    deadline = time.monotonic() + limit_s
    while not (result := found()):
        assert time.monotonic() < deadline, problem if isinstance(problem, str) else problem()
        time.sleep(0.05)
    return result
