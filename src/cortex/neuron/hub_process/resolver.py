"""Resolves a model name to files on disk, downloads them if necessary, and says what a repository offers."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cortex.neuron.hub_process.client import HubProcess
from cortex.neuron.hub_process.protocol import FetchFiles
from cortex.neuron.weights.errors import HubError, HubUnreachable, NoDiskSpace, NotOnHub
from cortex.neuron.weights.hub.cache import RepositoryCache, cache_directory, in_cache, in_directory
from cortex.neuron.weights.hub.listing import Listing, RemoteFile
from cortex.neuron.weights.hub.selection import Objection, missing_parts, select, variants
from cortex.neuron.weights.hub.source import HubSource, is_offline, parse_source
from cortex.wire.node.neighbours import Neighbour

_SPARE_DISK_BYTES: Final = 64 << 20

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes) on the calling thread; bytes done never fall."""


@dataclass(frozen=True, slots=True)
class FileSources:
    """Where files that the cache lacks come from: the neighbours first, then the hub."""

    neighbours: tuple[Neighbour, ...] = ()
    uses_hub: bool = True


def resolve(
    source: str,
    *,
    quant: str | None = None,
    objection: Objection = lambda _: None,
    progress: Progress,
    cancelled: Callable[[], bool],
    cache_dir: Path | None = None,
    offline: bool | None = None,
    sources: FileSources = FileSources(),
    environment: Mapping[str, str] = os.environ,
) -> Path:
    """The model directory or `.gguf` file that `source` names, downloaded first if necessary.

    `quant` and `objection` select the files of a repository as `select` describes it, unless `source` itself names a
    quantisation, and `quant` selects the GGUF file in a local directory.

    Blocks, so call it on a thread. Raises Cancelled soon after `cancelled()` becomes true. `environment` has the
    variables of the hub's own tools (`HF_HUB_CACHE`, `HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN`, `HF_ENDPOINT`, …). When
    the hub rejects the request or does not respond, a complete model in the cache is used, else what a neighbour has.
    Raises CheckpointError.
    """
    parsed = parse_source(source)
    if isinstance(parsed, Path):
        return in_directory(parsed, quant)
    if parsed.quant is None:
        parsed = replace(parsed, quant=quant)
    cache = RepositoryCache(cache_dir or cache_directory(environment), parsed.repository)
    if offline or (offline is None and is_offline(environment)):
        sources = replace(sources, uses_hub=False)
    if not sources.uses_hub and not sources.neighbours:
        reason = HubUnreachable(f"{parsed.repository} is not in the cache and the node is offline")
        return in_cache(cache, parsed, objection, reason)
    with HubProcess(environment, cancelled) as hub:
        found = _listing(hub, cache, parsed, objection, sources)
        if isinstance(found, Path):
            return found
        listing, sources = found
        selection = select(parsed.repository, listing.files, parsed.quant, objection=objection)
        if missing := missing_parts(selection):
            raise NotOnHub(f"{parsed.repository} lacks {missing[0]}, a part of the model; choose another quantisation")
        files = tuple(listing.files[path] for path in selection.paths)
        _download(hub, cache, parsed.repository, listing.commit, files, progress, sources)
    cache.remember(parsed.revision, listing.commit)
    return cache.snapshot(listing.commit) / (selection.entry or "")


def _listing(
    hub: HubProcess, cache: RepositoryCache, source: HubSource, objection: Objection, sources: FileSources
) -> tuple[Listing, FileSources] | Path:
    """What the model consists of, and where it comes from; or the complete model in the cache, if the hub does not say.
    Raises CheckpointError."""
    reason = HubError(
        f"no node that has {source.repository} can be reached; pull it from the hub, or start such a node"
    )
    if sources.uses_hub:
        try:
            return hub.list_files(source.repository, source.revision), sources
        except HubError as error:
            reason = error
    try:
        return in_cache(cache, source, objection, reason)
    except HubError:
        listing = hub.list_shared(sources.neighbours, source.repository, source.revision)
        if listing is None:
            raise
    return listing, replace(sources, uses_hub=False)


