"""Files from other nodes of the fleet instead of the hub. The caller checks all digests.

A transfer continues where the last one stopped, with the next node. A node that fails is not used again while the hub
is reachable, and one that sent wrong bytes never again.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from cortex.neuron.weights.errors import HubError, HubUnreachable
from cortex.neuron.weights.hub.listing import MAX_LISTING_BYTES, Listing, RemoteFile, checked_commit, checked_file
from cortex.wire.node.neighbours import PATH, Neighbour, SharedRepository

log = logging.getLogger(__name__)

_CONNECT_S: Final = 5.0
_SILENCE_S: Final = 20.0
_BUFFER_BYTES: Final = 1 << 20


class NeighbourFailed(Exception):
    """A neighbour has not sent the requested data."""


class Neighbours:
    """The nodes that may have the files of a repository. Safe to use from several threads."""

    def __init__(self, neighbours: Sequence[Neighbour], repository: str) -> None:
        self._all = tuple(neighbours)
        self._repository = repository
        self._lock = threading.Lock()
        self._num_begun = 0
        self._failed: set[str] = set()
        self._untrusted: set[str] = set()
        self._senders: dict[str, set[str]] = {}
        """By digest: who has sent a part of the partial file."""

    def listing(self, revision: str) -> Listing | None:
        """That of the first neighbour that has the repository; None: none has. Raises HubError for a listing that no
        hub would send."""
        query = f"?revision={urllib.parse.quote(revision, safe='')}"
        for neighbour in self._all:
            try:
                with Transfer(neighbour) as transfer:
                    transfer.open("GET", PATH + self._repository + query)
                    found = msgspec.json.decode(transfer.read(MAX_LISTING_BYTES), type=SharedRepository)
                    commit = checked_commit(found.commit)
                    files = [checked_file(each.path, each.num_bytes, each.digest) for each in found.files]
            except NeighbourFailed as failure:
                log.info("%s: no listing from %s: %s", self._repository, neighbour.name, failure)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
                raise HubError(f"{neighbour.name} sent a listing that cannot be used: {error}") from error
            else:
                return Listing(commit, {file.path: file for file in files})
        return None

    def fetch(self, partial: Path, file: RemoteFile, *, is_last_resort: bool) -> None:
        """Completes `partial`. Raises NeighbourFailed, which leaves in it what arrived, HubUnreachable if a retry
        cannot help, or OSError of the disk. `is_last_resort`: there is no hub, so nodes that failed are tried again."""
        if is_last_resort and self._untrusted.issuperset(each.name for each in self._all):
            raise HubUnreachable(
                f"no other node has an intact copy of {file.path}; pull it there again, or from the hub"
            )
        failure = NeighbourFailed("no other node has it")
        for neighbour in self._in_turn(set() if is_last_resort else self._failed):
            try:
                self._continue(neighbour, partial, file)
            except NeighbourFailed as error:
                failure = error
                self._failed.add(neighbour.name)
                log.info("%s: the transfer from %s broke off: %s", file.path, neighbour.name, error)
            else:
                log.info("%s: got from %s", file.path, neighbour.name)
                return
        raise failure

    def distrust_senders(self, file: RemoteFile) -> bool:
        """The received file does not match the listing. Returns whether neighbours sent parts of it, which are not used
        again."""
        with self._lock:
            senders = self._senders.pop(file.digest, set())
            self._untrusted |= senders
        if senders:
            log.warning("%s: the copy from %s is damaged, and not used", file.path, ", ".join(sorted(senders)))
        return bool(senders)

    def _in_turn(self, failed: set[str]) -> list[Neighbour]:
        """The neighbours to ask; each file begins with another one, to spread the load."""
        with self._lock:
            self._num_begun += 1
            usable = [each for each in self._all if each.name not in failed | self._untrusted]
        start = self._num_begun % max(1, len(usable))
        return usable[start:] + usable[:start]

    def _continue(self, neighbour: Neighbour, partial: Path, file: RemoteFile) -> None:
        position = partial.stat().st_size
        if position >= file.num_bytes:
            return
        with Transfer(neighbour) as transfer:
            transfer.open("GET", f"{PATH}{self._repository}/{file.digest}?offset={position}")
            if transfer.num_bytes != file.num_bytes - position:
                raise NeighbourFailed(f"it has a file of another size, {transfer.num_bytes} bytes from {position} on")
            with self._lock:
                self._senders.setdefault(file.digest, set()).add(neighbour.name)
            with partial.open("ab", buffering=0) as output:
                transfer.copy_to(output.fileno())


class Transfer:
    """One response of a neighbour, whose connection ends with the block. All errors are NeighbourFailed. Belongs to one
    thread; `cancel` may be called on another one."""

    def __init__(self, neighbour: Neighbour) -> None:
        self._neighbour = neighbour
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self.is_cancelled = False

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def open(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        connect_s: float = _CONNECT_S,
        silence_s: float = _SILENCE_S,
    ) -> None:
        """Sends a request. `silence_s`: how long the neighbour may send nothing."""
        headers = {"authorization": f"Bearer {self._neighbour.ticket}"} if self._neighbour.ticket else {}
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            url = urllib.parse.urlsplit(self._neighbour.url)
            host, port = url.hostname or "", url.port
            if url.scheme == "https":
                tls = ssl.create_default_context(cadata=self._neighbour.authority)
                connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                    host, port, timeout=connect_s, context=tls
                )
            else:
                connection = http.client.HTTPConnection(host, port, timeout=connect_s)
            self._connection = connection
            connection.connect()
            self._socket = connection.sock
            self._socket.settimeout(silence_s)
            if self.is_cancelled:
                raise NeighbourFailed("the transfer was cancelled")
            connection.request(method, url.path.rstrip("/") + target, body, headers)
            self._response = connection.getresponse()
            self.num_bytes = -1 if self._response.length is None else self._response.length
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _failed(error) from error
        if self._response.status != 200:
            raise NeighbourFailed(f"status {self._response.status}")

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def header(self, name: str) -> str:
        """Empty: there is none."""
        return self._response.headers.get(name, "")

    def read(self, max_bytes: int) -> bytes:
        try:
            return self._response.read(max_bytes)
        except (OSError, http.client.HTTPException) as error:
            raise _failed(error) from error

    def read_into(self, view: memoryview) -> int:
        """Some bytes; 0 at the end."""
        try:
            return self._response.readinto(view)
        except (OSError, http.client.HTTPException) as error:
            raise _failed(error) from error

    def copy_to(self, descriptor: int) -> None:
        """Raises OSError of the disk, too."""
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        left_bytes = self.num_bytes
        while left_bytes:
            if not (num_read := self.read_into(buffer[:left_bytes])):
                raise NeighbourFailed(f"the connection ended {left_bytes} bytes before the end of the file")
            left_bytes -= num_read
            written = memoryview(buffer[:num_read])
            while written:
                written = written[os.write(descriptor, written) :]


def _failed(error: Exception) -> NeighbourFailed:
    return NeighbourFailed(f"{type(error).__name__}: {error}")
