"""Many clients at once, clients that leave, and an end in the middle of it all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from ....processes import alive
from ....waiting import WAIT_S, until
from ..conftest import TINY, WIDE
from .conftest import MAX_RUNNING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ..conftest import Daemon

pytestmark = pytest.mark.e2e

RESPONSE_TOKENS = 12
LONG_RESPONSE_TOKENS = 4000


def completion(max_tokens: int, prompt: str = "Once upon a time", **more: Any) -> dict[str, Any]:
    return {"model": WIDE, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **more}


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a response as they come."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def whole(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [event async for event in stream(session, url, body)]


async def last(response: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [event async for event in response][-1]


async def test_64_streams_are_complete_while_models_are_loaded_and_unloaded(daemon: Daemon) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(WAIT_S)) as session:
        began_s = time.monotonic()
        bodies = [completion(RESPONSE_TOKENS, str(number)) for number in range(MAX_RUNNING)]
        responses = asyncio.gather(*(whole(session, daemon.url, body) for body in bodies))
        cycles, read_s = 0, []
        while not responses.done():
            for order in ("load", "unload"):
                async with session.post(f"{daemon.url}/models/{order}", json={"model_id": TINY}) as response:
                    assert response.status == 200, await response.text()
                asked_s = time.monotonic()
                async with session.get(f"{daemon.url}/health") as response:
                    assert response.status == 200
                read_s.append(time.monotonic() - asked_s)
            cycles += 1
        all_s = time.monotonic() - began_s
        for events in await responses:
            assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert cycles >= 1
    # A read that waited for the engine would take as long as a response.
    assert statistics.median(read_s) < all_s / 10
    assert daemon.model(WIDE)["load"]["running"] == 0
    assert daemon.model(TINY)["state"] == "cold"


async def leave(url: str, body: dict[str, Any], *, once: Callable[[], bool]) -> None:
    """Asks for a response and disconnects once the condition holds."""
    async with aiohttp.ClientSession() as session:
        reading = asyncio.create_task(whole(session, url, body))
        await until(once)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


async def test_disconnected_client_does_not_stop_a_load(daemon: Daemon) -> None:
    def is_free() -> bool:
        load = daemon.model(WIDE)["load"]
        return (load["running"], load["waiting"], load["kv_used_fraction"]) == (0, 0, 0.0)

    daemon.call("/models/unload", {"model_id": WIDE})
    worker = daemon.process_called("neuron-worker")
    os.kill(worker, signal.SIGSTOP)  # until the client has disconnected, the load cannot end
    try:
        await leave(daemon.url, completion(4), once=lambda: daemon.model(WIDE)["state"] == "loading")
    finally:
        os.kill(worker, signal.SIGCONT)
    await until(lambda: daemon.model(WIDE)["state"] == "ready")
    await until(is_free)
    assert daemon.complete(WIDE)[0] == 200


@pytest.mark.ends_shared
async def test_sigterm_under_load_ends_streams_after_the_drain_and_leaves_no_process(daemon: Daemon) -> None:
    family = [daemon.process.pid, *daemon.descendants()]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        responses = [stream(session, daemon.url, completion(LONG_RESPONSE_TOKENS)) for _ in range(8)]
        # Each has begun: a response that ends before its first byte is no stream, but a status.
        await asyncio.gather(*(anext(response) for response in responses))
        daemon.process.send_signal(signal.SIGTERM)
        ended = await asyncio.gather(*(last(response) for response in responses))
        assert await asyncio.to_thread(daemon.process.wait, WAIT_S) == 0
    # None of them was complete: the drain is bounded.
    assert [event["error"]["code"] for event in ended] == ["shutting_down"] * 8
    await until(lambda: not any(map(alive, family)))  # the kernel ends those whose parent has ended
