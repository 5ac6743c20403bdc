"""Loads models: from a name to an instance that serves.

`ModelLoader.load` reads from top to bottom: resolve the files, preflight them, find a device with room (or as many as
the model is divided among), load the weights in its worker while the tokenizer starts. Downloads run on threads, and
files are read in the survey process. A load that fails or is cancelled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.recipes import RECIPES, Recipe
from cortex.neuron.node.devices import NodeDevices
from cortex.neuron.node.instance import Instance, ModelCallbacks
from cortex.neuron.node.loading.device_choice import ChosenDevices, check_devices
from cortex.neuron.node.loading.device_room import DeviceRoom, RoomElsewhere, wake_settled
from cortex.neuron.node.loading.forecast import Footprint, Forecast
from cortex.neuron.node.loading.library import Fetch, KnownModel, Library
from cortex.neuron.node.loading.preflight import ModelFacts, gigabytes
from cortex.neuron.node.memory.ceilings import smallest
from cortex.neuron.node.spanning.lead import Lead
from cortex.neuron.node.survey_process.client import Surveys
from cortex.neuron.node.survey_process.protocol import Read
from cortex.neuron.node.text.models import Texts
from cortex.neuron.text.model import TextSurvey
from cortex.neuron.weights import errors as weight_errors
from cortex.neuron.weights.errors import Cancelled, CheckpointError
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import LoadRejected, ModelHost
from cortex.neuron.worker.replicas.host import WorkerReplicas
from cortex.wire.errors import (
    CortexError,
    DiskFull,
    HubUnavailable,
    InsufficientCapacity,
    LoadFailed,
    SourceNotFound,
    about,
)
from cortex.wire.node.protocol import Device

log = logging.getLogger(__name__)

_DOWNLOAD_ERRORS: dict[type[CheckpointError], type[LoadFailed]] = {
    weight_errors.HubUnreachable: HubUnavailable,
    weight_errors.NotOnHub: SourceNotFound,
    weight_errors.NoDiskSpace: DiskFull,
}


@dataclass(frozen=True, slots=True)
class Survey:
    """What a model's files say about it."""

    facts: ModelFacts
    """Of the whole model, or of one rank of a divided one."""
    text: TextSurvey
    requested_quant: str | None
    quantised: Mapping[str, Footprint]
    """The memory of dense weights with each recipe; empty if they are quantised, or cannot be here."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a model will take of this node, as far as its files and options say."""

    footprint: Footprint
    stage_layers: tuple[int, ...]
    """How many layers each device would hold if all were empty; empty for a model that is not divided by layers, that
    does not fit, or whose other devices are on other nodes."""


