"""Loads models: from a name to an instance that serves.

`ModelLoader.load` reads from top to bottom: resolve the files, preflight them, find devices with room, load the weights
in their workers while the tokenizer starts. Downloads run on threads, and files are read in the inspection process. A
load that fails or is cancelled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from cortex.formats.units import gib
from cortex.neuron.config import NeuronConfig
from cortex.neuron.hub_process.resolver import FileSources
from cortex.neuron.models.host_division import NO_EXPERTS
from cortex.neuron.node.devices import NodeDevices
from cortex.neuron.node.harness.estimates import FileMetadata, Footprint
from cortex.neuron.node.harness.harness import Harnesses
from cortex.neuron.node.inspection_process.client import InspectionProcess
from cortex.neuron.node.instance import Instance, ModelCallbacks
from cortex.neuron.node.library import Fetch, FileStamps, KnownModel, Library, file_stamps
from cortex.neuron.node.loading.device_allocator import DeviceAllocator, MemoryElsewhere, wake_settled
from cortex.neuron.node.loading.device_choice import capacity_bytes, check_devices
from cortex.neuron.node.loading.loads_in_progress import OnWait
from cortex.neuron.node.memory.host_budget import HostBudget
from cortex.neuron.node.texts import Texts
from cortex.neuron.text.model import TextInspection
from cortex.neuron.weights import errors as weight_errors
from cortex.neuron.weights.errors import Cancelled, CheckpointError
from cortex.neuron.weights.hub.file_digests import FileDigests
from cortex.neuron.weights.hub.local import model_files
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.hosts.replicated import ReplicatedHost
from cortex.neuron.worker.model_host import LoadRejected
from cortex.system.tasks import in_own_thread
from cortex.wire.error_encoding import from_code
from cortex.wire.errors import (
    CortexError,
    DiskFull,
    HubUnavailable,
    InsufficientCapacity,
    InvalidValue,
    LoadFailed,
    ModelUnsupported,
    SourceNotFound,
)
from cortex.wire.node.contexts import ContextSizes, tolerated
from cortex.wire.node.host_splits import speed_in_words
from cortex.wire.node.load_options import is_path
from cortex.wire.words import about

log = logging.getLogger(__name__)

_DOWNLOAD_ERRORS: dict[type[CheckpointError], type[LoadFailed]] = {
    weight_errors.HubUnreachable: HubUnavailable,
    weight_errors.NotOnHub: SourceNotFound,
    weight_errors.NoDiskSpace: DiskFull,
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """The metadata from a model's files."""

    metadata: FileMetadata
    """Facts of the whole model, or of one rank of a divided one."""
    text: TextInspection
    model: KnownModel
    """The model with the options for which they were read."""
    quantised: Mapping[str, Footprint]
    """The memory of dense weights with each recipe; empty if they are quantised, or cannot be here."""
    stamps: FileStamps
    """The stamps of the files: once they change, the inspection is repeated."""
    content: str
    """The digest of all bytes of the files; empty until they are read (`loading/contents.py`)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory that a model will take on this node, by its files and options."""

    footprint: Footprint
    stage_layers: tuple[int, ...]
    """How many layers each device would hold if all were empty; empty for a model that is not divided by layers, that
    does not fit, or whose other devices are on other nodes."""


_LAST_LINES = 3
"""Lines of its log in the status of a member that loads."""


