"""The hub's listing of a repository at one commit: files, sizes and digests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from cortex.neuron.weights.directory import parse_json_object
from cortex.neuron.weights.errors import HubError, Malformed

MAX_LISTING_BYTES: Final = 64 << 20
_MAX_FILE_BYTES: Final = 1 << 62
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")


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
        commit = checked_commit(_typed(body, "sha", str, ""))
        siblings = _typed(body, "siblings", list, "")
        files = [_file(sibling, f"siblings[{position}]") for position, sibling in enumerate(siblings)]
    except (Malformed, ValueError) as error:
        raise HubError(f"{endpoint} did not respond like a hub ({error}); check HF_ENDPOINT") from error
    return Listing(commit, {file.path: file for file in files})


def _typed(values: Any, name: str, kind: type[T], place: str) -> T:
    """The member `name` of an object. Raises ValueError with its place for a value of another type."""
    where = f"{place}.{name}".lstrip(".")
    if not isinstance(values, dict):
        raise ValueError(f"{place} is no object")
    value = values.get(name)
    if type(value) is not kind:  # a bool is no number
        raise ValueError(f"{where} is {type(value).__name__}, not {kind.__name__}")
    return value


def _file(sibling: Any, place: str) -> RemoteFile:
    path = _typed(sibling, "rfilename", str, place)
    is_large = sibling.get("lfs") is not None
    source, place = (sibling["lfs"], f"{place}.lfs") if is_large else (sibling, place)
    digest = _typed(source, "sha256" if is_large else "blobId", str, place)
    if not (_SHA256 if is_large else _COMMIT).fullmatch(digest):
        raise ValueError(f"the digest {digest[:80]!r} of {path[:80]!r}")
    return checked_file(path, _typed(source, "size", int, place), digest)


def checked_commit(commit: str) -> str:
    """Raises ValueError for what is none."""
    if not _COMMIT.fullmatch(commit):
        raise ValueError(f"the commit {commit[:80]!r}")
    return commit


def checked_file(path: str, num_bytes: int, digest: str) -> RemoteFile:
    """Raises ValueError for what no repository has, such as a path that leads out of it."""
    if not (_SHA256.fullmatch(digest) or _COMMIT.fullmatch(digest)):
        raise ValueError(f"the digest {digest[:80]!r} of {path[:80]!r}")
    if not 0 <= num_bytes <= _MAX_FILE_BYTES:
        raise ValueError(f"the size {str(num_bytes)[:80]} of {path[:80]!r}")
    parts = path.split("/")
    if not all(parts) or ".." in parts or "." in parts or "\\" in path or not path.isprintable():
        raise ValueError(f"the path {path[:80]!r}")
    return RemoteFile(path, num_bytes, digest)
