"""Transfers to other nodes: files of models, and KV blocks. Files are read on threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import msgspec

from cortex.http.server.exchange import ClientPace, Exchange
from cortex.http.server.server import Response
from cortex.neuron.api import responses
from cortex.neuron.api.calls import ApiCall, Route
from cortex.neuron.engine.host_pages.block_files import Piece
from cortex.neuron.engine.host_pages.store import ChosenBlocks
from cortex.neuron.node.node import Node
from cortex.wire.errors import InvalidValue, ModelNotFound
from cortex.wire.fields.body import decode
from cortex.wire.node.kv_blocks import PAGES, BlocksRequest
from cortex.wire.node.kv_blocks import PATH as BLOCKS_PATH
from cortex.wire.node.neighbours import PATH as FILES_PATH
from cortex.wire.node.orders import ForgetBlocksRequest, ForgottenBlocks

_CHUNK_BYTES: Final = 1 << 20
_BLOCK_CHUNK_BYTES: Final = 8 << 20
QUIET_S: Final = 5.0
_MAX_BLOCK_TRANSFERS: Final = 4
"""At once; others wait."""
_OCTETS: Final = ((b"content-type", b"application/octet-stream"),)


class SharedFiles:
    """Files of models, at the rate that `limits.share_mb_per_s` leaves them. Belongs to the daemon's loop.

    Only complete files of this node's models are sent, by their digest: no request names a path.
    """

    def __init__(self, backend: Node, mb_per_s: int | None, quiet_s: float = QUIET_S) -> None:
        """`quiet_s`: how long a client that waits for a listing gets nothing."""
        self._backend = backend
        self._quiet_s = quiet_s
        self._mb_per_s = mb_per_s
        self._free_s = 0.0
        """When the next chunk of any transfer may be sent."""

    def routes(self) -> list[Route]:
        repository = f"{FILES_PATH}{{repository:[^/]+/[^/]+}}"
        return [Route("GET", repository, self.list), Route("GET", f"{repository}/{{digest}}", self.send)]

    async def list(self, call: ApiCall) -> Response | None:
        """Files at a path are read for their digests first: meanwhile spaces, which JSON may begin with, keep the
        client waiting."""
        self._check_shares()
        shared = self._backend.files.shared(call.values["repository"], call.query("revision") or "main")
        listing = asyncio.create_task(shared)
        try:
            done, _ = await asyncio.wait({listing}, timeout=self._quiet_s)
            if done:
                return responses.json(await listing)
            call.exchange.start(200, ((b"content-type", b"application/json"),))
            while not listing.done():
                call.exchange.write(b" ")
                await asyncio.wait({listing}, timeout=self._quiet_s)
            call.exchange.write(msgspec.json.encode(await listing))
            call.exchange.finish()
            return None
        finally:
            listing.cancel()

    async def send(self, call: ApiCall) -> None:
        self._check_shares()
        offset = call.query("offset") or "0"
        with self._backend.files.shared_file(call.values["repository"], call.values["digest"]) as descriptor:
            num_bytes = os.fstat(descriptor).st_size
            if not (offset.isascii() and offset.isdigit() and int(offset) <= num_bytes):
                raise InvalidValue(f"Invalid value for 'offset': the file has {num_bytes} bytes.", param="offset")
            await self._send(call.exchange, descriptor, int(offset), num_bytes)

    def _check_shares(self) -> None:
        if self._mb_per_s == 0:
            raise ModelNotFound("this node sends no files to others: its `limits.share_mb_per_s` is 0")

    async def _send(self, exchange: Exchange, descriptor: int, position: int, num_bytes: int) -> None:
        """If the file shrinks meanwhile, the connection ends, which the client notices."""
        client = ClientPace(exchange)
        exchange.start(200, _OCTETS, num_bytes - position)
        async with aclosing(file_chunks(descriptor, position, num_bytes, _CHUNK_BYTES)) as chunks:
            async for chunk in chunks:
                await self._turn(len(chunk))
                exchange.write(chunk)
                await client.has_room()
        exchange.finish()

    async def _turn(self, num_bytes: int) -> None:
        """Returns when the node may send that many bytes."""
        if self._mb_per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(now_s, self._free_s)
        wait_s = self._free_s - now_s
        self._free_s += num_bytes / (self._mb_per_s * 1e6)
        await asyncio.sleep(wait_s)


class KvBlocks:
    """`POST /kv/blocks` sends KV blocks to a node that continues a conversation that was computed here; `POST
    /kv/forget` deletes them. Belongs to the daemon's loop."""

    def __init__(self, backend: Node) -> None:
        self._backend = backend
        self._turns = asyncio.Semaphore(_MAX_BLOCK_TRANSFERS)

    def routes(self) -> list[Route]:
        return [Route("POST", BLOCKS_PATH, self.send), Route("POST", "/kv/forget", self.forget)]

    async def forget(self, call: ApiCall) -> Response:
        order = decode(call.request.body, ForgetBlocksRequest)
        chosen = ChosenBlocks(order.model_id, tuple(each.encode() for each in order.tenants))
        num_files, num_bytes = await self._backend.kv.forget(chosen, order.unused_s)
        return responses.json(ForgottenBlocks(num_files, num_bytes))

    async def send(self, call: ApiCall) -> None:
        wanted = decode(call.request.body, BlocksRequest)
        async with self._turns:
            found = await self._backend.kv.offered(wanted)
            exchange = call.exchange
            client = ClientPace(exchange)
            headers = (*_OCTETS, (PAGES.encode(), b"%d" % found.num_pages))
            exchange.start(200, headers, found.num_bytes)
            for piece in found.pieces:
                await self._send(piece, exchange, client)
            exchange.finish()

    async def _send(self, piece: Piece, exchange: Exchange, client: ClientPace) -> None:
        if piece.path is None:
            exchange.write(piece.data)
            return
        descriptor = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            end = piece.first_byte + piece.num_bytes
            async with aclosing(file_chunks(descriptor, piece.first_byte, end, _BLOCK_CHUNK_BYTES)) as chunks:
                async for chunk in chunks:
                    exchange.write(chunk)
                    await client.has_room()
        finally:
            os.close(descriptor)


async def file_chunks(descriptor: int, start: int, end: int, chunk_bytes: int) -> AsyncGenerator[bytes, None]:
    """The bytes of a file from `start` to `end`, fewer if it has shrunk. The next chunk is read on a thread while the
    caller uses one. The descriptor may be closed once this generator is."""
    loop = asyncio.get_running_loop()

    def begin(position: int) -> asyncio.Future[bytes]:
        return loop.run_in_executor(None, os.pread, descriptor, max(0, min(chunk_bytes, end - position)), position)

    reading = begin(start)
    try:
        while chunk := await asyncio.shield(reading):
            start += len(chunk)
            reading = begin(start)
            yield chunk
    finally:
        await asyncio.wait({reading})
        reading.exception()
