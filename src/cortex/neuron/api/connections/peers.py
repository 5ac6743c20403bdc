"""Connections between nodes that share a model: WebSockets on the node's own port, with its key and certificate.

Pings find a peer that is gone without a word.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import WSMsgType, web

from cortex.neuron.config import PeerEntry
from cortex.neuron.node.spanning.protocol import PeerRejected, PeerUnreachable
from cortex.settings import SettingsError
from cortex.tls import client_context
from cortex.wire.errors import CrossSiteRequest

SHARES_PATH = "/shares"
PING_S = 15.0
CONNECT_S = 10.0
"""For a peer to accept a connection, its response included: a host that is frozen accepts and never responds."""
_MAX_MESSAGE_BYTES = 1 << 20
_STATUS_REASONS = {
    401: "it does not accept the key; set `key_env` of the peer to a variable with one of its keys",
    403: "it does not accept this node; see its log",
    404: "it is no neuron, or of a version that shares no models; check `endpoint` of the peer",
}


class AcceptedConnection:
    """The end of the node that holds a part."""

    def __init__(self, response: web.WebSocketResponse, local_host: str) -> None:
        self.response = response
        self.local_host = local_host

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _messages(self.response)

    async def send(self, message: bytes) -> None:
        await _send(self.response, message)

    async def close(self) -> None:
        await self.response.close()


class PeerConnection:
    """The end of the node that leads the model."""

    def __init__(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Raises ConnectionResetError if the connection has ended."""
        self._session = session
        self._socket = socket
        address = socket.get_extra_info("sockname")
        if address is None:
            raise ConnectionResetError("it ended the connection at once")
        self.local_host: str = address[0]

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _messages(self._socket)

    async def send(self, message: bytes) -> None:
        await _send(self._socket, message)

    async def close(self) -> None:
        await self._socket.close()
        await self._session.close()


async def accepted(request: web.Request) -> AcceptedConnection:
    """Raises CrossSiteRequest for a browser: no web page shares a model."""
    if "origin" in request.headers:
        raise CrossSiteRequest("Only nodes connect here, not web pages.")
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the lead disconnected")
    local_host: str = transport.get_extra_info("sockname")[0]
    response = web.WebSocketResponse(heartbeat=PING_S, max_msg_size=_MAX_MESSAGE_BYTES)
    await response.prepare(request)
    return AcceptedConnection(response, local_host)


class PeerConnector:
    """Connects to peers. Relative paths of their certificates start at `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def connect(self, peer: PeerEntry) -> PeerConnection:
        """Raises PeerUnreachable or PeerRejected."""
        headers = {}
        if peer.key_env is not None:
            key = os.environ.get(peer.key_env, "").strip()
            if not key:
                raise PeerRejected(f"node {peer.name}: the variable {peer.key_env} is not set; it holds the key")
            headers["authorization"] = f"Bearer {key}"
        url = peer.endpoint.rstrip("/") + SHARES_PATH
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            ca_file = self._directory / peer.ca_file.expanduser() if peer.ca_file is not None else None
            async with asyncio.timeout(CONNECT_S):
                socket = await session.ws_connect(
                    url,
                    headers=headers,
                    ssl=client_context(ca_file) if url.startswith("https") else True,
                    heartbeat=PING_S,
                    max_msg_size=_MAX_MESSAGE_BYTES,
                )
            return PeerConnection(session, socket)
        except BaseException as error:
            await session.close()
            if isinstance(error, SettingsError):
                raise PeerRejected(f"node {peer.name}: {error}") from error
            if isinstance(error, aiohttp.WSServerHandshakeError) and error.status in _STATUS_REASONS:
                raise PeerRejected(f"node {peer.name} at {peer.endpoint}: {_STATUS_REASONS[error.status]}") from error
            if isinstance(error, aiohttp.ClientError | OSError | TimeoutError):
                raise PeerUnreachable(f"{peer.endpoint}: {str(error) or type(error).__name__}") from error
            raise


async def _messages(socket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse) -> AsyncIterator[bytes]:
    while (message := await socket.receive()).type is WSMsgType.BINARY:
        yield message.data


async def _send(socket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse, message: bytes) -> None:
    if not socket.closed:
        try:
            await socket.send_bytes(message)
        except (ConnectionError, aiohttp.ClientError):
            await socket.close()