class ModelLoader:
    """Loads and wakes all models of the node. Belongs to the daemon's loop."""

    def __init__(
        self,
        config: NeuronConfig,
        library: Library,
        devices: NodeDevices,
        harnesses: Harnesses,
        room: DeviceAllocator,
        *,
        fetch: Fetch,
        inspector: InspectionProcess,
        texts: Texts,
        make_room: Callable[[KnownModel, FileMetadata], Awaitable[bool]],
        host: HostBudget,
        digests: FileDigests,
    ) -> None:
        """`make_room`: unloads idle models, if that makes room for the context that a load asks for."""
        self._config = config
        self._library = library
        self._devices = devices.all
        self._extras = devices.extras
        self._harnesses = harnesses
        self._room = room
        self._fetch = fetch
        self._reader = inspector
        self._texts = texts
        self._make_room = make_room
        self._host = host
        self._digests = digests
        self.inspections: dict[str, Inspection] = {}
        """By model id; kept after an unload."""
        self._estimates: dict[str, tuple[object, Estimate]] = {}
        """By model id: the latest one, and what it was computed from."""
        self.damaged: dict[str, CortexError] = {}
        """Models whose files failed the inspection or are missing → why."""
        self._damaged_files: dict[str, tuple[Path, FileStamps]] = {}
        """By model id: the files that failed the inspection, which are read again once they change."""
        self._absent: set[str] = set()
        """Models whose files are missing."""

    async def load(self, model: KnownModel, callbacks: ModelCallbacks) -> Instance:
        """Raises LoadFailed, InsufficientCapacity or WorkerLost."""
        harness = self._harnesses.of(model)
        harness.check(model)
        check_devices(model, self._devices)
        path = await self.find_local(model) or await self.download(model, callbacks.on_progress)
        if (draft := self._library.draft_of(model)) is not None and not await self.find_local(draft):
            await self.download(draft, callbacks.on_progress)
        callbacks.on_files_ready()
        inspection = await self.inspect(model, path)
        try:
            instance = await self._load_with_context(model, inspection.metadata, callbacks)
        except LoadRejected as error:
            raise _load_error(model.id, error) from error
        except InsufficientCapacity as error:
            advice = _smaller_forms(inspection.quantised)
            raise error.in_words(f"{error.message}{advice}") from error
        instance.files = (path, inspection.stamps)
        self._library.remember_quant(model.id, model.quant)
        contexts, resident = self.contexts(model), instance.host.resident
        if contexts is not None and resident is not None and (why := contexts.shortage(resident.info.context_tokens)):
            log.warning("%s: %s", model.id, why)
        return instance

    async def _load_with_context(
        self, model: KnownModel, metadata: FileMetadata, callbacks: ModelCallbacks
    ) -> Instance:
        """Load with the context that the request asks for. If this node decides, with the wanted context, else with
        what fits. Raises InsufficientCapacity, and what `_load_on_devices` raises."""
        required = self.with_context(model, metadata)
        if required is None:
            return await self._load_or_split(replace(model, min_context_tokens=None), metadata, callbacks)
        if model.min_context_tokens is not None:
            return await self._load_or_split(required, metadata, callbacks)
        with contextlib.suppress(InsufficientCapacity):
            return await self._load_on_devices(required, metadata, callbacks)
        if await self._make_room(required, metadata):
            with contextlib.suppress(InsufficientCapacity):  # another load may have taken the room
                return await self._load_on_devices(required, metadata, callbacks)
        with contextlib.suppress(InsufficientCapacity):
            return await self._load_split(required, metadata, callbacks)
        return await self._load_or_split(model, metadata, callbacks)

    async def _load_or_split(self, model: KnownModel, metadata: FileMetadata, callbacks: ModelCallbacks) -> Instance:
        """Load on devices alone if they have room, else with part of the weights in host memory. Raises
        InsufficientCapacity, and what `_load_on_devices` raises."""
        try:
            return await self._load_on_devices(model, metadata, callbacks)
        except InsufficientCapacity as error:
            footprint = self.estimate(model, metadata).footprint
            if footprint.splits is None and not model.host_weights:
                if footprint.last_resort is None:
                    raise
                raise error.in_words(f"{error.message}; {NO_EXPERTS}") from error
            try:
                return await self._load_split(model, metadata, callbacks)
            except InsufficientCapacity as split_error:
                message = f"{error.message}; {split_error.message.removeprefix(f'{model.id}: ')}"
                raise error.in_words(message) from split_error

    async def _load_split(self, model: KnownModel, metadata: FileMetadata, callbacks: ModelCallbacks) -> Instance:
        """Load with the weights that do not fit the device in host memory. Raises as `_load_or_split` does."""
        split = await self._room.split(model, metadata, self._host.free_bytes(model.id))
        if isinstance(split, str):
            raise InsufficientCapacity(f"{model.id}: {split}")
        async with self._host.for_weights(model.id, split.host_bytes):
            splits = self.estimate(model, metadata).footprint.splits
            speed = speed_in_words(split.tokens_per_s, is_measured=splits is not None and splits.is_measured)
            log.info("%s: loading with up to %s of weights in host memory, %s", model.id, gib(split.host_bytes), speed)
            return await self._load_on_devices(replace(model, host_split=split), metadata, callbacks)

    def with_context(self, model: KnownModel, metadata: FileMetadata, tokens: int | None = None) -> KnownModel | None:
        """The model as a load that gets at least `tokens` or, by default, the requested or wanted context, at most what
        empty devices hold. None if its contexts are unknown here."""
        contexts = self.estimate(model, metadata).footprint.contexts
        if contexts is None:
            return None
        estimates = self._harnesses.of(model).estimates
        asked = tokens or model.min_context_tokens or tolerated(contexts.wanted_tokens)
        splits = self.estimate(model, metadata).footprint.splits
        have_bytes = capacity_bytes(model, self._devices, estimates)
        held = tolerated(contexts.tokens_in(have_bytes + (splits.most_saved_bytes if splits is not None else 0)))
        return replace(model, min_context_tokens=min(asked, contexts.full_tokens, held))

    def contexts(self, model: KnownModel) -> ContextSizes | None:
        """The sizes of a model's contexts, if its files were read and its harness knows them."""
        inspection = self.inspections.get(model.id)
        return None if inspection is None else self.estimate(model, inspection.metadata).footprint.contexts

    async def _load_on_devices(self, model: KnownModel, metadata: FileMetadata, callbacks: ModelCallbacks) -> Instance:
        """Raises InsufficientCapacity, LoadFailed, LoadRejected or WorkerLost."""
        harness = self._harnesses.of(model)
        async with self._room.for_load(model, metadata, callbacks.on_wait) as room:
            host, chosen = await harness.host(model, metadata, room)
            limits = replace(self._config.limits, max_num_seqs=harness.max_num_seqs)
            instance = Instance(model.id, host, limits, callbacks, preempts=harness.upstream(model) is None)
            own_stages = chosen.stages[: len(chosen.devices)]
            instance.stage_layers = tuple(stage.num_layers for stage in own_stages) * model.replicas
            await self._load_weights(instance, metadata.path, uses_text=harness.upstream(model) is None)
        return instance

    async def add_replica(self, model: KnownModel, replicas: ReplicatedHost) -> bool:
        """Loads an extra replica of a ready model on a device with room in addition to everything else. False if there
        is none, or if the load was cancelled because the model is unloaded or another load needs the memory. Raises
        LoadRejected or WorkerLost."""
        metadata = self.inspections[model.id].metadata
        # A gateway names the devices of its own load; the operator's choice holds for all replicas.
        devices = self._library.find(model.id).devices
        model = replace(model, replicas=1, devices=devices, min_context_tokens=None)
        if (room := await self._room.for_extra(model, metadata, replicas.taken_devices)) is None:
            return False
        chosen, free_bytes = room
        host = self._harnesses.of(model).replica(model, metadata, chosen)
        return await self._extras.add(replicas, host, free_bytes)

    async def wake(self, model: KnownModel, instance: Instance, on_wait: OnWait) -> None:
        """Wakes a sleeping model where it is. On InsufficientCapacity or LoadFailed the model is still asleep
        (`MemoryElsewhere`: other devices have room for it). On Damaged or WorkerLost nothing of it is left."""
        host, resident = instance.host, instance.resident
        model = replace(model, min_context_tokens=None)  # it wakes with the context that it has
        try:
            async with self._room.for_wake(model, host, resident, on_wait):
                await wake_settled(host)
                instance.woken()
        except (InsufficientCapacity, LoadRejected) as error:
            if await self._room.has_room_elsewhere(error, model, self.inspections[model.id].metadata, host):
                raise MemoryElsewhere(about(model.id, error)) from error
            if isinstance(error, LoadRejected):
                raise _load_error(model.id, error) from error
            raise

    def last_lines(self, model: KnownModel) -> tuple[str, ...]:
        """The end of the log of the server that runs it."""
        upstream = self._harnesses.of(model).upstream(model)
        return () if upstream is None else upstream.log(0).lines[-_LAST_LINES:]

    def restarts(self, model: KnownModel) -> bool:
        """Whether the model is reloaded without a request when it is lost."""
        return model.member is None and self._harnesses.of(model).restarts

    # Files

    async def find_local(self, model: KnownModel) -> Path | None:
        """The local path of the model when all of it is on disk, or if it needs no files. Raises LoadFailed."""
        if not self._harnesses.of(model).needs_files(model):
            return Path()
        return await self._reader.find_local(model.source, self._library.cache, model.quant)

    async def local_path(self, model: KnownModel) -> Path:
        """The local path of the model, whose files must be on disk and not damaged. Raises LoadFailed, and
        InvalidValue for a model whose text is not this node's work."""
        if (upstream := self._harnesses.of(model).upstream(model)) is not None:
            raise InvalidValue(
                f"{model.id} is run by the server of the harness {upstream.harness}; only it knows its tokens",
                param="model",
            )
        inspection = self.inspections.get(model.id)
        if inspection is None and (damage := self.damaged.get(model.id)) is not None:
            raise from_code(damage.code, damage.message)
        path = inspection.metadata.path if inspection is not None else await self.find_local(model)
        if path is None:
            raise LoadFailed(f"the files of {model.id} are not on this node yet; POST /models/load fetches them")
        return path

    def known_path(self, model_id: str) -> Path | None:
        """Where its files are, if they were read."""
        inspection = self.inspections.get(model_id)
        return None if inspection is None else inspection.metadata.path

    async def download(
        self, model: KnownModel, on_progress: Callable[[str, int, int], None], *, uses_hub: bool = True
    ) -> Path:
        """The local path of the model, after getting what is missing from other nodes and the hub. Raises
        LoadFailed."""
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()

        def progress(done_bytes: int, total_bytes: int) -> None:
            loop.call_soon_threadsafe(on_progress, "download", done_bytes, total_bytes)

        sources = FileSources(self._library.neighbours(model), uses_hub)
        arguments = (model.source, self._library.cache, model.quant, progress, cancelled.is_set, sources)
        download = in_own_thread(self._fetch, *arguments)
        try:
            path = await asyncio.shield(download)
            await asyncio.to_thread(self._library.name_copy, model)
            return path
        except asyncio.CancelledError:
            cancelled.set()
            with contextlib.suppress(Cancelled, CheckpointError):
                await download  # the thread checks the event often
            raise
        except (CheckpointError, OSError) as error:
            kind = next((kind for cause, kind in _DOWNLOAD_ERRORS.items() if isinstance(error, cause)), LoadFailed)
            raise kind(about(model.id, error)) from error

    # Preflight

    async def inspect(self, model: KnownModel, path: Path) -> Inspection:
        """Reads the model's headers and chat template, once until its files change. Raises LoadFailed."""
        known = self.inspections.get(model.id)
        if (
            known is not None
            and self._library.draft_of(model) is None  # a draft model's files may have arrived since
            and (path, _read_options(model)) == (known.metadata.path, _read_options(known.model))
            and await self._stamps(model, path) == known.stamps
        ):
            return known
        inspection = self.inspections[model.id] = await self.read(model, path)
        self.damaged.pop(model.id, None)
        return inspection

    async def read(self, model: KnownModel, path: Path) -> Inspection:
        """Like `inspect`, without keeping the result: for files other than those of a model in memory. Raises
        LoadFailed."""
        harness, stamps = self._harnesses.of(model), await self._stamps(model, path)  # files may change meanwhile
        metadata, quantised = await harness.read(model, path)
        text = await harness.read_text(model, path)
        content = await self.content(path) if stamps else ""
        return Inspection(metadata, text, model, quantised, stamps, content)

    async def content(self, path: Path) -> str:
        """The digest of all bytes of the model; empty while they are not known, or cannot be read."""
        with contextlib.suppress(OSError):
            return await asyncio.to_thread(lambda: self._digests.of_files(model_files(path)))
        return ""

    def forget(self, model_id: str) -> None:
        """The model's files are gone."""
        self.inspections.pop(model_id, None)
        self._estimates.pop(model_id, None)
        self.damaged.pop(model_id, None)
        self._damaged_files.pop(model_id, None)
        self._absent.discard(model_id)

    async def inspect_library(self, is_in_memory: Callable[[str], bool]) -> None:
        """Inspects every model whose files are complete, so that its size is known before a load. Reports paths without
        files, and notices files that appear later or change while the model is not in memory."""
        for model in self._library:
            known = self.inspections.get(model.id)
            if known is not None and not is_in_memory(model.id):
                is_same = await self._stamps(model, known.metadata.path) == known.stamps
                if not is_same and self.inspections.get(model.id) is known and not is_in_memory(model.id):
                    self.forget(model.id)
            await self.inspect_listed(model)

    async def _stamps(self, model: KnownModel, path: Path) -> FileStamps:
        if not self._harnesses.of(model).needs_files(model):
            return ()
        return await asyncio.to_thread(file_stamps, path)

    async def inspect_listed(self, model: KnownModel) -> None:
        """Inspects one of them, unless already done."""
        if model.id in self.inspections or not await self._may_be_usable(model.id):
            return
        path = None
        try:
            path = await self.find_local(model)
            if path is None:
                if is_path(model.source) and model.id not in self._absent:
                    self._absent.add(model.id)
                    raise SourceNotFound(
                        f"{model.id}: there is no complete model at {model.source}; correct its `source`, or put "
                        "the files there"
                    )
                return
            if model.id in self._absent:
                self._absent.discard(model.id)
                self.damaged.pop(model.id, None)
            stamps = await self._stamps(model, path)  # before they are read: they may change meanwhile
            inspection = await self.read(model, path)
        except CortexError as error:
            before = self.damaged.get(model.id)
            self.damaged[model.id] = error.with_traceback(None)
            if path is not None:
                self._damaged_files[model.id] = (path, stamps)
            if before is None or before.message != error.message:
                log.warning("%s", error.message)
        else:
            self.damaged.pop(model.id, None)
            self._damaged_files.pop(model.id, None)
            if model.id not in self.inspections:  # else a load has inspected the requested form
                self.inspections[model.id] = inspection

    async def _may_be_usable(self, model_id: str) -> bool:
        """Whether to read its files: they have not failed the inspection, or have changed since."""
        if model_id not in self.damaged or model_id in self._absent:
            return True
        if (known := self._damaged_files.get(model_id)) is None:
            return False
        path, stamps = known
        return await asyncio.to_thread(file_stamps, path) != stamps

    def estimate_basis(self, model: KnownModel) -> object:
        """What an estimate depends on in addition to the model and its files."""
        return self._harnesses.of(model).estimates.basis(self._devices[0])

    def estimate(self, model: KnownModel, metadata: FileMetadata) -> Estimate:
        """The estimate on the devices that the model may use. Every poll needs it and it takes milliseconds, so it is
        recomputed only after a change."""
        estimates = self._harnesses.of(model).estimates
        basis = (model, metadata, self.estimate_basis(model))
        known_basis, estimate = self._estimates.get(model.id, (None, None))
        if estimate is None or basis != known_basis:
            stages = None
            if model.pipeline_parallel > 1:
                stages = estimates.empty_stages(model, metadata, self._devices)
            layers = tuple(stage.num_layers for stage in stages or ())
            estimate = Estimate(estimates.footprint(model, metadata, self._devices), layers)
            self._estimates[model.id] = (basis, estimate)
        return estimate

    async def _load_weights(self, instance: Instance, path: Path, *, uses_text: bool) -> None:
        """Loads the weights and starts the tokenizer concurrently. If either fails or this is cancelled, the weights
        are unloaded again. Raises LoadRejected or WorkerLost, and the tokenizer's LoadFailed."""
        host = instance.host
        starting = self._texts.wake(instance.model_id, path) if uses_text else asyncio.sleep(0)
        tokenizer = asyncio.create_task(starting)
        weights = asyncio.create_task(host.load(instance))
        try:
            await asyncio.wait({weights, tokenizer}, return_when=asyncio.FIRST_EXCEPTION)
            if tokenizer.done():
                tokenizer.result()
            weights.result()
            instance.loaded()
        except BaseException:
            tokenizer.cancel()
            weights.cancel()
            await asyncio.wait({weights})
            if not weights.cancelled() and weights.exception() is None:
                await host.unload()
            raise


def _read_options(model: KnownModel) -> tuple[object, ...]:
    """The options on which the metadata from its files depends."""
    return model.quant, model.tensor_parallel, model.speculation, model.chat_template


def _smaller_forms(quantised: Mapping[str, Footprint]) -> str:
    """The part of an error about quantisations in which the model would be smaller."""
    if not quantised:
        return ""
    sizes = ", ".join(f"{gib(size.least_bytes)} as {name}" for name, size in quantised.items())
    return f"; quantised at load (`quant`) it needs at least {sizes}"


def _load_error(model_id: str, error: LoadRejected) -> CortexError:
    kinds = {FaultKind.OUT_OF_MEMORY: InsufficientCapacity, FaultKind.UNSUPPORTED: ModelUnsupported}
    return kinds.get(error.kind, LoadFailed)(about(model_id, error))
