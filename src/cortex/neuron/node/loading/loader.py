"""From a model's name to an instance that serves: fetch, check, pick a device, load.

Loads onto one device go one after another, so that each sees the memory the last one left. Everything
blocking runs on threads; cancelling calls off the download or the load, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.node.instance import Instance, ServingLimits
from cortex.neuron.node.loading.forecast import Footprint, Forecast
from cortex.neuron.node.loading.library import Fetch, FindLocal, KnownModel, Library
from cortex.neuron.node.loading.observer import LoadObserver
from cortex.neuron.node.loading.preflight import ModelFacts, choose_device, inspect
from cortex.neuron.node.texts import Texts
from cortex.neuron.tokenizer_process.client import UNREADABLE
from cortex.neuron.weights.errors import Cancelled, CheckpointError, HubUnreachable
from cortex.neuron.worker.discovery import DeviceReading
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.supervisor import LoadRejected, Resident, WorkerSupervisor
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node import Capabilities, Device

MAX_DEVICES_PER_MODEL = 1
"""Reported in `/discovery`, so that a gateway plans no load that `_check` would reject."""
_SETTLE_S = 2.0
"""A device may report memory as taken for a moment after it was freed."""
_SETTLE_INTERVAL_S = 0.2


class HubUnavailable(LoadFailed):
    """The hub did not answer and the cache does not hold the model; worth another try later."""


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What is known of a model's files once they are at hand."""

    facts: ModelFacts
    capabilities: Capabilities
    asked_quant: str | None


