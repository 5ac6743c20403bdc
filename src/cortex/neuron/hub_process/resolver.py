"""Resolves a model name to files on disk, downloads them if necessary, and lists what a repository offers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from cortex.ipc.helper import Function, Helper
from cortex.ipc.pool import HelperOfThread, PoolLost
from cortex.neuron.hub_process.protocol import Failed, FetchFiles
from cortex.neuron.weights.errors import Cancelled, HubError, HubUnreachable, NoDiskSpace, NotOnHub
from cortex.neuron.weights.hub.cache import RepositoryCache, cache_directory, in_cache, in_directory
from cortex.neuron.weights.hub.listing import Listing, RemoteFile
from cortex.neuron.weights.hub.selection import Objection, missing_parts, select, variants
from cortex.neuron.weights.hub.source import HubSource, endpoint_of, is_offline, parse_source
from cortex.wire.node.neighbours import Neighbour, is_of_path

T = TypeVar("T")

_HELPER: Final = Helper(
    name="neuron-hub", purpose="the process that talks to the hub", module="cortex.neuron.hub_process.service"
)
_LIST_FILES: Function[Listing | Failed] = Function("list_files", Listing | Failed)
_LIST_SHARED: Function[Listing | Failed | None] = Function("list_shared", Listing | Failed | None)
_FETCH: Function[Failed | None] = Function("fetch", Failed | None)
_OF_THE_HUB: Final = ("HF_", "HUGGING_FACE_")


class HubProcess:
    """A context manager: leaving the block ends the process at once. Belongs to one thread, which waits for calls."""

    def __init__(self, environment: Mapping[str, str], cancelled: Callable[[], bool]) -> None:
        """`environment` has the variables of the hub's tools: HF_TOKEN, HF_ENDPOINT, … Raises HubError for a token that
        no header can carry, without the package of the hub, and when no process can be started."""
        token = environment.get("HF_TOKEN", "").strip()
        if not token.isascii() or not (token.isprintable() or token == ""):
            raise HubError(
                "the token of the hub has a line break or another wrong character; set HF_TOKEN to one token"
            )
        if importlib.util.find_spec("huggingface_hub") is None:
            raise HubError(
                "downloads need the package huggingface-hub: run `pip install '.[hub]'` in a checkout of cortex, or "
                "name files on this node as the source of the model"
            )
        self.endpoint = endpoint_of(environment)
        self._cancelled = cancelled
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_HUB)}
        hub = {name: value for name, value in environment.items() if name.startswith(_OF_THE_HUB)}
        settings = {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        try:
            self._helper = HelperOfThread(_HELPER, {**own, **hub, **settings})
        except OSError as error:
            raise HubError(f"no process for the hub can be started: {error.strerror}") from error

    def __enter__(self) -> HubProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._helper.__exit__(kind, error, traceback)

    def list_files(self, repository: str, revision: str) -> Listing:
        """Raises HubError, or Cancelled soon after `cancelled` returns true."""
        return self._call(_LIST_FILES, self.endpoint, repository, revision)

    def list_shared(self, neighbours: Sequence[Neighbour], repository: str, revision: str) -> Listing | None:
        """The listing of the first neighbour that has one. Raises as `list_files` does."""
        return self._call(_LIST_SHARED, tuple(neighbours), repository, revision)

    def fetch(self, files: FetchFiles, meanwhile: Callable[[], None]) -> None:
        """Downloads what the cache lacks. `meanwhile` is called until then. Raises as `list_files` does."""
        self._call(_FETCH, files, meanwhile=meanwhile)

    def _call(self, function: Function[T | Failed], *arguments: Any, meanwhile: Callable[[], None] = lambda: None) -> T:
        def check() -> None:
            if self._cancelled():
                raise Cancelled("the download was cancelled")
            meanwhile()

        try:
            reply = self._helper.call(function, *arguments, meanwhile=check)
        except PoolLost as error:
            raise HubError(
                f"the process that talks to the hub has ended ({error}); see the log and try again"
            ) from error
        if isinstance(reply, Failed):
            raise reply.error
        return reply


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
    is_copy = is_of_path(parsed.repository)
    if offline or (offline is None and is_offline(environment)) or is_copy:
        sources = replace(sources, uses_hub=False)
    if not sources.uses_hub and not sources.neighbours:
        why = "no other node has it" if is_copy else "the node is offline"
        reason = HubUnreachable(f"{parsed.repository} is not in the cache and {why}")
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
    """The model's files and their sources, or the complete model in the cache if the hub is unavailable. Raises
    CheckpointError."""
    is_copy = is_of_path(source.repository)
    advice = "start one" if is_copy else "pull it from the hub, or start such a node"
    reason = HubError(f"no node that has {source.repository} can be reached; {advice}")
    if sources.uses_hub:
        try:
            return hub.list_files(source.repository, source.revision), sources
        except HubError as error:
            reason = error
    listing = hub.list_shared(sources.neighbours, source.repository, source.revision) if is_copy else None
    if listing is not None:  # what it copies may have changed
        return listing, sources
    try:
        return in_cache(cache, source, objection, reason)
    except HubError:
        listing = None if is_copy else hub.list_shared(sources.neighbours, source.repository, source.revision)
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
