"""Unauthenticated peers at the rendezvous of a model that spans nodes: they read and store nothing, delay no rank."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cortex.neuron.engine.parallel.arrivals import connected
from cortex.neuron.engine.parallel.entries import RemoteEntries

from ..waiting import WAIT_S
from .target import MEBIBYTE, Target, write_until_blocked

KEY = b"key of the second rank"
LEADER = f"""
import sys
from cortex.neuron.engine.parallel.entries import ServedEntries
from cortex.neuron.engine.parallel.ports import listening
listener = listening("127.0.0.1", 0)
entries = ServedEntries(listener, [{KEY!r}])
entries.set("group/address/0", b"10.0.0.1 4711 a-secret")
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
LIST_KEYS = bytes([13]) + bytes([16]) + bytes(64)
"""As a client of torch's store begins, up to more than a handshake."""


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Target]:
    """The process of a leader that waits for one rank."""
    with subprocess.Popen(
        [sys.executable, "-c", LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield Target(int(process.stdout.readline()), process.pid, tmp_path / "log")
        process.stdin.close()
        assert process.wait(WAIT_S) == 0


async def test_strangers_read_and_store_nothing(leader: Target, scaled: Callable[[int, int], int]) -> None:
    before_bytes = leader.memory_bytes()
    async with leader.connections(scaled(200, 1500)):  # silent
        for sent in (LIST_KEYS, b"x" * MEBIBYTE, bytes(64)) * scaled(5, 300):
            reader, writer = await asyncio.open_connection("127.0.0.1", leader.port)
            await write_until_blocked(writer, sent, most_bytes=64 * MEBIBYTE, patience_s=1.0)
            with contextlib.suppress(ConnectionError):
                assert len(await reader.read()) <= 32  # a nonce
            writer.transport.abort()
        rank = await asyncio.to_thread(joined, leader.port)
        assert rank.get("group/address/0") == b"10.0.0.1 4711 a-secret"
        assert rank.num_keys() == 1
        rank.close()
    assert leader.memory_bytes() - before_bytes < 16 * MEBIBYTE


def joined(port: int) -> RemoteEntries:
    return RemoteEntries(connected(("127.0.0.1", port), KEY, time.monotonic() + WAIT_S))
