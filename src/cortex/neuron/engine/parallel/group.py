"""The communicator of one divided model: on peer memory, NCCL or sockets.

Each model has its own, with a private store, so that models on the same devices do not interfere, and a broken one is
torn down alone. Small messages between GPUs that can access each other's memory go over that memory, all others through
NCCL. Both are ordered by the stream, and can be part of a CUDA graph.

Sockets are for CPUs: messages through host memory, on the caller's thread. Gloo's threads wait for one another on each
message. Where they share cores with the computation, a sum of a few rows takes several times as long through them.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from cortex.neuron.engine.errors import GroupBroken, LoadCancelled, LoadError
from cortex.neuron.engine.execution.graphs import CudaCapture, NotCaptured
from cortex.neuron.engine.parallel.peer_memory import Exchange, PeerMemory, may_share
from cortex.neuron.engine.parallel.private_sockets import accepted, connected, listening
from cortex.neuron.engine.request import RankSpec
from cortex.neuron.kernels.peer_buffer import MAX_BYTES
from cortex.neuron.layers.configs import Shard
from cortex.neuron.layers.parallel import UNLIMITED_BYTES
from cortex.neuron.private_api.torch import limit_nccl

log = logging.getLogger(__name__)

MAX_DIRECT_BYTES = 256 << 10
"""Larger tensors of more than two ranks are summed in slices, one by each rank, which sends fewer bytes."""
_RANK_BYTES = 4

_library: Any = torch.distributed
"""As Any: process groups and stores have no or wrong types."""

PEER_MEMORY = "peer memory"
POLL_S = 0.02
_CONNECT = "connect"
LAST_RESORT = timedelta(hours=1)
"""A rank that dies closes its connections, and the daemon ends a group without progress long before this."""


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


class TorchGroup:
    """One rank's end of the communicator. Belongs to the engine thread. Every call raises GroupBroken if another rank
    is gone."""

    def __init__(self, group: Any, store: Any, shard: Shard, device: torch.device, poll: Callable[[], None]) -> None:
        """`group`: NCCL's process group, or sockets; `poll`: see `join`."""
        self.shard = shard
        self._group = group
        self._store = store
        self._poll = poll
        self.peers: PeerMemory | None = None
        self._is_nccl = not isinstance(group, Sockets)
        self.captures_library = self._is_nccl
        """Whether calls of the library can be part of a CUDA graph."""
        self._staged = device.type == "cuda" and not self._is_nccl
        """Whether tensors of a GPU go through host memory."""

    @classmethod
    def join(
        cls,
        spec: RankSpec,
        device: torch.device,
        poll: Callable[[], None],
        follow: Callable[[], None] | None = None,
        turn: AbstractContextManager[None] | None = None,
        *,
        with_peers: bool = True,
    ) -> TorchGroup:
        """Waits for the other ranks, then connects to them and runs a small all-reduce with them.

        `poll` is called while it waits for others; its exceptions end the wait. `turn`: the leader's, see
        `StepLink.turn`, because connecting ranks wait for each other like those in a step. `follow` is called instead
        of `poll` once all ranks have arrived: it must not begin a step, which would wait for the end of `turn`, whose
        holder waits for this rank. `with_peers`: uses peer memory if available. Raises LoadError if the ranks cannot
        communicate, LoadCancelled if another one is gone; nothing is connected then.
        """
        shard = Shard(spec.rank, spec.size)
        store = _library.FileStore(str(Path(spec.directory) / "store"), spec.size)
        connected = functools.partial(cls._connected, spec, store, device, poll, follow or poll, with_peers=with_peers)
        _meet(store, "arrived", shard, poll)
        _meet(store, "connecting", shard, follow or poll)
        if not shard.is_first:
            _wait_for(store, [_CONNECT], follow or poll)
            return connected()
        with turn or nullcontext():
            store.set(_CONNECT, "1")
            return connected()

    @classmethod
    def _connected(
        cls,
        spec: RankSpec,
        store: Any,
        device: torch.device,
        poll: Callable[[], None],
        poll_connecting: Callable[[], None],
        *,
        with_peers: bool,
    ) -> TorchGroup:
        """`poll_connecting`: instead of `poll` until this returns."""
        shard = Shard(spec.rank, spec.size)
        exchange = functools.partial(_exchange, store, shard=shard, poll=poll_connecting)
        group: TorchGroup | None = None
        try:
            group = cls(_connect(spec, store, poll_connecting), store, shard, device, poll)
            group._check(spec.backend, device)
            if with_peers and group._is_nccl:
                group.agree_on_capture(spec, device, exchange)
            if with_peers and may_share(spec, device.type, os.environ):
                group.peers = PeerMemory.connect(shard, device, exchange)
                if group.uses_peers:
                    group._check("peer memory; NCCL_P2P_DISABLE=1 avoids it", device)
        except BaseException as error:
            if group is not None:
                group.close()  # a rank that waits for this one fails at once
            if isinstance(error, GroupBroken):
                raise LoadCancelled(f"another rank of the model ended its load: {error}") from error
            if isinstance(error, (RuntimeError, OSError)):
                message = f"the {spec.size} ranks of the model cannot communicate ({spec.backend}): {error}"
                raise LoadError(message) from error
            raise
        return group

    def _check(self, way: str, device: torch.device) -> None:
        """Runs a small all-reduce. Raises LoadError if the sum is wrong."""
        size = self.shard.size
        total = self.all_reduce(torch.full((4,), float(self.shard.rank + 1), device=device))
        expected = size * (size + 1) / 2
        if total.tolist() != [expected] * 4:
            raise LoadError(
                f"the {size} ranks of the model disagree ({way}): a sum of {expected} came out as {total[0].item()}; "
                "check the links between the devices"
            )

    def agree_on_capture(self, spec: RankSpec, device: torch.device, exchange: Exchange) -> None:
        """Tests whether the library can be captured. If it fails on any rank, all ranks reconnect and capture none of
        its calls, because the connection may not survive a failed capture."""
        outcomes = exchange("captured", "yes" if can_capture(self, device) else "no")
        if "no" not in outcomes:
            return
        log.info("rank %d cannot capture messages as CUDA graphs; the library sends them without", outcomes.index("no"))
        self._abort()
        self._group = _connect(spec, self._store, self._poll, "without graphs")
        self.captures_library = False
        self._check(spec.backend, device)

    @property
    def uses_peers(self) -> bool:
        return self.peers is not None

    def transport(self, partial: Tensor) -> str:
        """How a sum of this tensor travels."""
        if self.peers is not None and self.peers.can_sum(partial):
            return PEER_MEMORY
        return "nccl" if self._is_nccl else "sockets"

    @property
    def num_bytes(self) -> int:
        """Device memory of this rank that the communicator holds as long as the model is loaded."""
        return 0 if self.peers is None else self.peers.num_bytes

    @property
    def max_captured_bytes(self) -> int:
        return captured_bytes(captures_library=self.captures_library, uses_peers=self.uses_peers)

    def wait_for_all(self, event: str) -> None:
        """Returns when every rank has reached `event`."""
        _meet(self._store, event, self.shard, self._poll)

    def reached(self, event: str) -> None:
        """Marks `event` as reached for the others' `wait_for_all`, without waiting."""
        self._store.set(f"{event}/{self.shard.rank}", "1")

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self.peers is not None and self.peers.can_sum(partial):
            return self.peers.sum(partial)
        sent = self._sent(partial)
        with self._breaking():
            if self._is_nccl:
                self._group.allreduce([sent]).wait()
            else:
                sent = self._group.all_reduce(sent)
        return sent.to(partial.device)

    def all_gather(self, part: Tensor) -> Tensor:
        if self.peers is not None and self.peers.can_gather(part):
            return self.peers.gather(part)
        sent = self._sent(part)
        with self._breaking():
            if self._is_nccl:
                parts = [torch.empty_like(sent) for _ in range(self.shard.size)]
                self._group.allgather([parts], [sent]).wait()
            else:
                parts = self._group.all_parts(sent)
        return torch.cat(parts, dim=-1).to(part.device)

    def broadcast(self, tensor: Tensor) -> Tensor:
        if self.peers is not None and self.peers.can_gather(tensor):
            return self.peers.gather(tensor.reshape(1, -1))[0, : tensor.numel()].view_as(tensor)
        sent = self._sent(tensor)
        with self._breaking():
            if self._is_nccl:
                self._group.broadcast([sent], _from_first()).wait()
            else:
                self._group.broadcast(sent)
        return sent.to(tensor.device)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Sends a tensor to one other rank, which must receive it."""
        sent = self._sent(tensor)
        with self._breaking():
            if self._is_nccl:
                self._group.send([sent], rank, 0).wait()
            else:
                self._group.send(sent, rank)

    def receive(self, empty: Tensor, rank: int) -> Tensor:
        """The tensor that another rank sends, of the shape and dtype of `empty`, which may be overwritten."""
        received = self._sent(empty)
        with self._breaking():
            if self._is_nccl:
                self._group.recv([received], rank, 0).wait()
            else:
                self._group.receive(received, rank)
        return received.to(empty.device)

    def smallest(self, counts: Sequence[int]) -> list[int]:
        """The smallest of every rank's counts, element by element. A rank that waits for others polls."""
        texts = _exchange(self._store, "counts", ",".join(map(str, counts)), shard=self.shard, poll=self._poll)
        return [min(column) for column in zip(*(map(int, text.split(",")) for text in texts), strict=True)]

    def close(self) -> None:
        """Ends the connections; calls of other ranks that wait for this one fail, those on a device after
        `WAIT_LIMIT_S` of `peer_exchange`. No graph with calls of this group may exist any more."""
        if self.peers is not None:
            self.peers = None
            torch.cuda.ipc_collect()
        self._abort()
        del self._group  # ends the threads of the library, which use the store

    def _abort(self) -> None:
        self._group.abort()

    def _sent(self, tensor: Tensor) -> Tensor:
        """The tensor to send instead: contiguous, and on the host if tensors are staged."""
        return (tensor.cpu() if self._staged else tensor).contiguous()

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """A context that turns a failed call into GroupBroken: another rank is gone."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise GroupBroken(f"rank {self.shard.rank} lost the other ranks of its model: {error}") from error


def can_capture(group: TorchGroup, device: torch.device) -> bool:
    """Whether a sum of this group can be part of a CUDA graph. All ranks try at once."""
    values = torch.zeros(4, device=device)
    try:
        CudaCapture(may_fail=True)(lambda: (group.all_reduce(values), values, values))
    except NotCaptured:
        return False
    return True


def poller(wait: Callable[[], None], cancelled: Callable[[], bool]) -> Callable[[], None]:
    """The poll of a waiting rank: calls `wait`, and raises when the load is cancelled."""

    def poll() -> None:
        if cancelled():
            raise LoadCancelled("the load was cancelled")
        wait()

    return poll


def captured_bytes(*, captures_library: bool, uses_peers: bool) -> int:
    """The largest message that can be part of a CUDA graph. A message through host memory cannot."""
    return UNLIMITED_BYTES if captures_library else MAX_BYTES if uses_peers else 0


def _meet(store: Any, event: str, shard: Shard, poll: Callable[[], None]) -> None:
    _exchange(store, event, "1", shard=shard, poll=poll)


def _exchange(store: Any, event: str, text: str, *, shard: Shard, poll: Callable[[], None]) -> list[str]:
    """The texts of all ranks, in their order."""
    keys = [f"{event}/{rank}" for rank in range(shard.size)]
    store.set(keys[shard.rank], text)
    _wait_for(store, keys, poll)
    return [str(store.get(key), "utf-8") for key in keys]


def _wait_for(store: Any, keys: list[str], poll: Callable[[], None]) -> None:
    try:
        while not store.check(keys):
            poll()
            time.sleep(POLL_S)
    except RuntimeError as error:  # the directory was removed
        raise LoadCancelled(f"another rank of the model ended its load: {error}") from error


def _connect(spec: RankSpec, store: Any, poll: Callable[[], None], name: str = "group") -> Any:
    """`name`: of this connection, because the ranks may have several in turn."""
    if spec.backend == "nccl":
        private = _library.PrefixStore(name, store)
        options = _library.ProcessGroupNCCL.Options()
        limit_nccl(options, LAST_RESORT)
        return _library.ProcessGroupNCCL(private, spec.rank, spec.size, options)
    shard = Shard(spec.rank, spec.size)
    listening = functools.partial(_meet, store, f"{name}/listening", shard, poll)
    deadline_s = time.monotonic() + LAST_RESORT.total_seconds()
    return Sockets.connect(shard, spec.directory, listening, poll, deadline_s, name)


def _from_first() -> Any:
    options = _library.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options
