"""Disk use of the hub's cache, and deletion of models from it. These functions block."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Final

from cortex.neuron.weights.errors import CheckpointError, FilesMissing
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.neuron.weights.hub.selection import select, variants
from cortex.neuron.weights.hub.source import HubSource

_PREFIX: Final = "models--"


def repository_bytes(cache: Path) -> dict[str, int]:
    """The bytes of each repository in the cache, incomplete files included."""
    try:
        folders = [folder for folder in cache.iterdir() if folder.name.startswith(_PREFIX)]
    except OSError:
        return {}
    return {_repository(folder): _bytes_in(folder / "blobs") for folder in folders}


def files_of(cache: Path, source: HubSource) -> frozenset[Path]:
    """The snapshot files that only this model has: the GGUF files of its quantisation, or the whole repository without
    one. Dense weights belong to no quantisation: other models may be quantised from them, too. Quantisations share the
    file of the vision tower, which belongs to the last one."""
    repository = RepositoryCache(cache, source.repository)
    found: set[Path] = set()
    for snapshot in _snapshots(repository):
        paths = repository.paths_in(snapshot.name)
        if source.quant is not None:
            try:
                own = select(source.repository, paths, source.quant, objection=lambda _: "dense")
            except CheckpointError:
                continue
            others = {path for each in variants(paths).values() if each.entry != own.entry for path in each.paths}
            paths = [path for path in own.paths if path not in others]
        found.update(snapshot / path for path in paths)
    return frozenset(found)


def delete(cache: Path, source: HubSource) -> int:
    """Delete a model's files; returns the bytes that are free again. Raises FilesMissing or OSError.

    Without a quantisation the whole repository goes, incomplete downloads included. Only names inside `cache` are
    touched: links that lead out of it are removed, not followed.
    """
    repository = RepositoryCache(cache, source.repository)
    if repository.root.is_symlink() or not repository.root.is_dir():
        raise FilesMissing(f"the cache {cache} has no files of {source.repository}")
    if source.quant is None:
        num_bytes = _bytes_in(repository.root / "blobs")
        # Renamed first, so that no reader finds half of a model.
        doomed = repository.root.with_name(f".deleted-{uuid.uuid4().hex}")
        repository.root.rename(doomed)
        shutil.rmtree(doomed)
        return num_bytes
    files = files_of(cache, source)
    if not files:
        raise FilesMissing(f"the cache {cache} has no {source.quant} of {source.repository}")
    return _delete_files(repository, files)


def _delete_files(repository: RepositoryCache, files: Collection[Path]) -> int:
    """Delete snapshot files, and the blobs that nothing else links to."""
    blobs = repository.root / "blobs"
    candidates = {Path(os.path.realpath(file)) for file in files if file.is_symlink()}
    num_bytes = sum(file.stat().st_size for file in files if not file.is_symlink())
    for file in files:
        file.unlink()
    linked = {
        Path(os.path.realpath(path))
        for snapshot in _snapshots(repository)
        for path in snapshot.rglob("*")
        if path.is_symlink()
    }
    for blob in candidates - linked:
        if blob.parent == Path(os.path.realpath(blobs)):
            num_bytes += blob.stat().st_size
            blob.unlink()
    return num_bytes


def _snapshots(repository: RepositoryCache) -> list[Path]:
    try:
        return [folder for folder in (repository.root / "snapshots").iterdir() if folder.is_dir()]
    except OSError:
        return []


def _bytes_in(folder: Path) -> int:
    """The bytes of the files in one directory."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.is_file())
    except OSError:
        return 0


def _repository(folder: Path) -> str:
    return folder.name.removeprefix(_PREFIX).replace("--", "/")
