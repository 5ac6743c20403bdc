"""Clients that connect while a listening socket is being closed."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import Any

import pytest

from cortex.http.limits import ClientLimits
from cortex.http.server.listener import hold_arrivals, listen
from cortex.http.server.server import Server
from cortex.http.ticker import Ticker

from ...waiting import WAIT_S
from ..conftest import reject
from .echo import GET, echo


def connecting(port: int) -> socket.socket:
    """A client whose first packet is sent."""
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", port))
    return client


class ClosedLate(socket.socket):
    """A listening socket to which clients connect after the last `accept`, and which has a successor then."""

    clients: tuple[socket.socket, ...] = ()
    successor: socket.socket

    def close(self) -> None:
        if not self.clients:
            port = self.getsockname()[1]
            self.clients = tuple(connecting(port) for _ in range(3))
            (self.successor,) = listen("127.0.0.1", port, shares_port=True)
        super().close()


def is_held_here() -> bool:
    (listening,) = listen("127.0.0.1", 0)
    hold_arrivals(listening)
    with listening, connecting(listening.getsockname()[1]):
        return not select.select([listening], [], [], 0.1)[0]


async def test_client_that_connects_during_the_close_reaches_the_successor() -> None:
    if not is_held_here():
        pytest.skip("this platform has no filters for sockets")
    server = Server(echo, reject, Ticker(asyncio.get_running_loop()))
    (bound,) = listen("127.0.0.1", 0, shares_port=True)
    listening = ClosedLate(fileno=bound.detach())
    server.listen_on([listening])
    await server.close(grace_s=WAIT_S)
    server.listen_on([listening.successor])
    async with asyncio.timeout(WAIT_S):
        for client in listening.clients:
            loop = asyncio.get_running_loop()
            connected = asyncio.Event()
            loop.add_writer(client, connected.set)
            await connected.wait()
            loop.remove_writer(client)
            reader, writer = await asyncio.open_connection(sock=client)
            writer.write(GET)
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()
    await server.close()


async def test_client_that_has_connected_is_accepted_after_others_are_held() -> None:
    (listening,) = listen("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()[:2], WAIT_S) as client:
        hold_arrivals(listening)
        accepted, _ = listening.accept()
        with accepted:
            client.sendall(b"request")
            accepted.settimeout(WAIT_S)
            assert accepted.recv(100) == b"request"
            accepted.sendall(b"response")
            assert client.recv(100) == b"response"


class SlowHandshake(socket.socket):
    """A listening socket that a client is still connecting to when further ones are held."""

    is_held = False
    num_attempts = 0

    def setsockopt(self, *option: Any) -> None:
        self.is_held = True
        super().setsockopt(*option)

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_attempts += self.is_held
        if self.num_attempts < 2:
            raise BlockingIOError
        return super().accept()


async def test_client_whose_handshake_ends_after_the_stop_is_served() -> None:
    if not is_held_here():
        pytest.skip("this platform has no filters for sockets")
    server = Server(echo, reject, Ticker(asyncio.get_running_loop()), ClientLimits(handshake_s=0.5))
    (bound,) = listen("127.0.0.1", 0)
    listening = SlowHandshake(fileno=bound.detach())
    server.listen_on([listening])
    reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
    stopping = asyncio.create_task(server.stop_accepting(WAIT_S))
    writer.write(GET)
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    await stopping
    await server.close()


async def test_request_on_an_idle_connection_during_the_stop_is_served_and_told_to_be_the_last() -> None:
    limits = ClientLimits(handshake_s=0, last_request_s=WAIT_S)
    server = Server(echo, reject, Ticker(asyncio.get_running_loop()), limits)
    reader, writer = await asyncio.open_connection(*await server.listen("127.0.0.1", 0))
    writer.write(GET)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"connection: close" not in head
    await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))

    async def stop() -> None:
        await server.stop_accepting(WAIT_S)
        await server.close(WAIT_S)

    stopping = asyncio.create_task(stop())
    for _ in range(5):  # turns of the loop, in which the server announces its end to idle connections
        await asyncio.sleep(0)
    writer.write(GET)
    last = await reader.read()
    assert last.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in last
    await stopping
    writer.close()
