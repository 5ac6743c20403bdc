"""The node: its devices, its models, and what the HTTP front asks of them. Lives in the daemon's loop.

Reads (`discovery`, `health`, `models`, `model`) answer from what is at hand and never wait for a worker, a
disk or a driver. Each model has one owner; the node only finds it and passes wishes on.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cortex
from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.memory.host import read_host_memory
from cortex.neuron.engine.request import EngineRequest, EngineStats
from cortex.neuron.node.controller import ModelController
from cortex.neuron.node.event_feed import Feed
from cortex.neuron.node.generation import Generation
from cortex.neuron.node.loading.files import fetch, find_local
from cortex.neuron.node.loading.library import Fetch, FindLocal, KnownModel, Library, scan_cache
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.parking import Parked, Parking, budget_bytes
from cortex.neuron.node.startup_models import StartupModels
from cortex.neuron.node.status import describe
from cortex.neuron.node.texts import Texts, TextSource
from cortex.neuron.text.model import TextModel, capabilities_of
from cortex.neuron.tokenizer_process.client import TokenizerClient
from cortex.neuron.worker.address import DeviceAddress
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.discovery import DeviceReading, Inventory, discover, read_devices
from cortex.neuron.worker.factory import ENGINE, WorkerFactory
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.neuron.worker.watchdog import Patience
from cortex.wire.errors import CortexError, LoadFailed, ShuttingDown, shorten
from cortex.wire.node import (
    Capabilities,
    Device,
    DeviceHealth,
    Discovery,
    Health,
    LoadRequest,
    ModelState,
    ModelStatus,
    NodeEvent,
    UnloadRequest,
)

log = logging.getLogger(__name__)

_SAMPLE_S = 1.0
_SCAN_EVERY_SAMPLES = 30


@dataclass(frozen=True, slots=True)
class Parts:
    """What a node is made of. The defaults are the real ones; tests put faulty ones in their place."""

    engine: str = ENGINE
    discover: Callable[[], Inventory] = discover
    read_devices: Callable[[tuple[Device, ...]], dict[int, DeviceReading]] = read_devices
    fetch: Fetch = fetch
    find_local: FindLocal = find_local
    open_text: Callable[[Path], TextSource] = TokenizerClient
    capabilities_of: Callable[[Path], Capabilities] = capabilities_of
    policy: BackoffPolicy = field(default_factory=BackoffPolicy)
    patience: Patience | None = None
    first_retry_s: float = 5.0


class Node:
    """Made by `start`, ended by `close`; everything else in between, on the same loop."""

    def __init__(self, config: NeuronConfig, inventory: Inventory, parts: Parts) -> None:
        patience = parts.patience or Patience(step_s=config.limits.step_timeout_s, load_s=config.limits.load_timeout_s)
        self.discovery = _discovery(config, inventory)
        self._config = config
        self._parts = parts
        self._started_s = time.monotonic()
        self._devices = inventory.devices
        self._readings = dict(inventory.readings)
        self._worker_factory = WorkerFactory(parts.engine)
        self._supervisors = {
            device.index: WorkerSupervisor(DeviceAddress.of(device), self._worker_factory, patience=patience)
            for device in inventory.devices
        }
        self._library = Library(config)
        self._texts = Texts(parts.open_text)
        self._loader = ModelLoader(
            config,
            self._library,
            inventory.devices,
            self._supervisors,
            read_devices=parts.read_devices,
            fetch=parts.fetch,
            find_local=parts.find_local,
            texts=self._texts,
            capabilities_of=parts.capabilities_of,
        )
        self._controllers: dict[str, ModelController] = {}
        self._parking = Parking(
            self._parking_budget, self._parked, lambda model_id: self._controllers[model_id].dismiss()
        )
        self._feed = Feed()
        self._unreadable: set[str] = set()
        """Models whose files were looked at in vain; said once."""
        self._startup_models = StartupModels(
            [default.model_id for default in config.default_models],
            lambda model_id: self.load(LoadRequest(model_id=model_id), wait=True),
            self._activation_changed,
            parts.first_retry_s,
        )
        self._background: list[asyncio.Task[None]] = []
        self._closing = False

    @classmethod
    async def start(cls, config: NeuronConfig, parts: Parts | None = None) -> Node:
        """A node that answers at once; default models load in the background."""
        parts = parts or Parts()
        node = cls(config, await asyncio.to_thread(parts.discover), parts)
        node._run_in_background(node._warm_nursery(), "import the engine")
        await node._scan_cache()
        node._run_in_background(node._keep_sampling(), "sample devices")
        node._run_in_background(node._startup_models.run(), "load default models")
        return node

    # Reads

    def health(self) -> Health:
        return Health(
            status="draining" if self._closing else "ok",
            uptime_s=round(time.monotonic() - self._started_s, 3),
            devices=tuple(self._device_health(device) for device in self._devices),
            models=self.models(),
            activation=self._startup_models.status(),
        )

    def models(self) -> tuple[ModelStatus, ...]:
        return tuple(self.model(model.id) for model in self._library)

    def model(self, model_id: str) -> ModelStatus:
        """Raises ModelNotFound."""
        controller = self._controllers.get(model_id)
        model = controller.model if controller is not None else self._library.find(model_id)
        survey = self._loader.surveyed.get(model_id)
        return describe(
            model, controller, survey, None if survey is None else self._loader.footprint(model, survey.facts)
        )

    def engine_stats(self) -> dict[str, EngineStats]:
        """The engines' own counters by model id, as of their last reports; resident models only."""
        return {
            model_id: controller.instance.stats
            for model_id, controller in self._controllers.items()
            if controller.instance is not None
        }

    def subscribe(self) -> AsyncIterator[NodeEvent]:
        """What changes from now on, after the state of everything that is not at rest."""
        busy = [status for status in self.models() if status.state is not ModelState.COLD]
        first = [NodeEvent(kind="model", at_s=time.time(), model=status) for status in busy]
        activation = NodeEvent(kind="activation", at_s=time.time(), activation=self._startup_models.status())
        return self._feed.subscribe((activation, *first))

    # Wishes

    async def load(self, request: LoadRequest, *, wait: bool) -> ModelStatus:
        """Idempotent and single-flight: joins what is under way. With `wait`, returns when ready or raises why not."""
        self._refuse_when_closing()
        if request.harness not in self.discovery.harnesses:
            offered = ", ".join(self.discovery.harnesses)
            raise LoadFailed(f"this node has no harness {shorten(request.harness)!r}; it has {offered}")
        model = self._library.adopt(request)
        if wait:
            await self._controller(model.id).ensure_ready(model)
        else:
            self._controller(model.id).want_ready(model)
        return self.model(request.model_id)

    async def unload(self, request: UnloadRequest) -> ModelStatus:
        """Returns when the memory is back, with `sleep` that of the device. Running requests get `drain_s`, or nothing
        with `force`."""
        drain_s = request.drain_s if request.drain_s is not None else self._config.drain_s
        controller = self._controller(request.model_id)
        take_down = controller.ensure_asleep if request.sleep else controller.ensure_gone
        await take_down(0.0 if request.force else drain_s)
        await self._rest_text(request.model_id)
        return self.model(request.model_id)

    async def text(self, model_id: str) -> TextModel:
        """The model's tokenizer, template and parsers, without its weights; remembered. Raises ModelNotFound,
        LoadFailed or ShuttingDown."""
        self._refuse_when_closing()
        model = self._library.find(model_id)
        survey = self._loader.surveyed.get(model_id)
        path = survey.facts.path if survey is not None else await self._find_local(model)
        if path is None:
            raise LoadFailed(f"the files of {model_id} are not on this node yet; POST /models/load fetches them")
        return await self._texts.get(model_id, path)

    def submit(self, model_id: str, request: EngineRequest) -> Generation:
        """Takes a request for a model that is ready.

        Raises ModelNotFound, Overloaded, Recovering, ShuttingDown, LoadFailed, ContextLengthExceeded,
        PromptTooLongForMemory.
        """
        self._refuse_when_closing()
        return self._controller(model_id).serving().submit(request)

    async def recycle(self, device: int) -> bool:
        """Replaces an idle device's worker, which gives everything back. False while models are on it."""
        return await self._supervisors[device].recycle()

    async def close(self) -> None:
        """Admission closes and the queue fails at once; running requests get `drain_s`; then the workers end."""
        if self._closing:
            return
        self._closing = True
        self._feed.publish(NodeEvent(kind="shutdown", at_s=time.time()))
        for task in self._background:
            task.cancel()
        error = ShuttingDown("the node is shutting down; try another one, or again later", retry_after_s=10)
        instances = [
            controller.instance for controller in self._controllers.values() if controller.instance is not None
        ]
        for instance in instances:
            instance.close_admission(error)
        await asyncio.gather(*(instance.drained(self._config.drain_s) for instance in instances))
        for instance in instances:
            instance.end(error)
        for controller in self._controllers.values():
            controller.abandon()
        await asyncio.gather(*(supervisor.close() for supervisor in self._supervisors.values()))
        await self._worker_factory.close()
        await self._texts.close()
        await asyncio.gather(*(controller.abandoned() for controller in self._controllers.values()))
        await asyncio.gather(*self._background, return_exceptions=True)
        self._feed.close()

    # Inside

    def _controller(self, model_id: str) -> ModelController:
        """Raises ModelNotFound."""
        if model_id not in self._controllers:
            model = self._library.find(model_id)
            self._controllers[model_id] = ModelController(
                model, self._loader, self._parking, self._model_changed, self._parts.policy
            )
        return self._controllers[model_id]

    def _parked(self) -> list[Parked]:
        """The models whose weights are in host memory, asleep or just waking."""
        return [
            Parked(
                model_id, host_bytes, controller.instance.idle_s, may_leave=controller.life.state is ModelState.ASLEEP
            )
            for model_id, controller in self._controllers.items()
            if controller.instance is not None and (host_bytes := controller.instance.host_bytes)
        ]

    def _parking_budget(self, held_bytes: int) -> int:
        return budget_bytes(self._config.limits.sleep_mb, self._devices, read_host_memory(), held_bytes)

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise ShuttingDown("the node is shutting down; try another one, or again later", retry_after_s=10)

    def _model_changed(self, model_id: str) -> None:
        self._feed.publish(NodeEvent(kind="model", at_s=time.time(), model=self.model(model_id)))
        if not self._is_in_memory(model_id):
            self._run_in_background(self._rest_text(model_id), f"end the tokenizer process of {model_id}")

    async def _rest_text(self, model_id: str) -> None:
        if not self._is_in_memory(model_id):  # it may have been wanted again meanwhile
            await self._texts.rest(model_id)

    def _is_in_memory(self, model_id: str) -> bool:
        """Whether the model is loaded, or on its way in or out."""
        controller = self._controllers.get(model_id)
        return controller is not None and controller.life.state not in (ModelState.COLD, ModelState.FAILED)

    def _activation_changed(self) -> None:
        self._feed.publish(NodeEvent(kind="activation", at_s=time.time(), activation=self._startup_models.status()))

    def _device_health(self, device: Device) -> DeviceHealth:
        reading = self._readings.get(device.index, DeviceReading(device.total_bytes, 0))
        reserve = self._loader.forecast.reserve(device)
        return DeviceHealth(
            index=device.index,
            total_bytes=reading.total_bytes,
            free_bytes=reading.free_bytes,
            utilisation=reading.utilisation,
            temperature_c=reading.temperature_c,
            worker=self._supervisors[device.index].state,
            kept_free_bytes=reserve.num_bytes,
            kept_free_share=reserve.share,
        )

    def _run_in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._background = [task for task in self._background if not task.done()]
        self._background.append(asyncio.create_task(work, name=name))

    async def _warm_nursery(self) -> None:
        """The first load should not wait for the engine's import."""
        try:
            await self._worker_factory.warm()
        except OSError as error:
            log.warning("the engine cannot be imported ahead of the first load: %s", error)

    async def _keep_sampling(self) -> None:
        """Keeps the readings and the library fresh, on threads: a sick driver or disk must not hold up the loop."""
        sample = 0
        while True:
            self._readings = await asyncio.to_thread(self._parts.read_devices, self._devices)
            if sample % _SCAN_EVERY_SAMPLES == 0:
                await self._scan_cache()
                await self._survey_library()
            await self._texts.rest_idle(self._is_in_memory)
            await asyncio.sleep(_SAMPLE_S)
            sample += 1

    async def _scan_cache(self) -> None:
        self._library.discovered(await asyncio.to_thread(scan_cache, self._library.cache))

    async def _survey_library(self) -> None:
        """Looks at every model whose files are complete, so that others know its size before it is loaded."""
        for model in self._library:
            if model.id in self._loader.surveyed or model.id in self._unreadable:
                continue
            path = await self._find_local(model)
            if path is None:
                continue
            try:
                await self._loader.survey(model, path)
            except CortexError as error:
                self._unreadable.add(model.id)
                log.warning("%s", error.message)

    async def _find_local(self, model: KnownModel) -> Path | None:
        return await asyncio.to_thread(self._parts.find_local, model.source, self._library.cache, model.quant)


def _discovery(config: NeuronConfig, inventory: Inventory) -> Discovery:
    return Discovery(
        host=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}",
        version=cortex.__version__,
        devices=inventory.devices,
        driver=inventory.driver,
        driver_problem=inventory.driver_problem,
        harnesses=tuple(harness.name for harness in config.harnesses),
    )
