"""A model at a path as a repository, from which other nodes get its files. Its functions block."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cortex.neuron.weights.gguf.towers import is_projector
from cortex.neuron.weights.hub.file_digests import FileDigests, stamp_of
from cortex.neuron.weights.hub.listing import Listing, RemoteFile, checked_file
from cortex.neuron.weights.hub.selection import COMPANION, parts_of

MAX_DEPTH: Final = 2


class LocalRepository:
    """The listing and the files, as `RepositoryCache` has them. Safe to use from several threads."""

    def __init__(self, path: Path, digests: FileDigests) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._digests = digests
        self._listed: dict[str, Path] = {}
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
                    for path in sorted(model_files(self._path))
                ]
            except (OSError, ValueError):
                return None
            self._listed = {file.digest: folder / file.path for file in files}
        return Listing(commit_of(files), {file.path: file for file in files}) if files else None

    def open_blob(self, digest: str) -> int:
        """A descriptor of a listed file that has not changed. Raises FileNotFoundError, and OSError where it cannot be
        read."""
        if (path := self._listed.get(digest)) is not None:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            is_sent = False
            try:
                opened, named = os.fstat(descriptor), path.stat()
                is_sent = self._digests.known(path) == digest and stamp_of(opened) == stamp_of(named)
            finally:
                if not is_sent:
                    os.close(descriptor)
            if is_sent:
                return descriptor
        raise FileNotFoundError(digest)

    def _digest(self, path: Path) -> str:
        return self._digests.read(path, self._check_open)

    def _check_open(self, _seconds: float) -> None:
        if self._is_closed:
            raise OSError("the node ends")


def model_files(path: Path) -> list[Path]:
    """The files of the model at `path`, a folder or a GGUF file."""
    if not path.is_dir():
        towers = [each for each in path.parent.glob("*.gguf") if is_projector(each.name)]
        return [*(path.parent / name for name in parts_of(path.name)), *towers]
    found = []
    for place, folders, names in os.walk(path):
        here = Path(place)
        depth = len(here.relative_to(path).parts)
        folders[:] = [name for name in folders if depth < MAX_DEPTH and not name.startswith(".")]
        for each in (here / name for name in names):
            relative = each.relative_to(path).as_posix()
            is_weights = not depth and each.suffix in (".safetensors", ".gguf")
            if (is_weights or COMPANION.fullmatch(relative)) and each.is_file():
                found.append(each)
    return found


def commit_of(files: Iterable[RemoteFile]) -> str:
    """The name of a snapshot of these files where no hub has named it."""
    listed = "".join(f"{file.path}\0{file.digest}\n" for file in sorted(files, key=lambda file: file.path))
    return hashlib.sha1(listed.encode(), usedforsecurity=False).hexdigest()
