"""Resolves a model name to files on disk; downloads them if necessary."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from cortex.neuron.weights.directory import read_json
from cortex.neuron.weights.errors import Cancelled, CheckpointError, HubError, HubUnreachable, NoDiskSpace, NotOnHub
from cortex.neuron.weights.hub.cache import RepositoryCache, cache_directory, hub_home
from cortex.neuron.weights.hub.download import FileDownload
from cortex.neuron.weights.hub.listing import Listing, RemoteFile, fetch_listing
from cortex.neuron.weights.hub.selection import SHARD, Objection, Selection, gguf_of, missing_parts, select
from cortex.neuron.weights.hub.source import HubSource, parse_source
from cortex.neuron.weights.hub.transport import Transport

_DEFAULT_ENDPOINT: Final = "https://huggingface.co"
_NUM_DOWNLOADS_AT_ONCE: Final = 4
_POLL_S: Final = 0.05
_LAST_WAIT_S: Final = 0.5
_SPARE_DISK_BYTES: Final = 64 << 20

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes) on the calling thread; bytes done never fall."""


def resolve(
    source: str,
    *,
    quant: str | None = None,
    objection: Objection = lambda _: None,
    progress: Progress,
    cancelled: Callable[[], bool],
    cache_dir: Path | None = None,
    offline: bool | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Path:
    """The model directory or `.gguf` file that `source` names, downloaded first if necessary.

    `quant` and `objection` select the files of a repository as `select` describes it, unless `source` itself names a
    quantisation, and `quant` selects the GGUF file in a local directory.

    Blocks, so call it on a thread. Raises Cancelled soon after `cancelled()` becomes true. Arguments that are None are
    taken from the environment (`HF_HUB_CACHE`, `HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN`, `HF_ENDPOINT`). When the hub
    rejects the request or does not respond, a complete model in the cache is used. Raises CheckpointError.
    """
    parsed = parse_source(source)
    if isinstance(parsed, Path):
        return _in_directory(parsed, quant)
    if parsed.quant is None:
        parsed = replace(parsed, quant=quant)
    cache = RepositoryCache(cache_dir or cache_directory(environment), parsed.repository)
    if offline is None:
        offline = is_offline(environment)
    if offline:
        return _cached(
            cache,
            parsed,
            objection,
            HubUnreachable(f"{parsed.repository} is not in the cache and the node is offline"),
        )
    transport = transport_to_hub(environment, endpoint=endpoint, token=token)
    pool = ThreadPoolExecutor(_NUM_DOWNLOADS_AT_ONCE, thread_name_prefix="hub")
    try:
        try:
            [listing] = _finished([pool.submit(fetch_listing, transport, parsed)], transport, cancelled)
        except HubError as error:
            return _cached(cache, parsed, objection, error)
        selection = select(parsed.repository, listing.files, parsed.quant, objection=objection)
        if missing := missing_parts(selection):
            raise NotOnHub(f"{parsed.repository} lacks {missing[0]}, a part of the model; choose another quantisation")
        _download(pool, transport, cache, parsed, listing, selection, progress, cancelled)
        cache.remember(parsed.revision, listing.commit)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoDiskSpace(f"the disk of {cache.root} is full; free some space and try again") from error
        raise HubError(f"cannot write to {cache.root}: {error.strerror}; check permissions or HF_HUB_CACHE") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return cache.snapshot(listing.commit) / (selection.entry or "")


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether `HF_HUB_OFFLINE` forbids the use of the hub."""
    return environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def transport_to_hub(
    environment: Mapping[str, str], *, endpoint: str | None = None, token: str | None = None
) -> Transport:
    """Requests to the hub that the environment names, unless the arguments do. Raises HubError for a wrong token."""
    token = token or _environment_token(environment)
    if token and not (token.isascii() and token.isprintable()):
        raise HubError("the token of the hub has a line break or another wrong character; set HF_TOKEN to one token")
    return Transport(endpoint or environment.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT, token)


def _download(
    pool: ThreadPoolExecutor,
    transport: Transport,
    cache: RepositoryCache,
    source: HubSource,
    listing: Listing,
    selection: Selection,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> None:
    files = [listing.files[path] for path in selection.paths]
    _check_disk(cache, files)
    meter = _Meter(sum(file.num_bytes for file in files), progress)

    def fetch(file: RemoteFile) -> None:
        FileDownload(
            transport, cache, source.repository, listing.commit, file, lambda done: meter.note(file.path, done)
        ).run()
        cache.link(listing.commit, file)

    _finished([pool.submit(fetch, file) for file in files], transport, cancelled, meter.show)
    meter.show()


class _Meter:
    """Sums the progress that downloads report on their threads, and reports it on the caller's. Never falls."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._done_bytes: dict[str, int] = {}
        self._shown_bytes = -1

    def note(self, path: str, done_bytes: int) -> None:
        self._done_bytes[path] = done_bytes

    def show(self) -> None:
        done_bytes = sum(list(self._done_bytes.values()))
        if done_bytes > self._shown_bytes:
            self._shown_bytes = done_bytes
            self._progress(done_bytes, self._total_bytes)


def _finished(
    futures: Sequence[Future[T]],
    transport: Transport,
    cancelled: Callable[[], bool],
    meanwhile: Callable[[], None] = lambda: None,
) -> list[T]:
    """The results of all futures. The first failure or a cancellation aborts the others."""
    try:
        while True:
            done, pending = wait(futures, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
            meanwhile()
            for future in done:
                future.result()
            if not pending:
                return [future.result() for future in futures]
            if cancelled():
                raise Cancelled("the download was cancelled")
    except BaseException:
        transport.abort()
        for future in futures:
            future.cancel()
        # A thread that still waits for a connection cannot be interrupted. It ends on its own and does no more work.
        wait(futures, timeout=_LAST_WAIT_S)
        raise


def _check_disk(cache: RepositoryCache, files: Sequence[RemoteFile]) -> None:
    need = sum(cache.num_missing_bytes(file) for file in files)
    if not need:
        return
    cache.root.mkdir(parents=True, exist_ok=True)
    have = shutil.disk_usage(cache.root).free
    if need + _SPARE_DISK_BYTES > have:
        raise NoDiskSpace(
            f"the download needs {need / 1e9:.1f} GB, but {have / 1e9:.1f} GB are free on the disk of {cache.root}; "
            "free some space, or set HF_HUB_CACHE to another disk"
        )


def _in_directory(path: Path, quant: str | None) -> Path:
    """The GGUF file in a directory that is quantised as `quant`; the path itself where there is none."""
    if quant is None or not path.is_dir():
        return path
    found = gguf_of((entry.name for entry in path.iterdir()), quant)
    return path if found is None else path / found


def _cached(cache: RepositoryCache, source: HubSource, objection: Objection, reason: HubError) -> Path:
    """The model in the cache. Raises `reason` where the cache has no complete one."""
    commit = cache.commit_of(source.revision)
    if commit is None:
        raise reason
    snapshot = cache.snapshot(commit)
    try:
        selection = select(source.repository, cache.paths_in(commit), source.quant, objection=objection)
        missing = missing_parts(selection) if selection.entry else _missing_shards(snapshot, selection)
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
        if isinstance(weight_map, dict):
            needed |= {str(shard) for shard in weight_map.values()}
    elif any(SHARD.fullmatch(path) for path in selection.paths):
        # Other tools store the commit before they have all its files. Sharded weights always have an index.
        needed.add("model.safetensors.index.json")
    return sorted(needed - set(selection.paths))


def _environment_token(environment: Mapping[str, str]) -> str | None:
    """`HF_TOKEN`, or the token that `hf auth login` stored."""
    if token := environment.get("HF_TOKEN", "").strip():
        return token
    path = Path(environment.get("HF_TOKEN_PATH") or hub_home(environment) / "token").expanduser()
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
