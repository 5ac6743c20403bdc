"""Floods against a gateway process: memory stays bounded, and other clients are still served."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.gateway.ledger.keys import as_toml, generate
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB
from ..waiting import WAIT_S
from .target import MEBIBYTE, Target, write_until_blocked

if TYPE_CHECKING:
    from ..certificates import Authority
    from ..gateway.fake_neuron import StartNeuron
    from ..gateway.started_gateway import SpawnGateway


CHAT_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


Keyed = tuple[Target, str]


@pytest.fixture
async def keyed(neurons: StartNeuron, spawn: SpawnGateway) -> Keyed:
    """A gateway process with one key, which `text` is."""
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    key = generate("user")
    started = await spawn(beast, extra=f"\n[limits]\nhead_timeout_s = 30\n{as_toml(key.section)}")
    return Target(started.port, started.process.pid, started.log_file), key.text


async def test_silent_and_dripping_connections_delay_nobody(keyed: Keyed, scaled: Callable[[int, int], int]) -> None:
    target, _ = keyed
    count = scaled(200, 900)
    async with target.bounded(64 * MEBIBYTE), target.connections(count) as opened:
        for number, (_, writer) in enumerate(opened):
            writer.write((b"", b"POST /v1/chat", CHAT_HEAD + b"X-Long: ")[number % 3])
        for _ in range(5):
            for _, writer in opened[::2]:
                writer.write(b"x")
            await asyncio.sleep(0.02)
        await target.health_s()


async def test_connections_of_one_address_leave_descriptors_for_others(
    neurons: StartNeuron, spawn: SpawnGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    started = await spawn(beast, num_files=256)
    target = Target(started.port, started.process.pid, started.log_file)
    body = b'{"model": "a", "messages": [{"role": "user", "content": "x"}]}'
    request = CHAT_HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with target.connections(300), asyncio.timeout(WAIT_S):
        for sent in (b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", request):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port, local_addr=("127.0.0.2", 0))
            writer.write(sent)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
    log = target.log.read_text()
    assert "the limit of 256 open files permits 96 client connections" in log
    num_lines = log.count("from 127.0.0.1 rejected: 24 connections are open from your address")
    assert 0 < num_lines < 20, "not one for each of 200, however long they took"


async def test_bodies_of_strangers_are_not_buffered(keyed: Keyed, scaled: Callable[[int, int], int]) -> None:
    target, _ = keyed
    head = CHAT_HEAD + b"Authorization: Bearer ck-wrongkey-x\r\nContent-Length: 60000000\r\n\r\n"
    async with target.bounded(64 * MEBIBYTE), target.connections(scaled(20, 200)) as opened:

        async def attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            writer.write(head)
            response = asyncio.create_task(reader.read(64))  # read at once: the reset that follows would discard it
            await write_until_blocked(writer, bytes(MEBIBYTE), 8 * MEBIBYTE, 1.0)
            try:
                return await response
            except ConnectionError:
                return b""

        responses = await asyncio.gather(*(attack(*connection) for connection in opened))
    assert {response[:12] for response in responses} <= {b"HTTP/1.1 401", b""}
    assert any(responses)


async def test_bodies_of_a_key_stay_within_the_buffer_budget(
    neurons: StartNeuron, spawn: SpawnGateway, scaled: Callable[[int, int], int]
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    key = generate("user")
    limits = "max_body_mb = 16\n[limits]\nmax_buffered_mb = 32\n"
    started = await spawn(beast, extra=limits + as_toml(key.section))
    target = Target(started.port, started.process.pid, started.log_file)
    head = CHAT_HEAD + b"Authorization: Bearer %b\r\nContent-Length: 16000000\r\n\r\n" % key.text.encode()
    async with target.bounded(128 * MEBIBYTE), target.connections(scaled(12, 100)) as opened:
        for _, writer in opened:
            writer.write(head)
        taken = await asyncio.gather(
            *(write_until_blocked(writer, bytes(MEBIBYTE), 12 * MEBIBYTE, 1.0) for _, writer in opened)
        )
        assert sum(taken) > 0
        await target.health_s()


async def test_pipelined_requests_whose_responses_nobody_reads(keyed: Keyed, scaled: Callable[[int, int], int]) -> None:
    target, key = keyed
    request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n\r\n" % key.encode()
    most_bytes = scaled(24, 256) * MEBIBYTE
    async with target.bounded(64 * MEBIBYTE), target.connections(scaled(3, 20)) as opened:
        taken = await asyncio.gather(
            *(write_until_blocked(writer, request * 500, most_bytes, 1.0) for _, writer in opened)
        )
        assert max(taken) < most_bytes, "the gateway stops reading"


async def test_names_of_megabytes_cost_little_and_are_not_repeated(
    keyed: Keyed, scaled: Callable[[int, int], int]
) -> None:
    target, key = keyed
    body = b'{"model": "%b", "messages": []}' % (b"a" * scaled(4, 60) * MEBIBYTE)
    request = CHAT_HEAD + b"Authorization: Bearer %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (
        key.encode(),
        len(body),
    )
    async with target.bounded(5 * len(body) + 64 * MEBIBYTE):
        responses = await asyncio.gather(*(target.send(request + body) for _ in range(3)))
    assert all(response.startswith(b"HTTP/1.1 4") and len(response) < 4096 for response in responses)


async def test_connects_and_resets_leave_nothing_behind(keyed: Keyed, scaled: Callable[[int, int], int]) -> None:
    target, key = keyed
    chat = b'{"model": "a", "messages": [{"role": "user", "content": "x"}], "stream": true}'
    request = CHAT_HEAD + b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n" % (key.encode(), len(chat)) + chat
    async with target.bounded(64 * MEBIBYTE):
        for _ in range(scaled(5, 100)):
            async with target.connections(20) as opened:
                for number, (_, writer) in enumerate(opened):
                    writer.write(request[: len(request) * number // 19])
                await asyncio.sleep(0.01)


async def test_what_is_not_tls_delays_no_tls_client(
    spawn: SpawnGateway, authority: Authority, tmp_path: Path, scaled: Callable[[int, int], int]
) -> None:
    issued = authority.issue("flooded")
    started = await spawn(extra=f'tls_cert = "{issued.cert}"\ntls_key = "{issued.key}"\n[limits]\nhead_timeout_s = 60')
    target = Target(started.port, started.process.pid, started.log_file)
    noise = random.Random(7)
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    async with target.connections(scaled(100, 900)) as opened:
        for number, (_, writer) in enumerate(opened):
            writer.write((b"", b"GET / HTTP/1.1\r\n\r\n", hello + noise.randbytes(200), hello)[number % 4])
        async with asyncio.timeout(WAIT_S):
            trust = ssl.create_default_context(cafile=authority.own.cert)
            reader, writer = await asyncio.open_connection("localhost", target.port, ssl=trust)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
    assert "Traceback" not in target.log.read_text()
