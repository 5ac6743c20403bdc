"""A server behind the gateway that never stops sending: every buffer that it can fill is bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.gateway.config import ResponsesSection
from cortex.gateway.ledger.keys import generate
from cortex.gateway.proxy.routes import OPAQUE, ROUTES
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB, opened_gate
from ..waiting import WAIT_S, at_rest, until
from .target import MEBIBYTE

MAX_SENT_BYTES = 256 * MEBIBYTE
"""Far less than an endless response on a busy machine: what sockets and loops hold while a gateway decides."""

if TYPE_CHECKING:
    from ..gateway.fake_neuron import FakeNeuron, StartNeuron
    from ..gateway.started_gateway import Client, StartGateway

MODELS = b'{"data": [{"id": "a"}]}'
OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"content-type: application/json\r\n"
EVENTS = b"content-type: text/event-stream\r\n"
FAILED = b"HTTP/1.1 500 Internal Server Error\r\n" + JSON
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
TEXT = b"x" * (64 << 10)
MESSAGE = [{"role": "user", "content": "hi"}]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def delta(text: bytes) -> bytes:
    return chunk(b'data: {"choices": [{"index": 0, "delta": {"content": "%b"}}]}\n\n' % text)


@dataclass
class EndlessServer:
    """A foreign server that responds to inference with `head`, and then with `rest` for ever."""

    head: bytes = b""
    rest: bytes = TEXT
    listing: bytes | None = None
    """Sent for ever in place of the list of models."""
    gate: asyncio.Event = field(default_factory=opened_gate)
    """It responds once this is set."""
    name: str = "endless"
    endpoint: str = ""
    num_sent_bytes: int = 0
    num_requests: int = 0
    num_ended: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        writer.transport.set_write_buffer_limits(high=0)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    if self.listing is None:
                        writer.write(OK + JSON + b"content-length: %d\r\n\r\n" % len(MODELS) + MODELS)
                        continue
                    await self._send(writer, OK + JSON + CHUNKED, self.listing)
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.split(b":")[1]))
                self.num_requests += 1
                await self.gate.wait()
                await self._send(writer, self.head, self.rest)
        self.num_ended += 1

    async def _send(self, writer: asyncio.StreamWriter, head: bytes, rest: bytes) -> None:
        writer.write(head)
        while True:
            writer.write(rest)
            await writer.drain()
            self.num_sent_bytes += len(rest)

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def running(server: EndlessServer) -> AsyncIterator[None]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.endpoint = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield
    finally:
        server.close()
        listening.close()


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        pytest.param(OK + JSON + CHUNKED + chunk(b'{"choices": "'), chunk(TEXT), id="whole body"),
        pytest.param(OK + JSON + b"\r\n", TEXT, id="whole body without a length"),
        pytest.param(FAILED + CHUNKED, chunk(TEXT), id="error"),
        pytest.param(b"HTTP/1.1 200 " + TEXT, TEXT, id="status line"),
        pytest.param(OK + b"x-long: ", TEXT, id="header"),
        pytest.param(OK, b"x-header: 1\r\n" * 1000, id="headers"),
        pytest.param(b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 1000, id="interim heads"),
        pytest.param(OK + JSON + CHUNKED + chunk(b"{}") + b"0\r\nx-trailer: ", TEXT, id="trailer"),
        pytest.param(OK + JSON + CHUNKED + chunk(b"{}") + b"1;x=", TEXT, id="chunk extension"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_endless_whole_responses_are_cut_off_with_502(
    start_gateway: StartGateway, path: str, head: bytes, rest: bytes
) -> None:
    server = EndlessServer(head, rest)
    async with running(server):
        client = await start_gateway(foreign=(server,))
        body: dict[str, Any] = {"model": "a", "max_tokens": 9, "messages": MESSAGE, "input": "hi"}
        status, found = await client.post(path, body)
        assert status == 502, found
        assert found["error"]["message"]
        await until(lambda: server.num_ended >= server.num_requests)
        assert server.num_sent_bytes < MAX_SENT_BYTES


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        pytest.param(OK + EVENTS + CHUNKED + chunk(b"data: "), chunk(TEXT), id="event"),
        pytest.param(OK + EVENTS + CHUNKED, delta(TEXT), id="text"),
        pytest.param(OK + EVENTS + CHUNKED + delta(b"hi"), chunk(b": " + TEXT), id="comment after an event"),
        pytest.param(OK + EVENTS + CHUNKED + delta(b"hi") + b"0\r\nx-trailer: ", TEXT, id="trailer"),
    ],
)
async def test_endless_streams_that_are_translated_end_with_an_error(
    start_gateway: StartGateway, head: bytes, rest: bytes
) -> None:
    server = EndlessServer(head, rest)
    async with running(server):
        client = await start_gateway(foreign=(server,))
        body = msgspec.json.encode({"model": "a", "input": "hi", "stream": True})
        async with asyncio.timeout(WAIT_S), client.session.post(client.url + "/v1/responses", data=body) as response:
            content = await response.read()
        assert response.status == 502 or b"event: error" in content or b"response.failed" in content[-2000:]
        await until(lambda: server.num_ended == server.num_requests)
        assert server.num_sent_bytes < MAX_SENT_BYTES


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        pytest.param(OK + EVENTS + CHUNKED + chunk(b"data: "), chunk(TEXT), id="event"),
        pytest.param(OK + EVENTS + CHUNKED + delta(b"hi"), chunk(b": " + TEXT), id="usage comment"),
        pytest.param(OK + JSON + CHUNKED, chunk(TEXT), id="whole body"),
    ],
)
async def test_what_passes_unread_is_held_back_by_a_client_that_does_not_read(
    start_gateway: StartGateway, head: bytes, rest: bytes
) -> None:
    server = EndlessServer(head, rest)
    async with running(server):
        client = await start_gateway(foreign=(server,))
        body = msgspec.json.encode({"model": "a", "messages": MESSAGE, "stream": b"event-stream" in head})
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port, limit=1)
        head_sent = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head_sent + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: server.num_sent_bytes)
        assert await at_rest(lambda: server.num_sent_bytes) < 32 * MEBIBYTE
        writer.transport.abort()
        await until(lambda: server.num_ended == server.num_requests)
        del reader


CHAT = {"messages": MESSAGE, "max_tokens": 9}
RERANK = {"query": "hi", "documents": ["hi"], "texts": ["hi"]}
FIELDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/compact": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/embed": {"inputs": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "hi"},
    "/score": {"text_1": "hi", "text_2": "hi"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/api/generate": {"prompt": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/rerank": RERANK,
}
"""What a request for a path needs; the others get a conversation."""
EVERY_PATH = (*(path.decode() for path in (*ROUTES, *OPAQUE)), "/upstream/a/v1/other")


@pytest.mark.parametrize("stream", [False, True])
async def test_no_route_holds_an_endless_response(start_gateway: StartGateway, stream: bool) -> None:
    """It is cut off, or held back by a client that does not read."""
    head = OK + (EVENTS if stream else JSON) + CHUNKED
    server = EndlessServer(head, delta(TEXT) if stream else chunk(TEXT))
    reached = set()
    async with running(server), asyncio.timeout(WAIT_S):
        client = await start_gateway(foreign=(server,))
        for path in EVERY_PATH:
            body = msgspec.json.encode({"model": "a", **FIELDS.get(path, CHAT), **({"stream": True} if stream else {})})
            num_before, num_requests = server.num_sent_bytes, server.num_requests
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port, limit=1)
            start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(start.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            status = int((await reader.readexactly(12))[9:])
            num_after = await at_rest(lambda: server.num_sent_bytes, for_s=0.1)
            assert num_after - num_before < MAX_SENT_BYTES, path
            writer.transport.abort()
            await until(lambda: server.num_ended == server.num_requests)
            if server.num_requests > num_requests:
                reached.add(path)
            else:
                assert status in (400, 405), path
    unsent = {"/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize", "/apply-template"}
    assert set(EVERY_PATH) - reached <= unsent | {"/infill", "/v1/audio/voices", "/v1/responses/compact"}


async def test_an_endless_error_is_not_read_to_its_end_for_a_key(start_gateway: StartGateway) -> None:
    server, key = EndlessServer(FAILED + CHUNKED, chunk(TEXT)), generate("user")
    async with running(server):
        client = await start_gateway(foreign=(server,), keys=(key.section,))
        body = {"model": "a", "messages": MESSAGE}
        status, found = await client.post("/v1/chat/completions", body, authorization=f"Bearer {key.text}")
        assert status == 502, found
        assert server.num_sent_bytes < 32 * MEBIBYTE


async def test_an_endless_error_after_a_keepalive_ends_the_stream(start_gateway: StartGateway) -> None:
    server = EndlessServer(FAILED + CHUNKED, chunk(TEXT), gate=asyncio.Event())
    async with running(server):
        client = await start_gateway(foreign=(server,), keepalive_s=0.1)
        body = {"model": "a", "messages": MESSAGE, "stream": True}
        async with client.session.post(client.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200, "a keepalive has started the stream"
            server.gate.set()
            assert b'"error"' in await response.read()
        await until(lambda: server.num_ended == server.num_requests)
        assert server.num_sent_bytes < 32 * MEBIBYTE


async def test_an_endless_list_of_models_is_cut_off(start_gateway: StartGateway) -> None:
    server = EndlessServer(listing=chunk(TEXT))
    async with running(server):
        client = await start_gateway(foreign=(server,))
        await until(lambda: server.num_ended)
        assert server.num_sent_bytes < MAX_SENT_BYTES * (1 + server.num_ended)
        assert (await client.get("/health"))[0] == 200


async def endless_error(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    del node, body
    response = web.StreamResponse(status=500)
    await response.prepare(request)
    while True:
        await response.write(TEXT)


async def test_an_endless_error_ends_a_response_in_the_background(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    ready = {"a": ModelState.READY}
    beast = await neurons("beast", sizes={"a": GB}, states=ready, respond=endless_error)
    client: Client = await start_gateway(beast, responses=ResponsesSection())
    status, found = await client.post("/v1/responses", {"model": "a", "input": "hi", "background": True})
    assert status == 200, found
    path = f"/v1/responses/{found['id']}"
    found = await client.get_until(path, lambda found: found["status"] not in ("queued", "in_progress"))
    assert found["status"] == "failed"
