"""The SHA-256 of whole files, each computed once until the file changes. Functions block."""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 1 << 20
_BLOB: Final = re.compile(r"[0-9a-f]{64}")
_Stamp = tuple[int, int, int]
"""Inode, size and time of the last change."""


class FileDigests:
    """Safe to use from several threads."""

    def __init__(self, kept: Path | None = None, *, small_bytes: int = 16 << 20) -> None:
        """`kept`: the file in which the digests of large files outlive the program. `small_bytes`: the size up to which
        a file may be read at any time."""
        self._small_bytes = small_bytes
        self._kept = kept
        self._known: dict[str, tuple[_Stamp, str]] = _read(self._kept)

    def known(self, path: Path) -> str | None:
        """Without reading the file: the name of a blob in the hub's cache, which downloads verify, or the digest of an
        earlier read. Raises OSError."""
        blob = path.resolve(strict=True)
        if blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name):
            return blob.name
        stamp, digest = self._known.get(str(blob), (None, None))
        return digest if stamp == stamp_of(blob.stat()) else None

    def read(self, path: Path, on_chunk: Callable[[float], None], *, is_direct: bool = False) -> str:
        """The digest, read unless it is known. `on_chunk`: called with the seconds that each chunk took; may wait, or
        raise. `is_direct`: the page cache keeps what it has, and gets nothing of the file. Raises OSError."""
        if (known := self.known(path)) is not None:
            return known
        path = path.resolve()
        descriptor = _opened(path, is_direct)
        try:
            stamp, found = stamp_of(os.fstat(descriptor)), hashlib.sha256()
            with mmap.mmap(-1, _CHUNK_BYTES) as memory, memoryview(memory) as view:  # direct reads need aligned memory
                began_s = time.monotonic()
                while count := os.readv(descriptor, [view]):
                    found.update(view[:count])
                    on_chunk(time.monotonic() - began_s)
                    began_s = time.monotonic()
            if stamp_of(os.fstat(descriptor)) != stamp:
                raise OSError(f"{path.name} changes")
        finally:
            os.close(descriptor)
        self._known[str(path)] = stamp, found.hexdigest()
        if stamp[1] > self._small_bytes:
            self._keep()
        return found.hexdigest()

    def of_files(self, files: Iterable[Path]) -> str:
        """Equal for the same files under any names. Small ones are read; empty if a large one would have to be. Raises
        OSError."""
        found = []
        for path in files:
            digest = self.known(path)
            if digest is None and path.stat().st_size <= self._small_bytes:
                digest = self.read(path, lambda _: None)
            if digest is None:
                return ""
            found.append(digest)
        return hashlib.sha256("".join(sorted(found)).encode()).hexdigest() if found else ""

    def _keep(self) -> None:
        large = {path: known for path, known in list(self._known.items()) if known[0][1] > self._small_bytes}
        try:
            if self._kept is not None:
                self._kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                fresh = self._kept.with_name(f".{self._kept.name}.{uuid.uuid4().hex}")
                fresh.write_text(json.dumps(large))
                fresh.replace(self._kept)
        except OSError as error:
            log.warning("the digests of files are not kept: %s", error.strerror or error)


def stamp_of(facts: os.stat_result) -> _Stamp:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _opened(path: Path, is_direct: bool) -> int:
    if is_direct:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file system without direct reads
            pass
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _read(kept: Path | None) -> dict[str, tuple[_Stamp, str]]:
    """The digests of files that still exist; none if the file is damaged."""
    try:
        found = {} if kept is None else json.loads(kept.read_text())
        return {
            path: ((int(inode), int(num_bytes), int(changed)), str(digest))
            for path, ((inode, num_bytes, changed), digest) in found.items()
            if os.path.exists(path)
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
