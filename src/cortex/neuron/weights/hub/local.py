"""A model at a path as a repository, from which other nodes get its files. Its functions block."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cortex.neuron.weights.gguf.towers import is_projector
from cortex.neuron.weights.hub.listing import Listing, RemoteFile, checked_file
from cortex.neuron.weights.hub.selection import COMPANION, parts_of

MAX_DEPTH: Final = 2
_CHUNK_BYTES: Final = 1 << 20
_Stamp = tuple[int, int, int]
"""Inode, size and time of the last change."""


class LocalRepository:
    """The listing and the files, as `RepositoryCache` has them. A file is read once for its digest, and again only
    after it has changed. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._digests: dict[Path, tuple[_Stamp, str]] = {}
        self._is_closed = False

    def close(self) -> None:
        """Ends the listings that are being read."""
        self._is_closed = True

    def listing(self) -> Listing | None:
        """None where the path has no files of a model, or they cannot be read."""
        folder = self._path if self._path.is_dir() else self._path.parent
        with self._lock:
            try:
                files = [
                    checked_file(path.relative_to(folder).as_posix(), path.stat().st_size, self._digest(path))
                    for path in sorted(self._files())
                ]
            except (OSError, ValueError):
                return None
        return Listing(commit_of(files), {file.path: file for file in files}) if files else None

    def open_blob(self, digest: str) -> int:
        """A descriptor of a listed file that has not changed. Raises FileNotFoundError, and OSError where it cannot be
        read."""
        for path, (stamp, known) in list(self._digests.items()):
            if known == digest:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if _stamp(os.fstat(descriptor)) == stamp:
                    return descriptor
                os.close(descriptor)
        raise FileNotFoundError(digest)

    def _files(self) -> list[Path]:
        if not self._path.is_dir():
            towers = [path for path in self._path.parent.glob("*.gguf") if is_projector(path.name)]
            return [*(self._path.parent / name for name in parts_of(self._path.name)), *towers]
        found = []
        for place, folders, names in os.walk(self._path):
            here = Path(place)
            depth = len(here.relative_to(self._path).parts)
            folders[:] = [name for name in folders if depth < MAX_DEPTH and not name.startswith(".")]
            for path in (here / name for name in names):
                relative = path.relative_to(self._path).as_posix()
                is_weights = not depth and path.suffix in (".safetensors", ".gguf")
                if (is_weights or COMPANION.fullmatch(relative)) and path.is_file():
                    found.append(path)
        return found

    def _digest(self, path: Path) -> str:
        with path.open("rb", buffering=0) as file:
            stamp = _stamp(os.fstat(file.fileno()))
            if (known := self._digests.get(path)) is not None and known[0] == stamp:
                return known[1]
            found, view = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
            while count := file.readinto(view):
                found.update(view[:count])
                if self._is_closed:
                    raise OSError("the node ends")
            if _stamp(os.fstat(file.fileno())) != stamp:
                raise OSError(f"{path.name} changes")
        self._digests[path] = stamp, found.hexdigest()
        return found.hexdigest()


def commit_of(files: Iterable[RemoteFile]) -> str:
    """The name of a snapshot of these files where no hub has named it."""
    listed = "".join(f"{file.path}\0{file.digest}\n" for file in sorted(files, key=lambda file: file.path))
    return hashlib.sha1(listed.encode(), usedforsecurity=False).hexdigest()


def _stamp(facts: os.stat_result) -> _Stamp:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
