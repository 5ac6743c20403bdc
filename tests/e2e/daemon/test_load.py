"""Many clients at once, clients that leave, and an end in the middle of it all."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from ...processes import alive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from .conftest import Daemon, StartDaemon

pytestmark = pytest.mark.e2e

DEMO, TINY = "demo", "tiny"
STREAMS = 64
DRAIN_S = 1.0
TIMEOUT_S = 60.0
"""Only reached on failure."""
CHUNK_TOKENS = 32
LONG_RESPONSE_TOKENS = 1500


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon) -> Daemon:
    return start_daemon(f"drain_s = {DRAIN_S}", "[limits]", f"max_num_seqs = {STREAMS}")


@pytest.fixture(scope="module")
def narrow(start_daemon: StartDaemon) -> Daemon:
    """A daemon that serves one request at a time."""
    return start_daemon(
        f"drain_s = {DRAIN_S}", "[limits]", "max_num_seqs = 1", f"prefill_chunk_tokens = {CHUNK_TOKENS}"
    )


def completion(max_tokens: int, prompt: str = "Once upon a time", **more: Any) -> dict[str, Any]:
    return {"model": DEMO, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **more}


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


async def until(condition: Callable[[], Any], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


async def test_64_streams_are_complete_while_models_are_loaded_and_unloaded(daemon: Daemon) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        began_s = time.monotonic()
        bodies = [completion(4, f"{number} is a number") for number in range(STREAMS)]
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
    assert daemon.model(DEMO)["load"]["running"] == 0
    assert daemon.model(TINY)["state"] == "cold"


async def leave(url: str, body: dict[str, Any], *, after: Callable[[], Any] | int) -> None:
    """Begins a response and disconnects `after` that many events, or once the condition holds."""
    async with aiohttp.ClientSession() as session:

        async def read() -> None:
            seen = 0
            async for _ in stream(session, url, body):
                seen += 1
                if seen == after:
                    return

        reading = asyncio.create_task(read())
        if callable(after):
            await until(after, TIMEOUT_S)
            reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


def load_of(daemon: Daemon) -> tuple[int, int, float]:
    load = daemon.model(DEMO)["load"]
    return load["running"], load["waiting"], load["kv_used_fraction"]


def is_free(daemon: Daemon) -> bool:
    return load_of(daemon) == (0, 0, 0.0)


WORDS = 750  # each is a token at least
LONG_PROMPT = "a long story about everything " * (WORDS // 5)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_disconnected_client_frees_its_slot_and_pages_before_half_its_work_is_done(
    narrow: Daemon, phase: str
) -> None:
    if phase == "decode":
        await leave(narrow.url, completion(LONG_RESPONSE_TOKENS), after=3)
        whole_steps = LONG_RESPONSE_TOKENS
    else:
        await leave(narrow.url, completion(4, LONG_PROMPT), after=lambda: load_of(narrow)[0] == 1)
        whole_steps = WORDS // CHUNK_TOKENS
    steps_before = narrow.num_steps()
    await until(lambda: is_free(narrow), TIMEOUT_S)
    assert narrow.num_steps() - steps_before < whole_steps / 2


async def test_disconnected_client_leaves_the_queue_while_another_is_served(narrow: Daemon) -> None:
    async with aiohttp.ClientSession() as session:
        first = stream(session, narrow.url, completion(LONG_RESPONSE_TOKENS))
        await anext(first)
        await leave(narrow.url, completion(4), after=lambda: load_of(narrow)[1] == 1)
        await until(lambda: load_of(narrow)[:2] == (1, 0), TIMEOUT_S)
        await first.aclose()
    await until(lambda: is_free(narrow), TIMEOUT_S)


async def test_disconnected_client_does_not_stop_a_load(narrow: Daemon) -> None:
    narrow.call("/models/unload", {"model_id": DEMO})
    await leave(narrow.url, completion(4), after=lambda: narrow.model(DEMO)["state"] == "loading")
    await until(lambda: narrow.model(DEMO)["state"] == "ready", TIMEOUT_S)
    await until(lambda: is_free(narrow), TIMEOUT_S)
    assert narrow.complete()[0] == 200


async def test_sigterm_under_load_ends_streams_after_the_drain_and_leaves_no_process(daemon: Daemon) -> None:
    family = [daemon.process.pid, *daemon.descendants()]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        responses = [stream(session, daemon.url, completion(LONG_RESPONSE_TOKENS)) for _ in range(8)]
        # Each has begun: a response that ends before its first byte is no stream, but a status.
        await asyncio.gather(*(anext(response) for response in responses))
        daemon.process.send_signal(signal.SIGTERM)
        ended = await asyncio.gather(*(last(response) for response in responses))
        assert await asyncio.to_thread(daemon.process.wait, TIMEOUT_S) == 0
    # None of them was complete: the drain is bounded.
    assert [event["error"]["code"] for event in ended] == ["shutting_down"] * 8
    assert not [each for each in family if alive(each)]