class ModelLoader:
    """Belongs to the daemon's loop; one for all models of the node."""

    def __init__(
        self,
        config: NeuronConfig,
        library: Library,
        devices: tuple[Device, ...],
        supervisors: Mapping[int, WorkerSupervisor],
        *,
        read_devices: Callable[[tuple[Device, ...]], dict[int, DeviceReading]],
        fetch: Fetch,
        find_local: FindLocal,
        texts: Texts,
        capabilities_of: Callable[[Path], Capabilities],
    ) -> None:
        self._config = config
        self.forecast = Forecast(config)
        self._library = library
        self._devices = devices
        self._supervisors = supervisors
        self._read_devices = read_devices
        self._fetch = fetch
        self._find_local = find_local
        self._texts = texts
        self._capabilities_of = capabilities_of
        self._device_locks = {device.index: asyncio.Lock() for device in devices}
        self.surveyed: dict[str, Surveyed] = {}
        """By model id; kept after an unload."""

    async def __call__(self, model: KnownModel, observer: LoadObserver) -> Instance:
        """Raises LoadFailed, InsufficientCapacity, or the supervisor's WorkerLost."""
        self._check(model)
        path = await self._files(model, observer)
        observer.on_files_at_hand()
        survey = await self.survey(model, path)
        async with self._room_for(model, survey.facts) as device:
            supervisor = self._supervisors[device.index]
            instance = self._instance(model.id, supervisor, observer)
            spec = self._spec(model, survey.facts, device)
            text = asyncio.create_task(self._texts.awake(model.id, path))
            try:
                resident = await _loaded_with(text, supervisor, spec, instance)
            except LoadRejected as error:
                kind = InsufficientCapacity if error.kind is FaultKind.OUT_OF_MEMORY else LoadFailed
                raise kind(f"{model.id}: {error}") from error
            # Nothing is awaited from here on: a cancelled bring-up must not leave a loaded model behind.
            instance.loaded(resident)
            return instance

    async def wake(self, instance: Instance) -> None:
        """Brings a sleeping model back, where it was. Raises InsufficientCapacity or LoadFailed (it sleeps as before),
        or the supervisor's Damaged or WorkerLost."""
        loop = asyncio.get_running_loop()
        async with self._device_locks[instance.supervisor.device.index]:
            while True:
                try:
                    return await instance.wake()
                except LoadRejected as error:
                    is_full = error.kind is FaultKind.OUT_OF_MEMORY
                    if not is_full or loop.time() - instance.supervisor.freed_at_s > _SETTLE_S:
                        kind = InsufficientCapacity if is_full else LoadFailed
                        raise kind(f"{instance.model_id}: {error}") from error
                await asyncio.sleep(_SETTLE_INTERVAL_S)

    def _check(self, model: KnownModel) -> None:
        """What a request or a config file may ask for that this node cannot do. Raises LoadFailed."""
        if model.tensor_parallel > MAX_DEVICES_PER_MODEL:
            raise LoadFailed(
                f"{model.id} asks for tensor_parallel = {model.tensor_parallel}; "
                "this node runs a model on one device: leave it at 1 and choose a model that fits"
            )
        for index in model.devices:
            if index not in self._device_locks:
                have = ", ".join(str(device.index) for device in self._devices)
                raise LoadFailed(f"{model.id} is meant for device {index}, but this node has {have}")

    def footprint(self, model: KnownModel, facts: ModelFacts) -> Footprint:
        """What the model needs and takes on those of this node's devices that it may use."""
        return self.forecast.footprint(model, facts, self._devices)

    async def survey(self, model: KnownModel, path: Path) -> Surveyed:
        """Reads headers and templates on a thread; remembered. Raises LoadFailed."""
        known = self.surveyed.get(model.id)
        if known is not None and (known.facts.path, known.asked_quant) == (path, model.quant):
            return known
        survey = await asyncio.to_thread(self._survey, model, path)
        self.surveyed[model.id] = survey
        return survey

    def _survey(self, model: KnownModel, path: Path) -> Surveyed:
        facts = inspect(path, model.quant, name=model.id)
        try:
            return Surveyed(facts, self._capabilities_of(path), model.quant)
        except UNREADABLE as error:
            raise LoadFailed(f"{model.id}: its chat template cannot be read: {error}") from error

    async def _files(self, model: KnownModel, observer: LoadObserver) -> Path:
        """The local path of the model. What is on disk is used as it is; the hub is asked for the rest."""
        path = await asyncio.to_thread(self._find_local, model.source, self._library.cache, model.quant)
        return path if path is not None else await self._download(model, observer)

    async def _download(self, model: KnownModel, observer: LoadObserver) -> Path:
        loop = asyncio.get_running_loop()
        called_off = threading.Event()

        def progress(done_bytes: int, total_bytes: int) -> None:
            loop.call_soon_threadsafe(observer.on_downloading)
            loop.call_soon_threadsafe(observer.on_progress, "download", done_bytes, total_bytes)

        arguments = (model.source, self._library.cache, model.quant, progress, called_off.is_set)
        work = asyncio.create_task(asyncio.to_thread(self._fetch, *arguments))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            called_off.set()
            with contextlib.suppress(Cancelled, CheckpointError):
                await work  # the thread looks at the flag often
            raise
        except HubUnreachable as error:
            raise HubUnavailable(f"{model.id}: {error}") from error
        except (CheckpointError, OSError) as error:
            raise LoadFailed(f"{model.id}: {error}") from error

    @contextlib.asynccontextmanager
    async def _room_for(self, model: KnownModel, facts: ModelFacts) -> AsyncIterator[Device]:
        """A device with room for the model, on which nothing else is loaded meanwhile. Raises InsufficientCapacity."""
        quiet = tuple(device for device in self._devices if not self._device_locks[device.index].locked())
        try:
            index = await self._choose(model, facts, quiet)
        except InsufficientCapacity:
            index = await self._choose(model, facts, self._devices)
        async with self._device_locks[index]:
            device = next(device for device in self._devices if device.index == index)
            await self._choose(model, facts, (device,))  # a load that was under way may have taken the room
            yield device

    async def _choose(self, model: KnownModel, facts: ModelFacts, candidates: tuple[Device, ...]) -> int:
        """Waits a moment for memory that was just freed, then raises InsufficientCapacity."""
        loop = asyncio.get_running_loop()
        while True:
            readings = await asyncio.to_thread(self._read_devices, self._devices)
            try:
                return choose_device(
                    model.id,
                    self.forecast.least_bytes(model, facts, self._devices[0]),
                    candidates,
                    readings,
                    allowed=model.devices,
                    reserve=self.forecast.reserve,
                )
            except InsufficientCapacity:
                freed_at_s = max(supervisor.freed_at_s for supervisor in self._supervisors.values())
                if loop.time() - freed_at_s > _SETTLE_S:
                    raise
            await asyncio.sleep(_SETTLE_INTERVAL_S)

    def _spec(self, model: KnownModel, facts: ModelFacts, device: Device) -> LoadSpec:
        limits = self._config.limits
        return LoadSpec(
            path=str(facts.path),
            dtype=self._config.harness.torch.dtype,
            context_tokens=model.context_tokens,
            max_num_seqs=limits.max_num_seqs,
            prefill_chunk_tokens=limits.prefill_chunk_tokens,
            memory_bytes=self.forecast.ceiling_bytes(model, facts, device),
            min_free_bytes=limits.min_free_vram_mb << 20,
        )

    def _instance(self, model_id: str, supervisor: WorkerSupervisor, observer: LoadObserver) -> Instance:
        limits = self._config.limits
        return Instance(
            model_id,
            supervisor,
            ServingLimits(limits.max_num_seqs, limits.max_queue, limits.max_prompt_tokens),
            on_progress=observer.on_progress,
            on_lost=observer.on_lost,
            on_proved=observer.on_proved,
        )


async def _loaded_with(
    text: asyncio.Task[None], supervisor: WorkerSupervisor, spec: LoadSpec, instance: Instance
) -> Resident:
    """The model in the worker, loaded while its text is being read. Where either fails, and when this is cancelled,
    nothing is left in the worker."""
    loading = asyncio.create_task(supervisor.load(spec, instance))
    try:
        await asyncio.wait({loading, text}, return_when=asyncio.FIRST_EXCEPTION)
        if text.done():
            text.result()
        return loading.result()
    except BaseException:
        text.cancel()
        loading.cancel()
        await asyncio.wait({loading})
        if not loading.cancelled() and loading.exception() is None:
            await supervisor.unload(loading.result())
        raise
