"""KV blocks of this node: `POST /kv/blocks` sends them to another node of the fleet, which continues a conversation
that was computed here, and `POST /kv/forget` deletes them."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from typing import Final

from cortex.http.server.exchange import ClientPace, Exchange
from cortex.http.server.server import Response
from cortex.neuron.api import responses
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.bodies import decode
from cortex.neuron.api.calls import ApiCall, Route
from cortex.neuron.api.file_chunks import file_chunks
from cortex.neuron.engine.host_pages.block_files import Piece
from cortex.neuron.engine.host_pages.store import ChosenBlocks
from cortex.wire.node.kv_blocks import PAGES, PATH, BlocksRequest
from cortex.wire.node.orders import ForgetBlocksRequest, ForgottenBlocks

_CHUNK_BYTES: Final = 8 << 20
_MAX_TRANSFERS: Final = 4
"""At once; others wait."""


class KvBlocks:
    """Belongs to the daemon's loop. Files are read on threads."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._turns = asyncio.Semaphore(_MAX_TRANSFERS)

    def routes(self) -> list[Route]:
        return [Route("POST", PATH, self.send), Route("POST", "/kv/forget", self.forget)]

    async def forget(self, call: ApiCall) -> Response:
        order = decode(call.request.body, ForgetBlocksRequest)
        chosen = ChosenBlocks(order.model_id, tuple(each.encode() for each in order.tenants))
        num_files, num_bytes = await self._backend.kv.forget(chosen, order.unused_s)
        return responses.json(ForgottenBlocks(num_files, num_bytes))

    async def send(self, call: ApiCall) -> None:
        wanted = decode(call.request.body, BlocksRequest)
        async with self._turns:
            found = await self._backend.kv.offered(wanted.model, wanted.digests)
            exchange = call.exchange
            client = ClientPace(exchange)
            headers = ((b"content-type", b"application/octet-stream"), (PAGES.encode(), b"%d" % found.num_pages))
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
            async with aclosing(file_chunks(descriptor, piece.first_byte, end, _CHUNK_BYTES)) as chunks:
                async for chunk in chunks:
                    exchange.write(chunk)
                    await client.has_room()
        finally:
            os.close(descriptor)
