"""Downloads one file into the cache: resumes a partial file, checks the digest, renames it when complete."""

from __future__ import annotations

import hashlib
import os
import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from cortex.neuron.weights.errors import DownloadCorrupt, HubUnreachable
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.neuron.weights.hub.listing import MAX_BACKOFF_S, RemoteFile, rejection
from cortex.neuron.weights.hub.transport import HubResponse, Interrupted, Transport

_CHUNK_BYTES: Final = 256 << 10
# Content networks serve at most 50 GB in one response.
_MAX_RESPONSE_BYTES: Final = 16 << 30
_MAX_ATTEMPTS_WITHOUT_PROGRESS: Final = 6
BACKOFF_S: Final = 0.5
_MAX_RETRY_AFTER_S: Final = 60.0
"""All attempts together outlast the five minutes for which the hub counts requests."""
_MAX_CORRUPT_DOWNLOADS: Final = 2

Report = Callable[[int], None]
"""Called with the number of bytes in the cache. The number may fall when a partial file has to be discarded."""


class FileDownload:
    """The download of one file. Runs on its own thread; `transport.abort()` ends it."""

    def __init__(
        self,
        transport: Transport,
        cache: RepositoryCache,
        repository: str,
        commit: str,
        file: RemoteFile,
        report: Report,
    ) -> None:
        self._transport = transport
        self._cache = cache
        self._repository = repository
        self._file = file
        self._report = report
        path = urllib.parse.quote(file.path)
        self._url = f"{transport.endpoint}/{repository}/resolve/{commit}/{path}"

    def run(self) -> None:
        """Download the file to `cache.blob(file)`.

        Raises HubError, Cancelled, or OSError when the disk fails. The partial file is kept for the next call.
        """
        if not self._cache.blob(self._file).exists():
            with self._cache.locked(self._file, self._transport.pause):
                if not self._cache.blob(self._file).exists():
                    self._fetch_verified()
        self._report(self._file.num_bytes)

    def _fetch_verified(self) -> None:
        partial = self._cache.partial(self._file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MAX_CORRUPT_DOWNLOADS):
            if self._fetch(partial) == self._file.digest:
                partial.replace(self._cache.blob(self._file))
                return
            partial.unlink()
        raise DownloadCorrupt(
            f"{self._file.path} of {self._repository} does not have the digest that the hub lists; "
            "the network or a mirror alters files: check the proxy and HF_ENDPOINT"
        )

    def _fetch(self, partial: Path) -> str:
        """Download the rest of `partial` and return its digest."""
        num_without_progress = 0
        closed = failure = Interrupted("the connection closed early")
        with partial.open("ab+") as output:
            digest = self._digest_of(output)
            while (position := output.tell()) < self._file.num_bytes:
                if num_without_progress == _MAX_ATTEMPTS_WITHOUT_PROGRESS:
                    raise HubUnreachable(
                        f"{self._file.path} of {self._repository} stops at byte {position} of {self._file.num_bytes} "
                        f"({failure}); {failure.remedy}; the next attempt continues from there"
                    )
                if num_without_progress:
                    backoff_s = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (num_without_progress - 1))
                    self._transport.pause(max(backoff_s, min(_MAX_RETRY_AFTER_S, failure.retry_after_s)))
                failure = closed
                try:
                    self._append(output, digest)
                except Interrupted as error:
                    failure = error
                num_without_progress = 0 if output.tell() > position else num_without_progress + 1
            # A blob must be complete under its name, even after a power failure.
            output.flush()
            os.fsync(output.fileno())
        return digest.hexdigest()

    def _digest_of(self, output: BinaryIO) -> _Digest:
        """The running digest of the existing bytes. Leaves `output` at its end."""
        digest = _Digest(self._file)
        output.seek(0, 2)
        if output.tell() > self._file.num_bytes:
            output.truncate(0)
        output.seek(0)
        while chunk := output.read(_CHUNK_BYTES):
            self._transport.check()
            digest.update(chunk)
        self._report(output.tell())
        return digest

    def _append(self, output: BinaryIO, digest: _Digest) -> None:
        """Send one request for the missing bytes. Fewer may arrive: the caller checks. Raises Interrupted, HubError."""
        start = output.tell()
        end = min(self._file.num_bytes, start + _MAX_RESPONSE_BYTES)
        with self._transport.get(self._url, {"range": f"bytes={start}-{end - 1}"}) as response:
            if response.status == 206 and _range_start(response) == start:
                pass
            elif response.status == 200:
                # The server does not support ranges: it sends the file from the first byte.
                output.truncate(0)
                output.seek(0)
                digest.restart()
                start = 0
            else:
                raise rejection(response, self._repository)
            remaining = end - start
            while remaining and (chunk := response.read(min(_CHUNK_BYTES, remaining))):
                output.write(chunk)
                digest.update(chunk)
                remaining -= len(chunk)
                self._report(output.tell())


class _Digest:
    """The hub's digest of a file, computed incrementally."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self.restart()

    def restart(self) -> None:
        if self._file.is_git_blob:
            self._hash = hashlib.sha1(b"blob %d\0" % self._file.num_bytes, usedforsecurity=False)
        else:
            self._hash = hashlib.sha256()

    def update(self, chunk: bytes) -> None:
        self._hash.update(chunk)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _range_start(response: HubResponse) -> int | None:
    match = re.match(r"bytes (\d{1,19})-", response.header("content-range"))
    return int(match[1]) if match else None
