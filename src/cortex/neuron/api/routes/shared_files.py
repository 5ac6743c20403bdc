"""Files of models for other nodes of the fleet, at the rate that `limits.share_mb_per_s` leaves them.

Only complete files of repositories in the hub cache are sent, by their digest: no request names a path.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from typing import Final

from cortex.http.server.exchange import ClientPace, Exchange
from cortex.http.server.server import Response
from cortex.neuron.api import responses
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.calls import ApiCall, Route
from cortex.neuron.api.file_chunks import file_chunks
from cortex.wire.errors import InvalidValue, ModelNotFound
from cortex.wire.node.neighbours import PATH

_CHUNK_BYTES: Final = 1 << 20
_OCTETS: Final = ((b"content-type", b"application/octet-stream"),)


class SharedFiles:
    """Belongs to the daemon's loop. Files are read on threads."""

    def __init__(self, backend: Backend, mb_per_s: int | None) -> None:
        self._backend = backend
        self._mb_per_s = mb_per_s
        self._free_s = 0.0
        """When the next chunk of any transfer may be sent."""

    def routes(self) -> list[Route]:
        repository = f"{PATH}(?P<repository>[^/]+/[^/]+)"
        return [Route("GET", repository, self.list), Route("GET", f"{repository}/(?P<digest>[^/]+)", self.send)]

    async def list(self, call: ApiCall) -> Response:
        self._check_shares()
        return responses.json(
            await self._backend.files.shared(call.values["repository"], call.query("revision") or "main")
        )

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
        """A file that shrinks meanwhile ends the connection, which the client notices."""
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