def _download(
    hub: HubProcess,
    cache: RepositoryCache,
    repository: str,
    commit: str,
    files: tuple[RemoteFile, ...],
    progress: Progress,
    sources: FileSources,
) -> None:
    _check_disk(cache, files)
    meter = _Meter(cache, files, progress)
    where = (str(cache.root.parent), sources.neighbours, sources.uses_hub)
    hub.fetch(FetchFiles(hub.endpoint, repository, commit, files, *where), meter.show)
    meter.show()


class _Meter:
    """Reports how much of the files is on the disk. Never falls."""

    def __init__(self, cache: RepositoryCache, files: Sequence[RemoteFile], progress: Progress) -> None:
        self._cache = cache
        self._incomplete = list(files)
        self._progress = progress
        self._total_bytes = sum(file.num_bytes for file in files)
        self._shown_bytes = -1

    def show(self) -> None:
        self._incomplete = [file for file in self._incomplete if not self._cache.blob(file).exists()]
        missing_bytes = sum(file.num_bytes - self._cache.num_present_bytes(file) for file in self._incomplete)
        done_bytes = self._total_bytes - missing_bytes
        if done_bytes > self._shown_bytes:
            self._shown_bytes = done_bytes
            self._progress(done_bytes, self._total_bytes)


def _check_disk(cache: RepositoryCache, files: Sequence[RemoteFile]) -> None:
    need = sum(cache.num_missing_bytes(file) for file in files)
    if not need:
        return
    try:
        cache.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HubError(f"cannot write to {cache.root}: {error.strerror}; check permissions or HF_HUB_CACHE") from error
    have = shutil.disk_usage(cache.root).free
    if need + _SPARE_DISK_BYTES > have:
        raise NoDiskSpace(
            f"the download needs {need / 1e9:.1f} GB, but {have / 1e9:.1f} GB are free on the disk of {cache.root}; "
            "free some space, or set HF_HUB_CACHE to another disk"
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of the model. `quant` is None for the repository's safetensors."""

    quant: str | None
    num_bytes: int
    num_files: int


@dataclass(frozen=True, slots=True)
class Offer:
    repository: str
    commit: str
    variants: tuple[Variant, ...]
    """The smallest first."""


class OfferRequest:
    """One question to the hub. `read` blocks, so call it on a thread; `abort` ends it from another one."""

    def __init__(self, source: str, environment: Mapping[str, str] = os.environ) -> None:
        """Raises FilesMissing, NotOnHub or HubUnreachable for a source about which the hub cannot be asked."""
        parsed = parse_source(source)
        if isinstance(parsed, Path):
            raise NotOnHub(f"{source} is a path on this node; name a repository of the hub, such as owner/name")
        if is_offline(environment):
            raise HubUnreachable(
                f"what {parsed.repository} offers is not known: the node is offline (HF_HUB_OFFLINE is set)"
            )
        self._source: HubSource = parsed
        self._environment = environment
        self._aborted = threading.Event()

    def read(self) -> Offer:
        """Raises HubError, or Cancelled after `abort`."""
        with HubProcess(self._environment, self._aborted.is_set) as hub:
            listing = hub.list_files(self._source.repository, self._source.revision)
            return _offer(self._source.repository, listing)

    def abort(self) -> None:
        self._aborted.set()


def _offer(repository: str, listing: Listing) -> Offer:
    found = [
        Variant(quant, sum(listing.files[path].num_bytes for path in selection.paths), len(selection.paths))
        for quant, selection in variants(listing.files).items()
    ]
    if not found:
        raise NotOnHub(f"{repository} has neither safetensors nor GGUF weights; choose a repository that has")
    return Offer(repository, listing.commit, tuple(sorted(found, key=lambda variant: variant.num_bytes)))
