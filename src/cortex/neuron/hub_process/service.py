"""The functions of the hub process: the listing of a repository, and its files in the cache, with the hub's client.

The client's own `hf_hub_download` drops a partial file when a download fails and checks no digest. So its transfers,
over Xet or HTTP, are used file by file: partial files are continued, and a file has its name in the cache only once
its digest is that of the listing. What the hub does not give is returned as a `Failed`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from huggingface_hub import HfFileMetadata, constants, file_download, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # its documentation names it here

from cortex.neuron.hub_process.neighbours import NeighbourFailed, Neighbours
from cortex.neuron.hub_process.protocol import Failed, FetchFiles
from cortex.neuron.weights.errors import DownloadCorrupt, HubError, HubUnreachable, NoDiskSpace, NotOnHub
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.neuron.weights.hub.listing import MAX_LISTING_BYTES, Listing, RemoteFile, parse_listing
from cortex.wire.node.neighbours import Neighbour

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

log = logging.getLogger(__name__)

_NUM_LISTING_ATTEMPTS: Final = 3
_BACKOFF_S: Final = 0.5
_MAX_BACKOFF_S: Final = 15.0
_TIMEOUT_S: Final = 20.0
_SECONDS: Final = re.compile(r"\s*(\d{1,9})\s*")
_RESET: Final = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})")
_NUM_FILES_AT_ONCE: Final = 8
_CHUNK_BYTES: Final = 256 << 10
_MAX_ATTEMPTS_WITHOUT_PROGRESS: Final = 6
"""Within each, the client repeats what a connection interrupts, and waits as long as a busy hub says."""
_MAX_CORRUPT_DOWNLOADS: Final = 2

# What has not filled a chunk is lost when a connection ends.
constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES


def functions() -> dict[str, Callable[..., Any]]:
    client_log = logging.getLogger("huggingface_hub")  # its own handler writes in a format of its own
    client_log.handlers.clear()
    client_log.propagate = True
    return {"list_files": list_files, "list_shared": list_shared, "fetch": fetch}


def list_files(endpoint: str, repository: str, revision: str) -> Listing | Failed:
    """The listing of a repository."""
    return _answered(lambda: fetch_listing(endpoint, repository, revision))


def list_shared(neighbours: tuple[Neighbour, ...], repository: str, revision: str) -> Listing | Failed | None:
    """The listing of the first neighbour that has one."""
    return _answered(lambda: Neighbours(neighbours, repository).listing(revision))


def fetch(request: FetchFiles) -> Failed | None:
    """Files in the cache, verified and linked into the commit's snapshot."""
    return _answered(lambda: fetch_files(request))


def _answered(ask: Callable[[], T]) -> T | Failed:
    try:
        return ask()
    except HubError as error:
        return Failed.of(error)
    except Exception as error:
        log.exception("a request to the hub failed unexpectedly")
        return Failed.of(HubError(f"{type(error).__name__}: {error}; see the node's log"))


class Interrupted(Exception):
    """The request failed; a retry may help, after `retry_after_s` where the hub named a time."""

    def __init__(self, reason: str, remedy: str = "check the network or HF_ENDPOINT", retry_after_s: float = 0) -> None:
        super().__init__(reason)
        self.remedy = remedy
        self.retry_after_s = retry_after_s


def fetch_listing(endpoint: str, repository: str, revision: str) -> Listing:
    """Raises NotOnHub when the hub rejects the request, HubUnreachable when there is no usable response."""
    url = f"{endpoint}/api/models/{repository}/revision/{urllib.parse.quote(revision, safe='')}?blobs=true"
    num_failed = 0
    while True:
        try:
            return parse_listing(_read(url, repository), endpoint)
        except Interrupted as error:
            num_failed += 1
            if num_failed == _NUM_LISTING_ATTEMPTS or error.retry_after_s > _MAX_BACKOFF_S:
                raise HubUnreachable(f"{endpoint} cannot be used ({error}); {error.remedy}") from error
            time.sleep(max(error.retry_after_s, _BACKOFF_S * 2 ** (num_failed - 1)))


def _read(url: str, repository: str) -> bytes:
    """The body of the response, up to one byte over the limit. Raises NotOnHub or Interrupted."""
    body = bytearray()
    try:
        with get_session().stream("GET", url, headers=build_hf_headers(), timeout=_TIMEOUT_S) as response:
            if response.status_code != 200:
                raise rejection(response.status_code, response.headers, repository)
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_LISTING_BYTES:
                    break
    except (HubError, Interrupted):
        raise
    except Exception as error:  # the client does not say which library talks HTTP
        raise interruption(error, repository) from error
    return bytes(body)


def rejection(status: int, headers: Mapping[str, str], repository: str) -> NotOnHub | Interrupted:
    """The exception for an error response, whose headers have names in any case. NotOnHub: a retry would not help."""
    code = headers.get("x-error-code")
    if code == "GatedRepo":
        return NotOnHub(f"{repository} is gated; accept its terms on the hub and set HF_TOKEN")
    if code == "RevisionNotFound":
        return NotOnHub(f"{repository} has no such revision; check the part after the @")
    if status in (401, 403, 404):
        return NotOnHub(
            f"the hub has no {repository} or does not show it ({status}); "
            "check the name, or set HF_TOKEN for a private repository"
        )
    wait_s = _retry_after_s(headers)
    if status == 429:
        soon = f"try again in {wait_s:.0f} s" if wait_s else "try again later"
        return Interrupted("too many requests, 429", f"{soon}, or set HF_TOKEN for a higher limit", wait_s)
    return Interrupted(f"the hub responded with {status}", retry_after_s=wait_s)


def interruption(error: Exception, repository: str) -> NotOnHub | Interrupted:
    """The exception for an error of the hub's client, by whatever library that talks HTTP."""
    response = getattr(error, "response", None)
    if response is not None:
        return rejection(response.status_code, response.headers, repository)
    return Interrupted(str(error).partition("\n")[0] or type(error).__name__)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """The time until the hub accepts requests again, as `retry-after` or `ratelimit: "api";r=0;t=55` name it."""
    match = _SECONDS.fullmatch(headers.get("retry-after", "")) or _RESET.search(headers.get("ratelimit", ""))
    return float(match[1]) if match else 0.0


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
        self._neighbours = Neighbours(request.neighbours, request.repository)
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
        num_corrupt = 0
        while num_corrupt < _MAX_CORRUPT_DOWNLOADS:
            self._complete(partial, file)
            if partial.stat().st_size == file.num_bytes and _digest(partial, file) == file.digest:
                partial.replace(self._cache.blob(file))
                return
            partial.unlink()
            if not self._neighbours.distrust_senders(file):
                num_corrupt += 1
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
        try:
            self._neighbours.fetch(partial, file, is_last_resort=not request.uses_hub)
            return
        except NeighbourFailed as failure:
            position = partial.stat().st_size
            if not request.uses_hub:
                raise Interrupted(str(failure), "start a node that has it, or let this one reach the hub") from None
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
