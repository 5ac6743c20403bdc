"""The hub's listing of a repository at one commit: files, sizes and digests."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cortex.neuron.weights.directory import parse_json_object
from cortex.neuron.weights.errors import HubError, HubUnreachable, Malformed, NotOnHub
from cortex.neuron.weights.hub.source import HubSource
from cortex.neuron.weights.hub.transport import HubResponse, Interrupted, Transport

_MAX_LISTING_BYTES: Final = 64 << 20
_NUM_ATTEMPTS: Final = 3
BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 15.0
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the repository. `digest` is also its name in the cache."""

    path: str
    num_bytes: int
    digest: str
    """SHA-256 of the contents for large files, git's SHA-1 of the blob for small ones."""

    @property
    def is_git_blob(self) -> bool:
        return len(self.digest) == 40


@dataclass(frozen=True, slots=True)
class Listing:
    commit: str
    files: Mapping[str, RemoteFile]


def fetch_listing(transport: Transport, source: HubSource) -> Listing:
    """Request the listing. Raises NotOnHub when the hub rejects it, HubUnreachable when there is no usable response."""
    revision = urllib.parse.quote(source.revision, safe="")
    url = f"{transport.endpoint}/api/models/{source.repository}/revision/{revision}?blobs=true"
    num_failed = 0
    while True:
        try:
            with transport.get(url, {}) as response:
                if response.status != 200:
                    raise rejection(response, source.repository)
                return _parse(response.read(_MAX_LISTING_BYTES + 1), transport.endpoint)
        except Interrupted as error:
            num_failed += 1
            if num_failed == _NUM_ATTEMPTS or error.retry_after_s > MAX_BACKOFF_S:
                raise HubUnreachable(f"{transport.endpoint} cannot be used ({error}); {error.remedy}") from error
            transport.pause(max(error.retry_after_s, BACKOFF_S * 2 ** (num_failed - 1)))


def rejection(response: HubResponse, repository: str) -> NotOnHub | Interrupted:
    """The exception for an error response. NotOnHub: a retry would not change it."""
    code = response.header("x-error-code")
    if code == "GatedRepo":
        return NotOnHub(f"{repository} is gated; accept its terms on the hub and set HF_TOKEN")
    if code == "RevisionNotFound":
        return NotOnHub(f"{repository} has no such revision; check the part after the @")
    if response.status in (401, 403, 404):
        return NotOnHub(
            f"the hub has no {repository} or does not show it ({response.status}); "
            "check the name, or set HF_TOKEN for a private repository"
        )
    if response.status == 429:
        wait_s = response.retry_after_s
        soon = f"try again in {wait_s:.0f} s" if wait_s else "try again later"
        return Interrupted("too many requests, 429", f"{soon}, or set HF_TOKEN for a higher limit", wait_s)
    return Interrupted(f"the hub responded with {response.status}", retry_after_s=response.retry_after_s)


def _parse(raw: bytes, endpoint: str) -> Listing:
    if len(raw) > _MAX_LISTING_BYTES:
        raise HubError(f"{endpoint} sent a listing of more than {_MAX_LISTING_BYTES >> 20} MiB; check HF_ENDPOINT")
    try:
        body = parse_json_object(raw, Path(endpoint))
        commit, siblings = body["sha"], body["siblings"]
        if not _COMMIT.fullmatch(commit):
            raise ValueError(f"the commit {commit[:80]!r}")
        files = [_file(sibling) for sibling in siblings]
    except (Malformed, KeyError, TypeError, ValueError) as error:
        raise HubError(f"{endpoint} did not respond like a hub ({error}); check HF_ENDPOINT") from error
    return Listing(commit, {file.path: file for file in files})


def _file(sibling: Mapping[str, Any]) -> RemoteFile:
    path, lfs = sibling["rfilename"], sibling.get("lfs")
    digest, num_bytes = (lfs["sha256"], lfs["size"]) if lfs else (sibling["blobId"], sibling["size"])
    if not (_SHA256 if lfs else _COMMIT).fullmatch(digest):
        raise ValueError(f"the digest {digest[:80]!r}")
    if type(num_bytes) is not int or num_bytes < 0:
        raise ValueError(f"the size {num_bytes!r}")
    parts = path.split("/")
    if not all(parts) or ".." in parts or "." in parts or "\\" in path or "\0" in path:
        raise ValueError(f"the path {path[:80]!r}")
    return RemoteFile(path, num_bytes, digest)
