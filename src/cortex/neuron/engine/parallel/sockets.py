"""Messages between ranks through host memory: a connection between every two, and no thread but the caller's.

Gloo's threads wait for one another on each message. Where they share cores with the computation, a sum of a few rows
takes several times as long through them.
"""

from __future__ import annotations

import functools
import secrets
import select
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from cortex.neuron.engine.parallel.ports import listening
from cortex.neuron.layers.configs import Shard

MAX_DIRECT_BYTES = 256 << 10
"""Larger tensors of more than two ranks are summed in slices, one by each rank, which sends fewer bytes."""

_LOOPBACK = "127.0.0.1"
_HELLO_S = 10.0
_SECRET_BYTES = 32


class Sockets:
    """One rank's connections. Belongs to one thread. All ranks make the same calls in the same order. Methods raise
    OSError if another rank is gone. Tensors are contiguous and in host memory."""

    def __init__(self, shard: Shard, connections: Mapping[int, socket.socket]) -> None:
        self._shard = shard
        self._connections = connections

    @classmethod
    def connect(cls, shard: Shard, store: Any, host: str | None, timeout_s: float) -> Sockets:
        """`store`: of torch, where the ranks find each other's ports. `host`: an address of this host that the others
        reach; None if they are on it. Raises OSError, or RuntimeError of the store; nothing is connected then."""
        deadline_s = time.monotonic() + timeout_s
        connections: dict[int, socket.socket] = {}
        secret = secrets.token_hex(_SECRET_BYTES // 2)
        try:
            with listening(host or _LOOPBACK, 0) as listener:
                store.set(f"address/{shard.rank}", f"{host or _LOOPBACK} {listener.getsockname()[1]} {secret}")
                for rank in range(shard.rank):
                    connections[rank] = _connection(store.get(f"address/{rank}").decode(), shard.rank, deadline_s)
                while len(connections) < shard.size - 1:
                    listener.settimeout(_left_s(deadline_s))
                    connection = listener.accept()[0]
                    if (later := _greeted(connection, secret)) is None:
                        connection.close()
                    else:
                        connections[later] = connection
            for connection in connections.values():
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(None)
        except BaseException:
            _close(connections.values())
            raise
        return cls(shard, connections)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum, in the order of the ranks: all of them get the same bits."""
        if self._shard.size == 2 or partial.nbytes <= MAX_DIRECT_BYTES:
            return _sum(self.all_parts(partial))
        slices = partial.view(-1).tensor_split(self._shard.size)
        own = slices[self._shard.rank]
        parts = {rank: torch.empty_like(own) for rank in self._connections}
        self._exchange({rank: slices[rank] for rank in parts}, parts)
        total = _sum((parts | {self._shard.rank: own})[rank] for rank in range(self._shard.size))
        self._exchange(dict.fromkeys(parts, total), {rank: slices[rank] for rank in parts})
        own.copy_(total)
        return partial

    def all_parts(self, part: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order."""
        parts = {rank: torch.empty_like(part) for rank in self._connections}
        self._exchange(dict.fromkeys(parts, part), parts)
        parts[self._shard.rank] = part
        return [parts[rank] for rank in range(self._shard.size)]

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrites it with the first rank's."""
        if self._shard.is_first:
            self._exchange(dict.fromkeys(self._connections, tensor), {})
        else:
            self.receive(tensor, 0)

    def send(self, tensor: Tensor, rank: int) -> None:
        self._exchange({rank: tensor}, {})

    def receive(self, empty: Tensor, rank: int) -> None:
        self._exchange({}, {rank: empty})

    def abort(self) -> None:
        """Ends the connections: calls of other ranks that wait for this one fail."""
        _close(self._connections.values())

    def _exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Sends and receives at the same time: both ends may have more to send than a connection holds."""
        outgoing, incoming = ({rank: _bytes_of(each) for rank, each in ends.items()} for ends in (sent, received))
        while outgoing := {rank: rest for rank, data in outgoing.items() if (rest := self._send_some(rank, data))}:
            incoming = {rank: rest for rank, data in incoming.items() if (rest := self._receive_some(rank, data))}
            waiting = select.poll()
            for rank, connection in self._connections.items():
                events = select.POLLOUT * (rank in outgoing) | select.POLLIN * (rank in incoming)
                if events:
                    waiting.register(connection, events)
            waiting.poll()
        for rank, data in incoming.items():
            rest = data
            while rest:
                rest = self._receive_some(rank, rest, socket.MSG_WAITALL)

    def _send_some(self, rank: int, data: memoryview) -> memoryview:
        """What is left of it."""
        try:
            return data[self._connections[rank].send(data, socket.MSG_DONTWAIT) :] if data else data
        except BlockingIOError:
            return data

    def _receive_some(self, rank: int, data: memoryview, flags: int = socket.MSG_DONTWAIT) -> memoryview:
        """What is left of it."""
        try:
            num_bytes = self._connections[rank].recv_into(data, 0, flags)
        except BlockingIOError:
            return data
        if num_bytes == 0:
            raise ConnectionResetError(f"rank {rank} has closed its connection")
        return data[num_bytes:]


def _connection(address: str, own_rank: int, deadline_s: float) -> socket.socket:
    host, port, secret = address.split()
    connection = socket.create_connection((host, int(port)), _left_s(deadline_s))
    connection.sendall(f"{secret}{own_rank:>4}".encode())
    return connection


def _greeted(connection: socket.socket, secret: str) -> int | None:
    """The rank at the other end; None if it does not know the secret."""
    connection.settimeout(_HELLO_S)
    try:
        hello = connection.recv(_SECRET_BYTES + 4, socket.MSG_WAITALL)
    except OSError:
        return None
    is_known = secrets.compare_digest(hello[:_SECRET_BYTES], secret.encode())
    return int(hello[_SECRET_BYTES:]) if is_known else None


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - time.monotonic(), 0.001)


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data
