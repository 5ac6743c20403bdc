"""The hub's listing of a repository at one commit: files, sizes and digests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

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


class _Large(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class _Sibling(msgspec.Struct, frozen=True, rename="camel"):
    rfilename: str
    blob_id: str | None = None
    size: int | None = None
    lfs: _Large | None = None


class _Body(msgspec.Struct, frozen=True):
    sha: str
    siblings: list[_Sibling]


def parse_listing(raw: bytes, endpoint: str) -> Listing:
    """The hub's response as a listing in which every path, size and digest is valid. Raises HubError."""
    if len(raw) > MAX_LISTING_BYTES:
        raise HubError(f"{endpoint} sent a listing of more than {MAX_LISTING_BYTES >> 20} MiB; check HF_ENDPOINT")
    try:
        body = msgspec.convert(parse_json_object(raw, Path(endpoint)), _Body)
        if not _COMMIT.fullmatch(body.sha):
            raise ValueError(f"the commit {body.sha[:80]!r}")
        files = [_file(sibling) for sibling in body.siblings]
    except (Malformed, ValueError) as error:  # the latter also for a wrong type, with its place
        raise HubError(f"{endpoint} did not respond like a hub ({error}); check HF_ENDPOINT") from error
    return Listing(body.sha, {file.path: file for file in files})


def _file(sibling: _Sibling) -> RemoteFile:
    path, lfs = sibling.rfilename, sibling.lfs
    digest, num_bytes = (lfs.sha256, lfs.size) if lfs else (sibling.blob_id or "", sibling.size)
    if not (_SHA256 if lfs else _COMMIT).fullmatch(digest):
        raise ValueError(f"the digest {digest[:80]!r} of {path[:80]!r}")
    if num_bytes is None or not 0 <= num_bytes <= _MAX_FILE_BYTES:
        raise ValueError(f"the size {str(num_bytes)[:80]} of {path[:80]!r}")
    parts = path.split("/")
    if not all(parts) or ".." in parts or "." in parts or "\\" in path or not path.isprintable():
        raise ValueError(f"the path {path[:80]!r}")
    return RemoteFile(path, num_bytes, digest)
