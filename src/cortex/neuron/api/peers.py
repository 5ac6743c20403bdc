"""Connections between nodes that share a model: on the node's own port, with its key and certificate.

A lead asks for `Upgrade: cortex-share-3`. After the response 101, both ends send frames: a length of four bytes, then
that many bytes. An empty frame is a ping: an end that hears nothing for a while takes its peer for lost.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from cortex.http.head import encode_head
from cortex.http.tls import client_context
from cortex.neuron.api.calls import ApiCall
from cortex.neuron.config import PeerEntry
from cortex.neuron.node.spanning.protocol import PeerRejected, PeerUnreachable
from cortex.settings import SettingsError
from cortex.system.tasks import run_once
from cortex.wire.errors import CrossSiteRequest, MalformedHTTP

SHARES_PATH = "/shares"
PROTOCOL = b"cortex-share-3"
"""The number changes with all that the nodes of a model send each other, also between their workers."""
PING_S = 15.0
SILENCE_S = 2.5 * PING_S
CONNECT_S = 30.0
"""How long a peer may take to accept a connection and respond: a host that is frozen accepts and never responds."""
_MAX_MESSAGE_BYTES = 1 << 20
_LENGTH_BYTES = 4
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_OTHER_VERSION = "it is no neuron, or of a version that shares models differently; check `endpoint` of the peer"
_STATUS_REASONS = {
    400: _OTHER_VERSION,
    401: "it does not accept the key; set `key_env` of the peer to a variable with one of its keys",
    403: "it does not accept this node; see its log",
    404: _OTHER_VERSION,
}


class FramedConnection:
    """One end of a connection, whose streams it owns."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.local_host: str = writer.get_extra_info("sockname")[0]
        self._pinging = run_once(self._ping(), "ping a node that shares a model")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Messages until the connection ends, or the peer is silent or sends what is too long."""
        try:
            while not self._writer.is_closing():
                async with asyncio.timeout(SILENCE_S):
                    num_bytes = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
                    if num_bytes > _MAX_MESSAGE_BYTES:
                        break
                    message = await self._reader.readexactly(num_bytes)
                if message:
                    yield message
        except (OSError, EOFError):  # a timeout too
            pass
        await self.close()

    async def send(self, message: bytes) -> None:
        await self._send(message)

    async def close(self) -> None:
        self._pinging.cancel()
        self._writer.close()

    async def _send(self, message: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
            try:
                await self._writer.drain()
            except OSError:
                await self.close()

    async def _ping(self) -> None:
        while not self._writer.is_closing():
            await asyncio.sleep(PING_S)
            await self._send(b"")


def accepted(call: ApiCall) -> FramedConnection:
    """The end of the node that holds a part. Raises CrossSiteRequest for a browser: no web page shares a model."""
    request = call.request
    if request.header(b"origin") is not None:
        raise CrossSiteRequest("Only nodes connect here, not web pages.")
    if (request.header(b"upgrade") or b"").lower() != PROTOCOL:
        raise MalformedHTTP(f"Only nodes that share models connect here, with `Upgrade: {PROTOCOL.decode()}`.")
    return FramedConnection(*call.exchange.upgrade(PROTOCOL, _MAX_MESSAGE_BYTES))


class PeerConnector:
    """Connects to peers. Relative paths of their certificates start at `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def connect(self, peer: PeerEntry) -> FramedConnection:
        """The end of the node that leads the model. Raises PeerUnreachable or PeerRejected."""
        headers = [(b"upgrade", PROTOCOL)]
        if peer.key_env is not None:
            key = os.environ.get(peer.key_env, "").strip()
            if not key:
                raise PeerRejected(f"node {peer.name}: the variable {peer.key_env} is not set; it holds the key")
            headers.append((b"authorization", f"Bearer {key}".encode()))
        url = urlsplit(peer.endpoint.rstrip("/") + SHARES_PATH)
        is_secure = url.scheme == "https"
        head = encode_head(
            f"GET {url.path} HTTP/1.1".encode(), headers, f"host: {url.netloc}\r\nconnection: upgrade\r\n".encode()
        )
        writer: asyncio.StreamWriter | None = None
        try:
            ca_file = self._directory / peer.ca_file.expanduser() if peer.ca_file is not None else None
            tls = client_context(ca_file) if is_secure else None
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    url.hostname, url.port or (443 if is_secure else 80), ssl=tls, limit=_MAX_MESSAGE_BYTES
                )
                writer.write(head)
                response = _STATUS.match(await reader.readuntil(b"\r\n\r\n"))
            status = int(response[1]) if response else 0
            if status in _STATUS_REASONS:
                raise PeerRejected(f"node {peer.name} at {peer.endpoint}: {_STATUS_REASONS[status]}")
            if status != 101:
                raise PeerUnreachable(f"{peer.endpoint}: it responded with status {status}")
            return FramedConnection(reader, writer)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, SettingsError):
                raise PeerRejected(f"node {peer.name}: {error}") from error
            if isinstance(error, OSError | EOFError | asyncio.LimitOverrunError):  # a timeout too
                raise PeerUnreachable(f"{peer.endpoint}: {str(error) or type(error).__name__}") from error
            raise
