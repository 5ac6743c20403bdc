"""The files of models on this node's disk: downloaded without a load, deleted, and their size.

A download that is cancelled or fails keeps what it has, so that the next one continues it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cortex.formats.quant_names import plain
from cortex.formats.units import gib
from cortex.http.composed_body import Body
from cortex.neuron.hub_process.resolver import OfferRequest
from cortex.neuron.node.library import KnownModel, Library
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.loading.progress import LoadProgressTracker
from cortex.neuron.weights.errors import CheckpointError, FilesMissing, HubError, NotOnHub
from cortex.neuron.weights.hub import disk, uploads
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.neuron.weights.hub.file_digests import FileDigests
from cortex.neuron.weights.hub.listing import Listing
from cortex.neuron.weights.hub.local import LocalRepository
from cortex.neuron.weights.hub.source import HubSource, is_hub_id, parse_source
from cortex.system.tasks import in_own_thread
from cortex.wire.errors import (
    CortexError,
    HubUnavailable,
    InvalidValue,
    LoadFailed,
    ModelInUse,
    ModelNotFound,
    shorten,
)
from cortex.wire.node.load_options import is_path
from cortex.wire.node.neighbours import SharedFile, SharedRepository, repository_of
from cortex.wire.node.orders import (
    AssembledFiles,
    AssembleRequest,
    DeletedFiles,
    FilesRequest,
    HubRepository,
    HubVariant,
    LoadRequest,
)
from cortex.wire.node.protocol import DiskUse, PullState, PullStatus
from cortex.wire.words import about, os_error_in_words

log = logging.getLogger(__name__)

MAX_ENDED_PULLS = 32
_CHUNK_BYTES = 1 << 22

InUse = Callable[[], Iterable[tuple[str, Path | None]]]
"""The models in memory or being loaded, and the paths of their files, if known."""


@dataclass(slots=True, eq=False)
class _Pull:
    """One download."""

    request: FilesRequest
    progress: LoadProgressTracker
    task: asyncio.Task[None] | None = None
    state: PullState = "running"
    reason: str | None = None
    code: str | None = None

    def status(self) -> PullStatus:
        return PullStatus(
            model_id=self.request.model_id,
            quant=self.request.quant,
            state=self.state,
            progress=self.progress.snapshot(),
            reason=self.reason,
            code=self.code,
        )


class ModelFiles:
    """Belongs to the daemon's loop; disk and network are used on threads."""

    def __init__(self, library: Library, loader: ModelLoader, in_use: InUse, digests: FileDigests) -> None:
        self._library = library
        self._digests = digests
        self._loader = loader
        self._in_use = in_use
        self._pulls: dict[str, _Pull] = {}
        """By model id, in the order in which they began."""
        self._repository_bytes: dict[str, int] = {}
        self._local: dict[str, LocalRepository] = {}
        """Models at paths of which other nodes have wanted files."""
        self._listings: dict[str, asyncio.Future[Listing | None]] = {}
        """By repository: the listings of these models that are being made."""
        self._deleting: set[str] = set()
        """Repositories."""
        self.disk: DiskUse | None = None
        """As of the last scan."""
        self.num_shared = 0
        """Files that other nodes are reading."""

    @property
    def pulls(self) -> tuple[PullStatus, ...]:
        return tuple(pull.status() for pull in self._pulls.values())

    def pull(self, request: FilesRequest) -> PullStatus:
        """Start to download a model's files, or join the download in progress. Raises ModelNotFound or ModelInUse."""
        known = self._pulls.get(request.model_id)
        if known is not None and known.state == "running":
            if plain(known.request.quant or "") != plain(request.quant or ""):
                raise ModelInUse(f"{request.model_id} is being downloaded as {known.request.quant}; cancel that first")
            return known.status()
        self._library.remember_quant(request.model_id, None)  # a pull without one is for the repository's own weights
        files = request.shared_with(LoadRequest)
        model = self._library.adopt(LoadRequest(model_id=request.model_id, neighbours=request.neighbours, **files))
        self.reject_if_deleting(model)
        self._pulls.pop(request.model_id, None)
        pull = self._pulls[request.model_id] = _Pull(request, LoadProgressTracker.begin(time.monotonic()))
        pull.task = asyncio.create_task(self._run(pull, model), name=f"pull {model.id}")
        ended = [name for name, other in self._pulls.items() if other.state != "running"]
        for name in ended[:-MAX_ENDED_PULLS]:
            del self._pulls[name]
        return pull.status()

    def pull_status(self, model_id: str) -> PullStatus:
        """Raises ModelNotFound when there was no such download since the start."""
        if model_id not in self._pulls:
            raise ModelNotFound(f"this node has no download of {shorten(model_id)}", param="model_id")
        return self._pulls[model_id].status()

    async def cancel(self, model_id: str) -> PullStatus:
        """Returns when the download has ended. Raises ModelNotFound when there is none."""
        self.pull_status(model_id)
        pull = self._pulls[model_id]
        if pull.state == "running" and pull.task is not None:
            pull.task.cancel()
            await asyncio.wait({pull.task})
        return pull.status()

    def reject_if_deleting(self, model: KnownModel) -> None:
        """Raises ModelInUse while the model's files are being deleted."""
        source = _hub_source(model.source)
        if source is not None and source.repository in self._deleting:
            raise ModelInUse(f"the files of {model.id} are being deleted; try again in a moment")

    def forget_if_absent(self, model: KnownModel) -> None:
        """Stop listing a hub model without local files: it may not even exist."""
        if _hub_source(model.source) is not None and not self.disk_bytes(model):
            self._library.forget(model.id)

    async def delete(self, request: FilesRequest) -> DeletedFiles:
        """Delete the files of a model that is not in memory. Raises ModelNotFound, ModelInUse or LoadFailed."""
        model = self._library.find(request.model_id)
        source = _hub_source(model.source)
        if source is None:
            raise LoadFailed(f"the files of {model.id} are at {model.source}, outside the cache; delete them by hand")
        source = await self._doomed(request, model, source)
        await self._reject_if_used(model, source)
        self._deleting.add(source.repository)
        try:
            num_bytes = await asyncio.to_thread(disk.delete, self._library.cache, source)
        except CheckpointError as error:
            raise ModelNotFound(about(model.id, error), param="model_id") from error
        except OSError as error:
            raise LoadFailed(f"the files of {model.id} could not be deleted: {os_error_in_words(error)}") from error
        finally:
            self._deleting.discard(source.repository)
        self._loader.forget(model.id)
        await self.scan()
        if self._repository_bytes.get(source.repository, 0) == 0:
            self._library.forget(model.id)
        log.info("%s: files deleted, %s are free again", model.id, gib(num_bytes))
        return DeletedFiles(model_id=model.id, freed_bytes=num_bytes)

    async def has_upload(self, digest: str) -> bool:
        return await asyncio.to_thread(uploads.find, self._library.cache, digest) is not None

    async def upload(self, digest: str, body: Body) -> None:
        """Keep an uploaded file, of which a model will be made. Raises InvalidValue or LoadFailed."""
        try:
            await in_own_thread(uploads.store, self._library.cache, digest, _chunks(body))
        except CheckpointError as error:
            raise InvalidValue(f"The upload is damaged: {error}; send it again.", param="digest") from error
        except OSError as error:
            raise LoadFailed(f"the upload could not be stored: {os_error_in_words(error)}") from error

    async def assemble(self, request: AssembleRequest) -> AssembledFiles:
        """Make a repository of uploaded files, which must be a model. Raises InvalidValue or LoadFailed."""
        model = self._library.adopt(LoadRequest(model_id=request.repository))
        arguments = (self._library.cache, request.repository, request.files)
        try:
            num_bytes = await asyncio.to_thread(uploads.assemble, *arguments)
        except (CheckpointError, ValueError) as error:
            self._library.forget(model.id)
            raise InvalidValue(f"No model can be made of these files: {error}.", param="files") from error
        except OSError as error:
            raise LoadFailed(f"the files could not be stored: {os_error_in_words(error)}") from error
        await self.scan()
        try:
            path = await self._loader.find_local(model)
            if path is None:
                raise InvalidValue(
                    "No model can be made of these files: send one GGUF file, or config.json with safetensors files "
                    "and the tokenizer's.",
                    param="files",
                )
            await self._loader.inspect(model, path)
        except CortexError:
            await self.delete(FilesRequest(model_id=model.id))
            raise
        await asyncio.to_thread(uploads.drop, self._library.cache, request.files.values())
        return AssembledFiles(repository=request.repository, num_bytes=num_bytes)

    async def shared(self, repository: str, revision: str) -> SharedRepository:
        """The files of a repository that this node has. Raises ModelNotFound."""
        files = self._shared_repository(repository)
        if isinstance(files, LocalRepository):
            found = await self._read_once(repository, files)
        else:
            found = await asyncio.to_thread(files.listing, revision)
        if found is None:
            raise ModelNotFound(f"this node has no files of {repository} at {shorten(revision)}")
        listed = [SharedFile(path=f.path, num_bytes=f.num_bytes, digest=f.digest) for f in found.files.values()]
        return SharedRepository(commit=found.commit, files=tuple(listed))

    async def _read_once(self, repository: str, files: LocalRepository) -> Listing | None:
        """The listing of a model at a path, whose files may take minutes to read. All callers wait for one thread."""
        if repository not in self._listings:
            reading = self._listings[repository] = in_own_thread(files.listing)
            reading.add_done_callback(lambda _: self._listings.pop(repository))
        return await asyncio.shield(self._listings[repository])

    @contextmanager
    def shared_file(self, repository: str, digest: str) -> Iterator[int]:
        """A descriptor of a complete file of a repository. Raises ModelNotFound, or OSError."""
        try:
            descriptor = self._shared_repository(repository).open_blob(digest)
        except FileNotFoundError:
            raise ModelNotFound(f"this node has no file {shorten(digest)} of {repository}") from None
        self.num_shared += 1
        try:
            yield descriptor
        finally:
            self.num_shared -= 1
            os.close(descriptor)

    def _shared_repository(self, repository: str) -> RepositoryCache | LocalRepository:
        """Raises ModelNotFound for a repository of no model of this node."""
        sources = [model.source for model in self._library if repository_of(model.source) == repository]
        if not is_hub_id(repository) or not sources:
            raise ModelNotFound(f"this node has no files of {shorten(repository)}")
        if is_path(sources[0]):
            path = Path(sources[0]).expanduser()
            return self._local.setdefault(repository, LocalRepository(path, self._digests))
        return RepositoryCache(self._library.cache, repository)

    async def offer(self, source: str) -> HubRepository:
        """What a repository of the hub offers. Raises ModelNotFound, or HubUnavailable."""
        try:
            request = OfferRequest(source)
            try:
                offer = await asyncio.to_thread(request.read)
            except asyncio.CancelledError:
                request.abort()
                raise
        except (NotOnHub, FilesMissing) as error:
            raise ModelNotFound(str(error), param="model") from error
        except HubError as error:
            raise HubUnavailable(str(error)) from error
        variants = tuple(
            HubVariant(quant=each.quant, num_bytes=each.num_bytes, num_files=each.num_files) for each in offer.variants
        )
        return HubRepository(repository=offer.repository, commit=offer.commit, variants=variants)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of each repository in the cache; a new object whenever a scan finds changes."""
        return self._repository_bytes

    def disk_bytes(self, model: KnownModel) -> int | None:
        """The bytes of the model's repository in the cache; None for a model outside the cache."""
        source = _hub_source(model.source)
        return None if source is None else self._repository_bytes.get(source.repository, 0)

    async def scan(self) -> None:
        """Read the sizes on disk again."""
        sizes, self.disk = await asyncio.to_thread(_read_disk, self._library.cache)
        if sizes != self._repository_bytes:
            self._repository_bytes = sizes

    async def close(self) -> None:
        """Cancel the downloads, and the reading of files for their digests."""
        tasks = [pull.task for pull in self._pulls.values() if pull.task is not None]
        for task in tasks:
            task.cancel()
        for files in self._local.values():
            files.close()
        await asyncio.gather(*tasks, *self._listings.values(), return_exceptions=True)

    async def _doomed(self, request: FilesRequest, model: KnownModel, source: HubSource) -> HubSource:
        """The files to delete. Raises ModelInUse for a whole repository that another configured model uses."""
        quant, own_quant = request.quant, source.quant
        if own_quant is None and self._library.is_configured(model.id):
            own_quant = model.quant
        if quant is None and own_quant is not None:
            own = HubSource(source.repository, source.revision, own_quant)
            if await asyncio.to_thread(disk.files_of, self._library.cache, own):
                return own  # else the weights are quantised during the load, from files without a quantisation
        if quant is None:
            for other in self._library:
                shares = other.id != model.id and self._repository_of(other.id) == source.repository
                if shares and self._library.is_configured(other.id):
                    raise ModelInUse(
                        f"{other.id} is configured with the same repository {source.repository}; name the quantisation"
                        " to delete, or remove one of the two from neuron.toml"
                    )
        return HubSource(source.repository, source.revision, quant)

    async def _reject_if_used(self, model: KnownModel, source: HubSource) -> None:
        for pull in self._pulls.values():
            if pull.state == "running" and self._repository_of(pull.request.model_id) == source.repository:
                raise ModelInUse(f"{pull.request.model_id} is being downloaded; cancel that first")
        doomed = await asyncio.to_thread(disk.files_of, self._library.cache, source)
        for user, path in self._in_use():
            if self._repository_of(user) != source.repository:
                continue
            if path is None or path in doomed or any(path in file.parents for file in doomed):
                raise ModelInUse(f"{user} is in memory and uses the files of {model.id}; unload it first")

    def _repository_of(self, model_id: str) -> str | None:
        try:
            source = _hub_source(self._library.find(model_id).source)
        except ModelNotFound:
            return None
        return source.repository if source is not None else None

    async def _run(self, pull: _Pull, model: KnownModel) -> None:
        state, reason, code = await self._download(pull, model)
        await self.scan()
        is_used = any(user == model.id for user, _ in self._in_use())
        if state != "done" and not is_used:
            self.forget_if_absent(model)
        pull.state, pull.reason, pull.code = state, reason, code

    async def _download(self, pull: _Pull, model: KnownModel) -> tuple[PullState, str | None, str | None]:
        """Outcome of the download: state, error message and error code."""

        def progressed(stage: str, done_bytes: int, total_bytes: int) -> None:
            pull.progress = pull.progress.advanced(stage, done_bytes, total_bytes, time.monotonic())

        try:
            path = await self._loader.download(model, progressed, uses_hub=pull.request.uses_hub)
            is_in_memory = any(user == model.id for user, _ in self._in_use())
            is_another = model.harness != self._library.find(model.id).harness  # a load with that one reads it again
            await (self._loader.read if is_in_memory or is_another else self._loader.inspect)(model, path)
        except asyncio.CancelledError:
            return "cancelled", "the download was cancelled; a later one continues it", None
        except CortexError as error:
            log.warning("%s", error.message)
            return "failed", error.message, error.code
        except Exception as problem:
            log.exception("%s: unexpected error in a download", model.id)
            return "failed", f"{type(problem).__name__}: {problem}; see the node's log", None
        self._library.remember_quant(model.id, model.quant)
        log.info("%s: files are complete", model.id)
        return "done", None, None


def _chunks(body: Body) -> Iterator[bytes]:
    return (body[start : start + _CHUNK_BYTES] for start in range(0, len(body), _CHUNK_BYTES))


def _hub_source(text: str) -> HubSource | None:
    """The hub model that a source names; None for a path or an invalid name."""
    try:
        parsed = parse_source(text)
    except CheckpointError:
        return None
    return parsed if isinstance(parsed, HubSource) else None


def _read_disk(cache: Path) -> tuple[dict[str, int], DiskUse | None]:
    sizes = disk.repository_bytes(cache)
    existing = next((folder for folder in (cache, *cache.parents) if folder.exists()), None)
    if existing is None:
        return sizes, None
    usage = shutil.disk_usage(existing)
    return sizes, DiskUse(total_bytes=usage.total, free_bytes=usage.free, models_bytes=sum(sizes.values()))
