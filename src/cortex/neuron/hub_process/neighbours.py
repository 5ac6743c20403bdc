"""Files from other nodes of the fleet, in place of the hub. Whoever sends them, the caller checks their digests.

A transfer goes on where the last one stopped, with the next node. A node that fails is asked no more while there is the
hub, and one that has sent wrong bytes never again.
"""

from __future__ import annotations

import http.client
import logging
import os
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
    """No neighbour has sent the file to its end."""


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
                with _Transfer(neighbour, self._repository + query) as transfer:
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
        """Completes `partial`. Raises NeighbourFailed, which leaves in it what came, HubUnreachable where asking again
        is of no use, or OSError of the disk.
        `is_last_resort`: there is no hub, so that nodes that have failed are asked again."""
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
                log.info("%s: %s did not send it to its end: %s", file.path, neighbour.name, error)
            else:
                log.info("%s: got from %s", file.path, neighbour.name)
                return
        raise failure

    def distrust_senders(self, file: RemoteFile) -> bool:
        """The file that came is not the listed one. Whether neighbours have sent parts of it: they are asked no
        more."""
        with self._lock:
            senders = self._senders.pop(file.digest, set())
            self._untrusted |= senders
        if senders:
            log.warning("%s: its contents from %s are altered, and not used", file.path, ", ".join(sorted(senders)))
        return bool(senders)

    def _in_turn(self, failed: set[str]) -> list[Neighbour]:
        """Those to ask; each file begins with another one, so that all of them send."""
        with self._lock:
            self._num_begun += 1
            usable = [each for each in self._all if each.name not in failed | self._untrusted]
        start = self._num_begun % max(1, len(usable))
        return usable[start:] + usable[:start]

    def _continue(self, neighbour: Neighbour, partial: Path, file: RemoteFile) -> None:
        position = partial.stat().st_size
        if position >= file.num_bytes:
            return
        with _Transfer(neighbour, f"{self._repository}/{file.digest}?offset={position}") as transfer:
            if transfer.num_bytes != file.num_bytes - position:
                raise NeighbourFailed(f"it has a file of another size, {transfer.num_bytes} bytes from {position} on")
            with self._lock:
                self._senders.setdefault(file.digest, set()).add(neighbour.name)
            with partial.open("ab", buffering=0) as output:
                transfer.copy_to(output.fileno())


class _Transfer:
    """One response of a neighbour, whose connection ends with the block. All its errors are NeighbourFailed, except
    those of the disk."""

    def __init__(self, neighbour: Neighbour, target: str) -> None:
        url = urllib.parse.urlsplit(neighbour.url)
        host, port = url.hostname or "", url.port
        try:
            if url.scheme == "https":
                tls = ssl.create_default_context(cadata=neighbour.authority)
                self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                    host, port, timeout=_CONNECT_S, context=tls
                )
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
            self._connection.connect()
            self._connection.sock.settimeout(_SILENCE_S)
            headers = {"authorization": f"Bearer {neighbour.ticket}"} if neighbour.ticket else {}
            self._connection.request("GET", f"{url.path.rstrip('/')}{PATH}{target}", headers=headers)
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise NeighbourFailed(f"{type(error).__name__}: {error}") from error
        if self._response.status != 200:
            self._connection.close()
            raise NeighbourFailed(f"status {self._response.status}")
        self.num_bytes = self._response.length if self._response.length is not None else -1

    def __enter__(self) -> _Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def read(self, max_bytes: int) -> bytes:
        try:
            return self._response.read(max_bytes)
        except (OSError, http.client.HTTPException) as error:
            raise NeighbourFailed(f"{type(error).__name__}: {error}") from error

    def copy_to(self, descriptor: int) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        left_bytes = self.num_bytes
        while left_bytes:
            try:
                num_read = self._response.readinto(buffer[:left_bytes])
            except (OSError, http.client.HTTPException) as error:
                raise NeighbourFailed(f"{type(error).__name__}: {error}") from error
            if not num_read:
                raise NeighbourFailed(f"the connection ended {left_bytes} bytes before the end of the file")
            left_bytes -= num_read
            written = memoryview(buffer[:num_read])
            while written:
                written = written[os.write(descriptor, written) :]
