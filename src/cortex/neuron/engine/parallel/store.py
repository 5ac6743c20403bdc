"""The store through which the ranks of one divided model find each other: a file, or entries of the leader.

The store of torch authenticates nobody: a client that reaches its port can list its keys and fill its memory. Between
hosts the leader's worker serves a store of our own, to ranks that have proved that they know the load's secret.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.parallel.arrivals import NotAuthenticated, connected
from cortex.neuron.engine.parallel.entries import Entries, RemoteEntries, ServedEntries, StoreError
from cortex.neuron.engine.parallel.ports import listening
from cortex.neuron.engine.request import RankSpec, RendezvousAddress

_library: Any = torch.distributed
"""As Any: stores have no or wrong types."""
_CONNECT_S = 60.0
"""How long a leader that listens may disconnect this rank, as it does if many peers connect at once."""
_RETRY_S = 0.02
_WAIT = timedelta(minutes=5)


class RankStore:
    """One rank's end of the store. `library` is the same store for libraries of torch."""

    def __init__(self, entries: Any, library: Any) -> None:
        """`entries`: `Entries`, or what has the same methods."""
        self.library = library  # kept as long as this: torch keeps only the part of it that is not Python
        self._entries = entries

    @classmethod
    def open(cls, spec: RankSpec, poll: Callable[[], None]) -> RankStore:
        """`poll` is called while the leader does not listen yet. Raises LoadError or what `poll` raises."""
        if spec.rendezvous is None:
            file = _library.FileStore(str(Path(spec.directory) / "store"), spec.size)
            return cls(file, file)
        entries = _serve(spec.rendezvous, spec.size) if spec.rank == 0 else _join(spec.rendezvous, spec.rank, poll)
        return cls(entries, EntryStore(entries))

    def set(self, key: str, text: str) -> None:
        """Raises RuntimeError, as the others do, if the store is gone."""
        self._entries.set(key, text.encode())

    def get(self, key: str) -> str:
        """The key must exist."""
        return str(self._entries.get(key), "utf-8")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are set."""
        return bool(self._entries.check(keys))

    def close(self) -> None:
        """No library may use the store any more. Calls of other ranks fail if this one is the leader."""
        if isinstance(self.library, EntryStore):
            self._entries.close()


class EntryStore(_library.Store):  # type: ignore[misc]
    """Entries as a store of torch, whose libraries call it from threads of their own."""

    def __init__(self, entries: Entries) -> None:
        super().__init__()
        self._entries = entries

    def set(self, key: str, value: bytes | str) -> None:
        self._entries.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for the key, as every store of torch does."""
        self.wait([key], _WAIT)
        value = self._entries.get(key)
        if value is None:
            raise StoreError(f"{key} was deleted")
        return value

    def add(self, key: str, amount: int) -> int:
        return self._entries.add(key, amount)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._entries.compare_set(key, _bytes(expected), _bytes(desired))

    def check(self, keys: Sequence[str]) -> bool:
        """False if the leader is gone: a library's own thread calls this, and an error there ends the process."""
        try:
            return self._entries.check(keys)
        except StoreError:
            return False

    def wait(self, keys: Sequence[str], timeout: timedelta = _WAIT) -> None:
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not self._entries.check(keys):
            if time.monotonic() >= deadline_s:
                raise StoreError(f"no rank has set all of {', '.join(keys)} within {timeout.total_seconds():.0f} s")
            time.sleep(_RETRY_S)

    def delete_key(self, key: str) -> bool:
        return self._entries.delete(key)

    def num_keys(self) -> int:
        return self._entries.num_keys()

    def clone(self) -> EntryStore:
        """Itself: any thread may call it."""
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815
    """What the libraries of torch call them."""


def _serve(address: RendezvousAddress, size: int) -> Entries:
    try:
        listener = listening(address.host, address.store_port)
    except OSError as error:
        raise LoadError(
            f"no rendezvous of the model's ranks at {address.host}:{address.store_port} ({error}); `peer_address` must "
            "be an address of this host that the other nodes reach"
        ) from error
    return ServedEntries(listener, [_key(address, rank) for rank in range(1, size)])


def _join(address: RendezvousAddress, rank: int, poll: Callable[[], None]) -> Entries:
    leader = address.host, address.store_port
    while True:
        try:
            return RemoteEntries(connected(leader, _key(address, rank), time.monotonic() + _CONNECT_S, poll))
        except NotAuthenticated as error:
            raise LoadError(
                f"the leader at {address.host}:{address.store_port} does not accept rank {rank} of the model: {error}"
            ) from error
        except OSError:  # it does not listen yet
            poll()
            time.sleep(_RETRY_S)


def _key(address: RendezvousAddress, rank: int) -> bytes:
    return f"store {address.secret} {rank}".encode()


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value