class ModelLoader:
    """Loads and wakes all models of the node. Belongs to the daemon's loop."""

    def __init__(
        self,
        config: NeuronConfig,
        library: Library,
        devices: NodeDevices,
        forecast: Forecast,
        room: DeviceRoom,
        *,
        fetch: Fetch,
        surveys: Surveys,
        texts: Texts,
        lead: Lead,
    ) -> None:
        self._config = config
        self._library = library
        self._devices = devices.all
        self._hosts = devices
        self._lead = lead
        self._forecast = forecast
        self._room = room
        self._fetch = fetch
        self._reader = surveys
        self._texts = texts
        self.surveys: dict[str, Survey] = {}
        """By model id; kept after an unload."""
        self._estimates: dict[str, tuple[object, Estimate]] = {}
        """By model id: the latest one, and what it was computed from."""
        self.damaged: dict[str, str] = {}
        """Models whose files failed the survey → why."""

    async def load(self, model: KnownModel, callbacks: ModelCallbacks) -> Instance:
        """Raises LoadFailed, InsufficientCapacity or WorkerLost."""
        self._lead.reject_unsupported(model)
        check_devices(model, self._devices)
        path = await self.find_local(model) or await self.download(model, callbacks.on_progress)
        callbacks.on_files_ready()
        survey = await self.survey(model, path)
        try:
            async with self._room.for_load(model, survey.facts) as chosen:
                host, chosen = await self._host(model, survey.facts, chosen)
                instance = Instance(model.id, host, self._config.limits, callbacks)
                own_stages = chosen.stages[: len(chosen.devices)]
                instance.stage_layers = tuple(stage.num_layers for stage in own_stages) * model.replicas
                await self._load_weights(instance, self.spec(model, survey.facts, chosen), path)
        except InsufficientCapacity as error:
            advice = _smaller_forms(survey.quantised)
            raise InsufficientCapacity(f"{error.message}{advice}", details=error.details) from error
        self._library.remember_quant(model.id, model.quant)
        return instance

    async def _host(
        self, model: KnownModel, facts: ModelFacts, chosen: ChosenDevices
    ) -> tuple[ModelHost, ChosenDevices]:
        """Where the model goes that takes these devices here, with the stages of all nodes. Raises LoadFailed,
        InsufficientCapacity or WorkerLost."""
        if not model.nodes:
            lock, may_grow = self._room.locked, model.may_grow
            return self._hosts.host(model.id, chosen.indices, model.replicas, lock, may_grow=may_grow), chosen
        claim = self._hosts.claims.new(model.id, chosen.indices, spans=True)
        claim.take()  # now: a peer that leads a model itself must not wait here for devices that wait for it
        try:
            return await self._lead.host(model, facts, chosen, claim)
        except LoadRejected as error:
            claim.release()
            raise _load_error(model.id, error) from error
        except BaseException:
            claim.release()
            raise

    async def add_replica(self, model: KnownModel, replicas: WorkerReplicas) -> bool:
        """Loads an extra replica of a ready model on a device with room for it beside everything else. False: there is
        none, or the load was cancelled, because the model goes or another load needs the memory. Raises LoadRejected
        or WorkerLost."""
        facts = self.surveys[model.id].facts
        # A gateway names the devices of the load that it asked for; the operator's choice holds for all replicas.
        model = replace(model, replicas=1, devices=self._library.find(model.id).devices)
        if (room := await self._room.for_extra(model, facts, replicas.taken_devices)) is None:
            return False
        device, free_bytes, left_bytes = room
        spec = self.spec(model, facts, ChosenDevices((device,)))
        spec = replace(spec, memory_bytes=smallest(spec.memory_bytes, left_bytes))
        host = self._hosts.supervisors[device.index]
        return await self._hosts.extras.add(replicas, host, spec, free_bytes)

    async def wake(self, model: KnownModel, instance: Instance) -> None:
        """Wakes a sleeping model where it is. Raises InsufficientCapacity or LoadFailed (the model is asleep as before;
        `RoomElsewhere`: there is room for it on other devices). Raises Damaged or WorkerLost if nothing of it is
        left."""
        host, resident = instance.host, instance.resident
        try:
            async with self._room.for_wake(model.id, host, resident):
                instance.woken(await wake_settled(host, resident))
        except (InsufficientCapacity, LoadRejected) as error:
            if await self._room.has_room_elsewhere(error, model, self.surveys[model.id].facts, host, resident):
                raise RoomElsewhere(about(model.id, error)) from error
            if isinstance(error, LoadRejected):
                raise _load_error(model.id, error) from error
            raise

    # Files

    async def find_local(self, model: KnownModel) -> Path | None:
        """The local path of the model when all of it is on disk. Raises LoadFailed."""
        return await self._reader.find_local(model.source, self._library.cache, model.quant)

    async def download(self, model: KnownModel, on_progress: Callable[[str, int, int], None]) -> Path:
        """The local path of the model, after downloading what is missing. Raises LoadFailed."""
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()

        def progress(done_bytes: int, total_bytes: int) -> None:
            loop.call_soon_threadsafe(on_progress, "download", done_bytes, total_bytes)

        arguments = (model.source, self._library.cache, model.quant, progress, cancelled.is_set)
        download = asyncio.create_task(asyncio.to_thread(self._fetch, *arguments))
        try:
            return await asyncio.shield(download)
        except asyncio.CancelledError:
            cancelled.set()
            with contextlib.suppress(Cancelled, CheckpointError):
                await download  # the thread checks the event often
            raise
        except (CheckpointError, OSError) as error:
            kind = next((kind for cause, kind in _DOWNLOAD_ERRORS.items() if isinstance(error, cause)), LoadFailed)
            raise kind(about(model.id, error)) from error

    # Preflight

    async def survey(self, model: KnownModel, path: Path) -> Survey:
        """Reads the model's headers and chat template, once. Raises LoadFailed."""
        known = self.surveys.get(model.id)
        wanted = (path, model.quant, model.tensor_parallel)
        if known is not None and (known.facts.path, known.requested_quant, known.facts.num_ranks) == wanted:
            return known
        survey = self.surveys[model.id] = await self.read(model, path)
        self.damaged.pop(model.id, None)
        return survey

    async def read(self, model: KnownModel, path: Path) -> Survey:
        """What `survey` finds, without keeping it: of files beside those of a model in memory. Raises LoadFailed."""
        facts = await self.inspect(model, path)
        if facts.recipe is not None and not self._quantises(facts.recipe):
            raise _not_quantised(model, facts.recipe)
        quantised = await asyncio.to_thread(quantised_footprints, self._forecast, model, facts, self._devices)
        return Survey(facts, await self._reader.read_text(path, model.id), model.quant, quantised)

    async def inspect(self, model: KnownModel, path: Path) -> ModelFacts:
        """What the config and the headers say. Raises LoadFailed."""
        return await self._reader.read(Read(str(path), model.id, model.quant, model.tensor_parallel))

    def _quantises(self, recipe: Recipe) -> bool:
        return all(self._forecast.quantises(device, recipe) for device in self._devices)

    def forget(self, model_id: str) -> None:
        """The model's files are gone."""
        self.surveys.pop(model_id, None)
        self._estimates.pop(model_id, None)
        self.damaged.pop(model_id, None)

    async def survey_library(self) -> None:
        """Surveys every model whose files are complete, so that its size is known before it is loaded."""
        for model in self._library:
            if model.id in self.surveys or model.id in self.damaged:
                continue
            try:
                path = await self.find_local(model)
                if path is None:
                    continue
                survey = await self.read(model, path)
            except CortexError as error:
                self.damaged[model.id] = error.message
                log.warning("%s", error.message)
            else:
                self.surveys.setdefault(model.id, survey)  # unless a load has surveyed the form that it was asked for

    def estimate(self, model: KnownModel, facts: ModelFacts) -> Estimate:
        """On those of this node's devices that the model may use. Every poll of the node asks for it, and it takes
        milliseconds, so it is computed again only if something has changed."""
        basis = (model, facts, self._forecast.matrix_device(self._devices[0]))
        known_basis, estimate = self._estimates.get(model.id, (None, None))
        if estimate is None or basis != known_basis:
            estimate = Estimate(self._forecast.footprint(model, facts, self._devices), self._stage_layers(model, facts))
            self._estimates[model.id] = (basis, estimate)
        return estimate

    def _stage_layers(self, model: KnownModel, facts: ModelFacts) -> tuple[int, ...]:
        if model.pipeline_parallel == 1 or model.nodes:
            return ()
        return tuple(stage.num_layers for stage in self._forecast.empty_stages(model, facts, self._devices) or ())

    # Worker and weights

    def spec(self, model: KnownModel, facts: ModelFacts, chosen: ChosenDevices) -> LoadSpec:
        """What each of the devices loads, of which the one with the least to give decides; a stage has a limit of its
        own."""
        ceilings = [self._forecast.ceiling_bytes(model, facts, device) for device in chosen.devices]
        ceilings += [self._room.left_bytes(model, device) for device in chosen.devices]
        limits = self._config.limits
        return LoadSpec(
            path=str(facts.path),
            dtype=self._config.harness.torch.dtype,
            quant=facts.recipe.name if facts.recipe is not None else None,
            context_tokens=model.context_tokens,
            kv_dtype=model.kv_dtype,
            deterministic=model.deterministic,
            max_num_seqs=limits.max_num_seqs,
            prefill_chunk_tokens=limits.prefill_chunk_tokens,
            memory_bytes=smallest(*ceilings),
            min_free_bytes=limits.min_free_vram_mb << 20,
            num_host_shares=sum(each.kind == "cpu" for each in self._devices) or 1,
            stages=chosen.stages,
        )

    async def _load_weights(self, instance: Instance, spec: LoadSpec, path: Path) -> None:
        """Loads the weights and starts the tokenizer side by side. Where either fails, and when this is cancelled,
        the weights are unloaded again. Raises LoadFailed, InsufficientCapacity or WorkerLost."""
        host = instance.host
        tokenizer = asyncio.create_task(self._texts.awake(instance.model_id, path))
        weights = asyncio.create_task(host.load(spec, instance))
        try:
            await asyncio.wait({weights, tokenizer}, return_when=asyncio.FIRST_EXCEPTION)
            if tokenizer.done():
                tokenizer.result()
            instance.loaded(weights.result())
        except BaseException as error:
            tokenizer.cancel()
            weights.cancel()
            await asyncio.wait({weights})
            if not weights.cancelled() and weights.exception() is None:
                await host.unload(weights.result())
            if isinstance(error, LoadRejected):
                raise _load_error(instance.model_id, error) from error
            raise


