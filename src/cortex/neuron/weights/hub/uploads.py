"""Files that clients send instead of having them downloaded: each is kept under its digest, next to the repositories of
the cache, until a repository is made of it. These functions block."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from cortex.neuron.weights.errors import FilesMissing, Malformed
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.neuron.weights.hub.listing import checked_file
from cortex.neuron.weights.hub.local import commit_of

_KEPT_S: Final = 24 * 3600.0
"""Uploads of which no model was made within this time are deleted with the next upload."""


def _folder(cache: Path) -> Path:
    return cache / ".uploads"


def find(cache: Path, digest: str) -> Path | None:
    """A file that was uploaded, or that a repository has."""
    others = cache.glob(f"models--*/blobs/{digest}")
    return next((path for path in (_folder(cache) / digest, *others) if path.is_file()), None)


def store(cache: Path, digest: str, chunks: Iterable[bytes]) -> None:
    """Keep a file. Raises Malformed for one with another SHA-256 than `digest`, and OSError."""
    folder = _folder(cache)
    folder.mkdir(parents=True, exist_ok=True)
    _delete_old(folder)
    draft = folder / f"{uuid.uuid4().hex}.incomplete"
    found = hashlib.sha256()
    try:
        with draft.open("wb") as file:
            for chunk in chunks:
                found.update(chunk)
                file.write(chunk)
        if found.hexdigest() != digest:
            raise Malformed(f"the file has the SHA-256 {found.hexdigest()}, not {digest}")
        draft.replace(folder / digest)
    finally:
        draft.unlink(missing_ok=True)


def _delete_old(folder: Path) -> None:
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > _KEPT_S:
                file.unlink()


def assemble(cache: Path, repository: str, digests: Mapping[str, str]) -> int:
    """Make a repository of files that are here, by path; returns their bytes. Raises ValueError for a path that leads
    out of it, FilesMissing and OSError."""
    target = RepositoryCache(cache, repository)
    uploads: dict[str, Path] = {}
    for path, digest in digests.items():
        if (found := find(cache, digest)) is None:
            raise FilesMissing(f"{path} was not uploaded")
        uploads[path] = found
    files = [checked_file(path, upload.stat().st_size, digests[path]) for path, upload in uploads.items()]
    commit = commit_of(files)
    for file in files:
        blob = target.blob(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.link(uploads[file.path], blob)  # other repositories may be made of it, too
        target.link(commit, file)
    target.remember("main", commit)
    return sum(file.num_bytes for file in files)


def drop(cache: Path, digests: Iterable[str]) -> None:
    """Forget files that a repository was made of, which has them now."""
    for digest in digests:
        (_folder(cache) / digest).unlink(missing_ok=True)
