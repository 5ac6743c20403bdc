"""Bytes that are nearly HTTP, against both programs: each gets a proper rejection or a closed connection."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from ..waiting import WAIT_S

if TYPE_CHECKING:
    from ..gateway.started_gateway import StartGateway
    from ..neuron.api.conftest import Api


VALID = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 29\r\n"
    b'\r\n{"model":"a","messages":[]}  ',
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"POST /models/load HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
)
PIECES: tuple[bytes, ...] = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"HTTP/1.1",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"Content-Length: 5\r\n",
)
PIECES += (b"Transfer-Encoding: chunked\r\n", b"-1", b"99999999999999999999", b"\xff\xfe", b"x" * 9000, b"Host: b\r\n")
STATUS = re.compile(rb"HTTP/\d\.\d ([1-4]\d\d|501|505) ")
PATIENCE_S = 0.3
"""How long to wait for the response to a request that may not be complete."""
VERSIONS = (
    b"GET /health HTTP/2.0",
    b"GET /health HTTP/0.9",
    b"GET /health HTTP/3.7",
    b"GET /health",
    b"GET /health HTTP/1",
)
NOT_TEXT = (
    b"GET /\xff%ff HTTP/1.1",
    b"POST /models/load HTTP/1.1\r\nOrigin: \xff.b",
    b"POST /models/load HTTP/1.1\r\nContent-Type: \xff",
    b"GET /models HTTP/1.1\r\nAuthorization: Bearer \xff",
    b"G\xffT / HTTP/1.1",
    b"GET / HTTP/1.1\r\nx-request-id: \xff",
)


def mutated(seed: int, count: int) -> Iterator[bytes]:
    """Valid requests with random pieces inserted, removed and repeated. The same for the same seed."""
    chance = random.Random(seed)
    for _ in range(count):
        request = bytearray(chance.choice(VALID))
        for _ in range(chance.randint(1, 4)):
            at, length = chance.randrange(len(request) + 1), chance.randrange(1, 20)
            match chance.randrange(4):
                case 0:
                    request[at:at] = chance.choice(PIECES)
                case 1:
                    del request[at : at + length]
                case 2:
                    request[at:at] = request[at : at + length]
                case _:
                    request[at : at + 1] = chance.randbytes(1)
        yield bytes(request)


async def exchange(port: int, sent: bytes, patience_s: float = PATIENCE_S) -> bytes:
    """The beginning of the response to `sent`; empty when there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        async with asyncio.timeout(patience_s):
            return await reader.read(4096)
    except (ConnectionError, TimeoutError):
        return b""
    finally:
        writer.transport.abort()


async def attack(port: int, requests: list[bytes]) -> None:
    for start in range(0, len(requests), 20):
        batch = requests[start : start + 20]
        for sent, response in zip(batch, await asyncio.gather(*(exchange(port, each) for each in batch)), strict=True):
            assert not response or STATUS.match(response), (sent, response[:300])


@pytest.fixture
async def ports(start_gateway: StartGateway, api: Api) -> dict[str, int]:
    """The port of each program, by its name."""
    return {"gateway": (await start_gateway(max_body_mb=1)).port, "neuron": int(api.url.rpartition(":")[2])}


@pytest.mark.parametrize("program", ["gateway", "neuron"])
async def test_survives_mutated_requests(
    ports: dict[str, int], caplog: pytest.LogCaptureFixture, scaled: Callable[[int, int], int], program: str
) -> None:
    await attack(ports[program], list(mutated(1, scaled(200, 10_000))))
    response = await exchange(ports[program], VALID[1], WAIT_S)
    assert response.startswith(b"HTTP/1.1 200 ")
    assert not [record for record in caplog.records if record.exc_info], "no tracebacks for what clients send"


@pytest.mark.parametrize("program", ["gateway", "neuron"])
async def test_rejects_other_versions_and_bytes_that_are_not_text(
    ports: dict[str, int], caplog: pytest.LogCaptureFixture, program: str
) -> None:
    for line in VERSIONS:
        response = await exchange(ports[program], line + b"\r\nHost: localhost\r\n\r\n", WAIT_S)
        assert b" 400 " in response.partition(b"\r\n")[0], (line, response[:200])
    for line in NOT_TEXT:
        response = await exchange(ports[program], line + b"\r\nHost: localhost\r\n\r\n", WAIT_S)
        assert STATUS.match(response), (line, response[:200])
    assert not [record for record in caplog.records if record.exc_info]
