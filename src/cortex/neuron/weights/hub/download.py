"""One file from the hub to the cache: continued where it stopped, checked against its digest, renamed when whole."""

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
from cortex.neuron.weights.hub.listing import RemoteFile, raise_if_refused
from cortex.neuron.weights.hub.transport import HubResponse, Interrupted, Transport

_CHUNK_BYTES: Final = 256 << 10
# Content networks refuse to serve more than 50 GB in one answer.
_MAX_ANSWER_BYTES: Final = 16 << 30
_NUM_FRUITLESS_ATTEMPTS: Final = 6
_BACKOFF_S: Final = 0.5
_MAX_BACKOFF_S: Final = 15.0
_NUM_CORRUPT_ATTEMPTS: Final = 2

Report = Callable[[int], None]
"""Called with the file's bytes that are in the cache; may fall when a partial file proves useless."""


class FileDownload:
    """Brings one file into the cache. Runs on its own thread; `transport.abort()` ends it."""

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
        """Leave the whole file at `cache.blob(file)`.

        Raises HubError, Cancelled, or OSError when the disk fails; what has come so far is kept for the next time.
        """
        if not self._cache.blob(self._file).exists():
            with self._cache.locked(self._file, self._transport.pause):
                if not self._cache.blob(self._file).exists():
                    self._fetch_verified()
        self._report(self._file.num_bytes)

    def _fetch_verified(self) -> None:
        partial = self._cache.partial(self._file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_NUM_CORRUPT_ATTEMPTS):
            if self._fetch(partial) == self._file.digest:
                partial.replace(self._cache.blob(self._file))
                return
            partial.unlink()
        raise DownloadCorrupt(
            f"{self._file.path} of {self._repository} does not have the digest the hub promises; "
            "the network or the mirror alters files"
        )

    def _fetch(self, partial: Path) -> str:
        """Grow `partial` to its full size, and return its digest."""
        num_fruitless, reason = 0, ""
        with partial.open("ab+") as output:
            digest = self._digest_of(output)
            while (position := output.tell()) < self._file.num_bytes:
                if num_fruitless == _NUM_FRUITLESS_ATTEMPTS:
                    raise HubUnreachable(
                        f"{self._file.path} of {self._repository} stops at byte {position} of {self._file.num_bytes} "
                        f"({reason}); try again, the rest will be continued"
                    )
                if num_fruitless:
                    self._transport.pause(min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** (num_fruitless - 1)))
                try:
                    reason = self._append(output, digest)
                except Interrupted as error:
                    reason = str(error)
                num_fruitless = 0 if output.tell() > position else num_fruitless + 1
            # The name promises whole contents, also after the power fails.
            output.flush()
            os.fsync(output.fileno())
        return digest.hexdigest()

    def _digest_of(self, output: BinaryIO) -> _Digest:
        """The running digest of what is there already, with `output` left at its end."""
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

    def _append(self, output: BinaryIO, digest: _Digest) -> str:
        """One request for what is missing. Returns why it ended without error; the caller looks at how far it came."""
        start = output.tell()
        end = min(self._file.num_bytes, start + _MAX_ANSWER_BYTES)
        with self._transport.get(self._url, {"range": f"bytes={start}-{end - 1}"}) as answer:
            if answer.status == 206 and _range_start(answer) == start:
                pass
            elif answer.status == 200:
                # The server knows no ranges: what it sends is the file from its first byte.
                output.truncate(0)
                output.seek(0)
                digest.restart()
                start = 0
            else:
                raise_if_refused(answer, self._repository)
                return f"the hub answers {answer.status}"
            remaining = end - start
            while remaining and (chunk := answer.read(min(_CHUNK_BYTES, remaining))):
                output.write(chunk)
                digest.update(chunk)
                remaining -= len(chunk)
                self._report(output.tell())
        return "the connection ends early"


class _Digest:
    """The hub's digest of a file while its bytes pass by."""

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


def _range_start(answer: HubResponse) -> int | None:
    match = re.match(r"bytes (\d{1,19})-", answer.header("content-range"))
    return int(match[1]) if match else None
