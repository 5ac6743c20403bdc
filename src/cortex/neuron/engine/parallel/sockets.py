"""Messages between ranks through host memory, over a connection between every two, on the caller's thread.

Gloo's threads wait for one another on each message. Where they share cores with the computation, a sum of a few rows
takes several times as long through them.
"""

from __future__ import annotations

import functools
import math
import select
import socket
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from cortex.neuron.engine.parallel.private_sockets import accepted, connected, listening
from cortex.neuron.layers.configs import Shard

MAX_DIRECT_BYTES = 256 << 10
"""Larger tensors of more than two ranks are summed in slices, one by each rank, which sends fewer bytes."""
_RANK_BYTES = 4


class Sockets:
    """One rank's connections. Belongs to one thread. All ranks make the same calls in the same order. Methods raise
    OSError if another rank is gone. Tensors are contiguous and in host memory."""

    def __init__(self, shard: Shard, connections: Mapping[int, socket.socket]) -> None:
        self._shard = shard
        self._connections = connections

    @classmethod
    def connect(
        cls,
        shard: Shard,
        directory: str,
        wait_for_all: Callable[[], None],
        poll: Callable[[], None],
        deadline_s: float = math.inf,
        name: str = "rank",
    ) -> Sockets:
        """`directory`: private to the ranks of this load. `wait_for_all`: returns when every rank has called it. `poll`
        is called while it waits; what it raises ends the wait. `deadline_s`: of the monotonic clock. `name`: of this
        connection, because the ranks may have several in turn. Raises OSError, or what `wait_for_all` does; then
        nothing is connected."""
        connections: dict[int, socket.socket] = {}
        try:
            with listening(directory, f"{name}-{shard.rank}", shard.size) as listener:
                wait_for_all()
                for rank in range(shard.rank):
                    connections[rank] = connected(directory, f"{name}-{rank}")
                    connections[rank].sendall(shard.rank.to_bytes(_RANK_BYTES, "little"))
                for _ in range(shard.rank + 1, shard.size):
                    connection = accepted(listener, deadline_s, poll)
                    sender = connection.recv(_RANK_BYTES, socket.MSG_WAITALL)
                    connections[int.from_bytes(sender, "little")] = connection
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
        outgoing, incoming = (
            {rank: _bytes_of(each) for rank, each in ends.items() if each.nbytes} for ends in (sent, received)
        )
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
        """The remaining part."""
        try:
            return data[self._connections[rank].send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data

    def _receive_some(self, rank: int, data: memoryview, flags: int = socket.MSG_DONTWAIT) -> memoryview:
        """The remaining part."""
        try:
            num_bytes = self._connections[rank].recv_into(data, 0, flags)
        except BlockingIOError:
            return data
        if num_bytes == 0:
            raise ConnectionResetError(f"rank {rank} has closed its connection")
        return data[num_bytes:]


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data
