"""The hub's listing of a repository at one commit: files, sizes and digests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cortex.neuron.weights.directory import parse_json_object
from cortex.neuron.weights.errors import HubError, Malformed

MAX_LISTING_BYTES: Final = 64 << 20
_MAX_FILE_BYTES: Final = 1 << 62
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


def parse_listing(raw: bytes, endpoint: str) -> Listing:
    """The hub's response as a listing in which every path, size and digest is valid. Raises HubError."""
    if len(raw) > MAX_LISTING_BYTES:
        raise HubError(f"{endpoint} sent a listing of more than {MAX_LISTING_BYTES >> 20} MiB; check HF_ENDPOINT")
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
    if type(num_bytes) is not int or not 0 <= num_bytes <= _MAX_FILE_BYTES:
        raise ValueError(f"the size {str(num_bytes)[:80]}")
    if not isinstance(path, str):
        raise TypeError("a path that is no text")
    parts = path.split("/")
    if not all(parts) or ".." in parts or "." in parts or "\\" in path or not path.isprintable():
        raise ValueError(f"the path {path[:80]!r}")
    return RemoteFile(path, num_bytes, digest)
