"""The hub's cache layout on disk: `blobs/<digest>`, `snapshots/<commit>/<path>` linking to them, `refs/<revision>`."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cortex.neuron.weights.directory import read_json
from cortex.neuron.weights.errors import CheckpointError, HubError, HubUnreachable, Malformed
from cortex.neuron.weights.hub.listing import Listing, RemoteFile
from cortex.neuron.weights.hub.selection import SHARD, Objection, Selection, gguf_of, missing_parts, select
from cortex.neuron.weights.hub.source import HubSource

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def cache_directory(environment: Mapping[str, str]) -> Path:
    """The directory of the hub's cache, from the environment."""
    if directory := environment.get("HF_HUB_CACHE"):
        return Path(directory).expanduser()
    return hub_home(environment) / "hub"


def hub_home(environment: Mapping[str, str]) -> Path:
    """The directory in which the hub's own tools keep the cache and the token."""
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser()
    return Path(environment.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface"


class RepositoryCache:
    """One repository in the cache. Files under `snapshots` are always complete and verified."""

    def __init__(self, cache_directory: Path, repository: str) -> None:
        folder = f"models--{repository.replace('/', '--')}"
        self.root = cache_directory / folder
        self._locks = cache_directory / ".locks" / folder

    def blob(self, file: RemoteFile) -> Path:
        return self.root / "blobs" / file.digest

    def partial(self, file: RemoteFile) -> Path:
        """The path of an incomplete file. It is kept after a failed download, so that the next one continues it."""
        return self.root / "blobs" / f"{file.digest}.incomplete"

    def unordered_partial(self, file: RemoteFile) -> Path:
        """The path of an incomplete file whose parts arrive in any order, so that no download can continue it."""
        return self.root / "blobs" / f"{file.digest}.xet.incomplete"

    def snapshot(self, commit: str) -> Path:
        return self.root / "snapshots" / commit

    def num_missing_bytes(self, file: RemoteFile) -> int:
        """The bytes of `file` that are not downloaded yet."""
        if self.blob(file).exists():
            return 0
        try:
            return max(0, file.num_bytes - self.partial(file).stat().st_size)
        except OSError:
            return file.num_bytes

    def num_present_bytes(self, file: RemoteFile) -> int:
        """The bytes of `file` that are on the disk, also in incomplete files."""
        if self.blob(file).exists():
            return file.num_bytes
        return max(_written_bytes(self.partial(file)), _written_bytes(self.unordered_partial(file)))

    def link(self, commit: str, file: RemoteFile) -> None:
        """Link the blob under the file's own name, atomically."""
        pointer = self.snapshot(commit) / file.path
        if pointer.exists() and pointer.samefile(self.blob(file)):
            return
        pointer.parent.mkdir(parents=True, exist_ok=True)
        temporary = pointer.with_name(f".{uuid.uuid4().hex}")
        temporary.symlink_to(os.path.relpath(self.blob(file), pointer.parent))
        temporary.replace(pointer)

    def remember(self, revision: str, commit: str) -> None:
        """Store the commit of `revision`. Call it once the snapshot is complete."""
        if self.commit_of(revision) == commit:
            return
        ref = self._ref(revision)
        if ref is None:
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = ref.with_name(f".{uuid.uuid4().hex}")
        temporary.write_text(commit)
        temporary.replace(ref)

    def commit_of(self, revision: str) -> str | None:
        """The commit of `revision` at the last download; None where the cache does not have it."""
        if _COMMIT.fullmatch(revision):
            return revision
        ref = self._ref(revision)
        try:
            commit = ref.read_text().strip() if ref is not None else ""
        except (OSError, ValueError):  # it is no text, or the name has a NUL
            return None
        return commit if _COMMIT.fullmatch(commit) else None

    def _ref(self, revision: str) -> Path | None:
        """The file of a revision; None for a name that would be outside, which git does not allow either."""
        root = self.root / "refs"
        parts = revision.split("/")
        return None if not {"", ".", ".."}.isdisjoint(parts) else root.joinpath(*parts)

    def paths_in(self, commit: str) -> list[str]:
        """The files of a snapshot whose contents exist."""
        snapshot = self.snapshot(commit)
        return sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())

    def listing(self, revision: str) -> Listing | None:
        """The complete files of `revision`, with the digests that name them here; None where the cache has none."""
        commit = self.commit_of(revision)
        if commit is None:
            return None
        found = {}
        for path in self.paths_in(commit):
            pointer = self.snapshot(commit) / path
            digest = pointer.readlink().name if pointer.is_symlink() else ""
            if _DIGEST.fullmatch(digest) and pointer.samefile(self.root / "blobs" / digest):
                found[path] = RemoteFile(path, pointer.stat().st_size, digest)
        return Listing(commit, found) if found else None

    def open_blob(self, digest: str) -> int:
        """A descriptor of a complete file. Raises FileNotFoundError, and OSError where it cannot be read."""
        if not _DIGEST.fullmatch(digest):
            raise FileNotFoundError(digest)
        descriptor = os.open(self.root / "blobs" / digest, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(digest)
        return descriptor

    @contextmanager
    def locked(self, file: RemoteFile) -> Iterator[None]:
        """Hold the lock of the file, shared by all processes that use this cache."""
        self._locks.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._locks / f"{file.digest}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _written_bytes(path: Path) -> int:
    """The bytes of a file without its holes; 0 if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return min(found.st_size, found.st_blocks * 512)


def in_directory(path: Path, quant: str | None) -> Path:
    """The GGUF file in a directory that is quantised as `quant`; the path itself where there is none."""
    if quant is None or not path.is_dir():
        return path
    found = gguf_of((entry.name for entry in path.iterdir()), quant)
    return path if found is None else path / found


def in_cache(cache: RepositoryCache, source: HubSource, objection: Objection, reason: HubError) -> Path:
    """The model in the cache. Raises `reason` where the cache has no complete one, and Malformed where its
    index cannot be read."""
    commit = cache.commit_of(source.revision)
    if commit is None:
        raise reason
    snapshot = cache.snapshot(commit)
    try:
        selection = select(source.repository, cache.paths_in(commit), source.quant, objection=objection)
        missing = missing_parts(selection) if selection.entry else _missing_shards(snapshot, selection)
    except Malformed:
        raise  # the model is there, and damaged
    except CheckpointError:
        raise reason from None
    if missing:
        raise HubUnreachable(f"{reason}; the cache holds only a part of the model ({missing[0]} is missing)")
    return snapshot / (selection.entry or "")


def _missing_shards(snapshot: Path, selection: Selection) -> list[str]:
    """The files of a safetensors model that its snapshot lacks."""
    needed = {"config.json"}
    if "model.safetensors.index.json" in selection.paths:
        weight_map = read_json(snapshot, "model.safetensors.index.json").get("weight_map")
        if isinstance(weight_map, Mapping):
            needed |= {str(shard) for shard in weight_map.values()}
    elif any(SHARD.fullmatch(path) for path in selection.paths):
        # Other tools store the commit before they have all its files. Sharded weights always have an index.
        needed.add("model.safetensors.index.json")
    return sorted(needed - set(selection.paths))
