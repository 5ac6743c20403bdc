"""The entries of a rendezvous store: bounded, and shared by ranks that have authenticated themselves.

The leader's worker serves them to one connection of every other rank. Once all ranks are connected, nobody else can
connect.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cortex.neuron.engine.parallel.arrivals import Door

log = logging.getLogger(__name__)

MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 64 << 10
MAX_ENTRIES = 4096
MAX_CALL_BYTES = 1 << 20
CALL_S = 60.0
"""After this, a rank that does not take a response, or a leader that does not respond, is lost."""
_RETRY_S = 0.02
_LENGTH = struct.Struct("<I")


class StoreError(RuntimeError):
    """The store rejects a call, or is gone."""


class Entries(Protocol):
    """What every store has. Keys are text, values are bytes. Methods raise StoreError, and may be called from any
    thread."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """None: there is no such key."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a decimal number, 0 at first, and returns the sum."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets the key to `desired` if its value is `expected`, or if it has none and `expected` is empty. Returns the
        value that it has then."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""

    def delete(self, key: str) -> bool: ...

    def num_keys(self) -> int: ...

    def close(self) -> None: ...


class LocalEntries:
    """Entries in this process."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._set(key, value)

    def get(self, key: str) -> bytes | None:
        return self._entries.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            try:
                total = int(self._entries.get(key, b"0")) + amount
            except ValueError as error:
                raise StoreError(f"the value of {key} is no number") from error
            self._set(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._lock:
            if self._entries.get(key, b"") == expected:
                self._set(key, desired)
            return self._entries.get(key, expected)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._entries for key in keys)

    def delete(self, key: str) -> bool:
        with self._lock:
            return self._entries.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        pass

    def _set(self, key: str, value: bytes) -> None:
        if len(key.encode()) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            raise StoreError(f"an entry may have {MAX_KEY_BYTES} bytes of key and {MAX_VALUE_BYTES} bytes of value")
        if key not in self._entries and len(self._entries) >= MAX_ENTRIES:
            raise StoreError(f"the store has {MAX_ENTRIES} entries, the most it may have")
        self._entries[key] = value


class ServedEntries(LocalEntries):
    """Entries in this process that other ranks use through their connections, which a thread serves."""

    def __init__(self, listener: socket.socket, keys: Sequence[bytes]) -> None:
        """`keys`: the secret of each other rank, see `Door`. Takes over the listener."""
        super().__init__()
        self._end, ended = socket.socketpair()
        self._thread = threading.Thread(
            target=self._serve, args=(listener, keys, ended), name="rendezvous", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Disconnects the other ranks; calls of theirs that wait fail."""
        self._end.close()
        self._thread.join()

    def _serve(self, listener: socket.socket, keys: Sequence[bytes], ended: socket.socket) -> None:
        ranks: dict[object, _Calls] = {}
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as ends:
            door = Door(listener, keys, selector)
            ends.callback(_disconnect, ranks)
            ends.callback(door.close)
            ends.callback(ended.close)
            selector.register(ended, selectors.EVENT_READ)
            while True:
                for ready in [key.fileobj for key, _ in selector.select()]:
                    if ready is ended:
                        return
                    if ready in ranks:
                        if not ranks[ready].answer():
                            selector.unregister(ready)
                            ranks.pop(ready).connection.close()
                    elif (rank := _advanced(door, ready)) is not None:
                        ranks[rank] = _Calls(rank, self)
                        selector.register(rank, selectors.EVENT_READ)
                        if not door.is_open:
                            door.close()


def _disconnect(ranks: Mapping[object, _Calls]) -> None:
    for calls in ranks.values():
        calls.connection.close()


def _advanced(door: Door, ready: object) -> socket.socket | None:
    try:
        rank = door.advance(ready)
    except OSError as error:  # such as too many open files
        log.warning("a rank of a divided model could not connect: %s", error)
        time.sleep(_RETRY_S)  # it is still there to be accepted
        return None
    if rank is None:
        return None
    rank[1].settimeout(CALL_S)
    rank[1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return rank[1]


class _Calls:
    """The calls of one rank."""

    def __init__(self, connection: socket.socket, entries: LocalEntries) -> None:
        self.connection = connection
        self._methods: Mapping[str, Callable[..., Any]] = {
            "set": entries.set,
            "get": entries.get,
            "add": entries.add,
            "compare_set": entries.compare_set,
            "check": entries.check,
            "delete": entries.delete,
            "num_keys": entries.num_keys,
        }
        self._received = bytearray()

    def answer(self) -> bool:
        """Reads once and responds to the call that it completes. Returns whether the rank is still connected."""
        try:
            data = self.connection.recv(64 << 10)
            self._received += data
            if not data or len(self._received) > MAX_CALL_BYTES:
                return False
            if len(self._received) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
                if len(self._received) >= end:
                    response = self._response(bytes(self._received[_LENGTH.size : end]))
                    del self._received[:end]
                    self.connection.sendall(_frame(response))
        except OSError as error:
            log.info("a rank of a divided model was disconnected: %s", error)
            return False
        return True

    def _response(self, call: bytes) -> list[Any]:
        try:
            name, *arguments = _decoded(call)
            return [self._methods[name](*arguments), None]
        except (StoreError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return [None, str(error)]


class RemoteEntries:
    """Entries of the leader, through an authenticated connection."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes over the connection."""
        connection.settimeout(CALL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._call("get", key)
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._call("compare_set", key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", list(keys)))

    def delete(self, key: str) -> bool:
        return bool(self._call("delete", key))

    def num_keys(self) -> int:
        return int(self._call("num_keys"))

    def close(self) -> None:
        self._connection.close()

    def _call(self, *call: Any) -> Any:
        try:
            with self._lock:
                self._connection.sendall(_frame(call))
                (num_bytes,) = _LENGTH.unpack(self._receive(_LENGTH.size))
                value, error = _decoded(self._receive(num_bytes))
        except OSError as error:
            self._connection.close()  # what comes later would be taken for another response
            raise StoreError(f"the leader is gone: {error}") from error
        if error is not None:
            raise StoreError(error)
        return value

    def _receive(self, num_bytes: int) -> bytes:
        received = b""
        while len(received) < num_bytes:
            data = self._connection.recv(num_bytes - len(received))
            if not data:
                raise ConnectionResetError("it has closed the connection")
            received += data
        return received


def _frame(values: Sequence[Any]) -> bytes:
    """Values are JSON; bytes are an object with their text in Latin-1, which has all of them."""
    body = json.dumps(values, default=lambda value: {"bytes": value.decode("latin-1")}).encode()
    return _LENGTH.pack(len(body)) + body


def _decoded(body: bytes) -> Any:
    """Raises ValueError."""
    return json.loads(body, object_hook=lambda found: found["bytes"].encode("latin-1"))
