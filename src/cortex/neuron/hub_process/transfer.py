"""Downloads files into the cache with the hub's client. Runs in the hub process.

The client's own `hf_hub_download` drops a partial file when a download fails and checks no digest. So its transfers,
over Xet or HTTP, are used file by file: partial files are continued, and a file has its name in the cache only once
its digest is that of the listing.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from huggingface_hub import HfFileMetadata, constants, file_download, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # its documentation names it here

from cortex.neuron.hub_process.protocol import FetchFiles
from cortex.neuron.hub_process.remote_listing import Interrupted, interruption
from cortex.neuron.weights.errors import DownloadCorrupt, HubError, HubUnreachable, NoDiskSpace
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.neuron.weights.hub.listing import RemoteFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

_NUM_FILES_AT_ONCE: Final = 8
_CHUNK_BYTES: Final = 256 << 10
_MAX_ATTEMPTS_WITHOUT_PROGRESS: Final = 6
"""Within each, the client repeats what a connection interrupts, and waits as long as a busy hub says."""
_BACKOFF_S: Final = 0.5
_MAX_CORRUPT_DOWNLOADS: Final = 2

# What has not filled a chunk is lost when a connection ends.
constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES


def fetch_files(request: FetchFiles) -> None:
    """Downloads the files that the cache lacks and links all of them. Raises HubError; partial files are kept."""
    cache = RepositoryCache(Path(request.cache_directory), request.repository)
    transfer = _Transfer(cache, request)
    pool = ThreadPoolExecutor(_NUM_FILES_AT_ONCE, thread_name_prefix="hub")
    try:
        done, _ = wait([pool.submit(transfer.fetch, file) for file in request.files], return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    except OSError as error:
        raise disk_error(cache.root, error) from error
    finally:
        # After a failure the rest is not waited for: this process ends with the request.
        pool.shutdown(wait=False, cancel_futures=True)


def disk_error(root: Path, error: OSError) -> HubError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoDiskSpace(f"the disk of {root} is full; free some space and try again")
    return HubError(f"cannot write to {root}: {error.strerror or error}; check permissions or HF_HUB_CACHE")


class _Transfer:
    """The files of one request. Safe to use from several threads."""

    def __init__(self, cache: RepositoryCache, request: FetchFiles) -> None:
        self._cache = cache
        self._request = request
        self._headers = {**build_hf_headers(), "accept-encoding": "identity"}  # so that a partial file can be continued
        self._uses_xet = not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None

    def fetch(self, file: RemoteFile) -> None:
        """Raises HubError, or OSError when the disk fails."""
        blob = self._cache.blob(file)
        if not blob.exists():
            with self._cache.locked(file):
                if not blob.exists():
                    self._fetch_verified(file)
        self._cache.link(self._request.commit, file)

    def _fetch_verified(self, file: RemoteFile) -> None:
        partial = self._cache.partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MAX_CORRUPT_DOWNLOADS):
            self._complete(partial, file)
            if partial.stat().st_size == file.num_bytes and _digest(partial, file) == file.digest:
                partial.replace(self._cache.blob(file))
                return
            partial.unlink()
        raise DownloadCorrupt(
            f"{file.path} of {self._request.repository} does not have the size and digest that the hub lists; "
            "the network or a mirror alters files: check the proxy and HF_ENDPOINT"
        )

    def _complete(self, partial: Path, file: RemoteFile) -> None:
        """Downloads the rest of `partial`. It may be one byte too long, or corrupt: the caller checks."""
        partial.touch()
        num_failed = 0
        while (position := partial.stat().st_size) < file.num_bytes:
            try:
                self._continue(partial, position, file)
                if partial.stat().st_size == position:
                    raise Interrupted("nothing arrived")
            except Interrupted as failure:
                num_failed = 1 if partial.stat().st_size > position else num_failed + 1
                if num_failed == _MAX_ATTEMPTS_WITHOUT_PROGRESS:
                    raise HubUnreachable(
                        f"{file.path} of {self._request.repository} stops at byte {partial.stat().st_size} of "
                        f"{file.num_bytes} ({failure}); {failure.remedy}; the next attempt continues from there"
                    ) from failure
                time.sleep(_BACKOFF_S * 2 ** (num_failed - 1))

    def _continue(self, partial: Path, position: int, file: RemoteFile) -> None:
        """One transfer of what is missing from `position` on. Raises Interrupted, NotOnHub, or OSError of the disk."""
        request = self._request
        url = hf_hub_url(request.repository, file.path, revision=request.commit, endpoint=request.endpoint)
        if position == 0 and not file.is_git_blob and self._fetch_over_xet(url, partial, file):
            return
        with _BoundedFile(partial, file.num_bytes) as output:
            output.seek(position)
            try:
                file_download.http_get(
                    url, output, resume_size=position, headers=self._headers, expected_size=file.num_bytes
                )
            except _TooLong:
                return
            except OSError as error:
                if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
                    raise  # of the disk
                raise interruption(error, request.repository) from error
            except Exception as error:  # the client does not say which library talks HTTP
                raise interruption(error, request.repository) from error

    def _fetch_over_xet(self, url: str, partial: Path, file: RemoteFile) -> bool:
        """Whether all of the file is in `partial` now. Xet cannot continue a partial file."""
        found = self._metadata(url) if self._uses_xet else None
        if found is None or found.xet_file_data is None:
            return False
        unordered = self._cache.unordered_partial(file)
        try:
            file_download.xet_get(
                incomplete_path=unordered,
                xet_file_data=found.xet_file_data,
                headers=self._headers,
                expected_size=file.num_bytes,
            )
            unordered.replace(partial)
        except Exception as error:  # noqa: BLE001 - whatever fails in Xet, HTTP has the same file
            log.warning("%s: Xet failed, continuing over HTTP: %s", file.path, error)
            self._uses_xet = False
            unordered.unlink(missing_ok=True)
            return False
        return True

    def _metadata(self, url: str) -> HfFileMetadata | None:
        """What the hub says about a file, such as its place in Xet; None where a mirror does not."""
        try:
            return get_hf_file_metadata(url, headers=self._headers, endpoint=self._request.endpoint)
        except Exception as error:  # noqa: BLE001 - the request for the contents finds out what is wrong
            log.debug("no metadata of %s: %s", url, error)
            return None


class _TooLong(Exception):
    """A server sends more than it listed."""


class _BoundedFile(io.FileIO):
    """Takes one byte more than `num_bytes`, however much a server sends; what follows raises _TooLong."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(path, "r+")
        self._max_bytes = num_bytes + 1

    def write(self, data: Buffer) -> int:
        view = memoryview(data)
        kept = view[: self._max_bytes - self.tell()]
        while kept:
            kept = kept[super().write(kept) :]
        if self.tell() == self._max_bytes:
            raise _TooLong
        return len(view)


def _digest(partial: Path, file: RemoteFile) -> str:
    """The hub's digest of the file, whose bytes are on the disk when this returns."""
    found = hashlib.sha256()
    if file.is_git_blob:
        found = hashlib.sha1(b"blob %d\0" % partial.stat().st_size, usedforsecurity=False)
    with partial.open("r+b") as data:
        while chunk := data.read(_CHUNK_BYTES):
            found.update(chunk)
        # A blob must be complete under its name, even after a power failure.
        os.fsync(data.fileno())
    return found.hexdigest()