def _not_quantised(model: KnownModel, recipe: Recipe) -> LoadFailed:
    remedy = (
        f"for {model.quant} name a GGUF of it as the source (a file, or owner/name-GGUF:{model.quant} on the hub)"
        if isinstance(recipe.matrices, Layout)
        else "choose q8 or q4"  # there are no GGUFs of it
    )
    return LoadFailed(
        f"{model.id} is not quantised as {recipe.name} at load on this node, which takes a GPU and the dtype "
        "auto or bfloat16, or for the formats of GGUF files a CPU with asimddp, avx2 or avx512f and the dtype "
        f"auto; {remedy}, or omit `quant`"
    )


def quantised_footprints(
    forecast: Forecast, model: KnownModel, facts: ModelFacts, devices: Sequence[Device]
) -> dict[str, Footprint]:
    """The memory of a model with dense weights if they were quantised at load, by recipe."""
    if facts.quant is not None:
        return {}
    return {
        name: forecast.footprint(model, replace(facts, recipe=recipe), devices)
        for name, recipe in RECIPES.items()
        if all(forecast.quantises(device, recipe) for device in devices)
    }


def _smaller_forms(quantised: Mapping[str, Footprint]) -> str:
    """What an error says about a model that would be smaller."""
    if not quantised:
        return ""
    sizes = ", ".join(f"{gigabytes(size.least_bytes)} as {name}" for name, size in quantised.items())
    return f"; quantised at load (`quant`) it needs at least {sizes}"


def _load_error(model_id: str, error: LoadRejected) -> CortexError:
    kind = InsufficientCapacity if error.kind is FaultKind.OUT_OF_MEMORY else LoadFailed
    return kind(about(model_id, error))
