"""The node: its devices, its models, and what the HTTP API asks of them. Lives on the daemon's loop.

Reads (`discovery`, `health`, `models`, `model`) return what is known and never wait for a worker, a disk or a driver.
Each model has one controller; the node finds it and passes requests on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import cortex
from cortex.neuron.config import HARNESSES, NeuronConfig
from cortex.neuron.engine.memory.host import read_host_memory
from cortex.neuron.engine.request import EngineRequest, EngineStats
from cortex.neuron.node.controller import ModelController
from cortex.neuron.node.devices import NodeDevices, ReadDevices
from cortex.neuron.node.event_feed import EventFeed
from cortex.neuron.node.generation import Generation
from cortex.neuron.node.loading.device_room import DeviceRoom
from cortex.neuron.node.loading.files import fetch, find_local
from cortex.neuron.node.loading.forecast import Forecast
from cortex.neuron.node.loading.library import Fetch, FindLocal, Library, scan_cache
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.loading.model_files import ModelFiles
from cortex.neuron.node.memory_ceilings import Ceilings, Holding, MemoryCeilings, equal_parts
from cortex.neuron.node.sleep_budget import SleepBudget, SleepingModel, can_sleep, sleep_budget_bytes
from cortex.neuron.node.spanning.hosted_shares import HostedShares, Place
from cortex.neuron.node.spanning.lead import ConnectPeer, Lead, unconnected
from cortex.neuron.node.spanning.protocol import Connection
from cortex.neuron.node.startup_models import StartupModels
from cortex.neuron.node.status import describe
from cortex.neuron.node.texts import Texts, TextSource
from cortex.neuron.text.model import TextModel, TextSurvey, survey_text
from cortex.neuron.text.preparation import Prepared
from cortex.neuron.text.template.prompt import PromptRules
from cortex.neuron.tokenizer_process.client import TokenizerClient
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.discovery import Inventory, discover, divided, read_devices
from cortex.neuron.worker.factory import ENGINE
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.tasks import SupervisedTask, Supervisor, run_once
from cortex.wire.errors import LoadFailed, ShuttingDown, shorten
from cortex.wire.node import (
    Discovery,
    Health,
    LoadRequest,
    ModelState,
    ModelStatus,
    NodeEvent,
    UnloadRequest,
)
from cortex.wire.packed_request import PackedRequest

log = logging.getLogger(__name__)

_SAMPLE_S = 1.0
_SCAN_EVERY_SAMPLES = 30


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a node that tests replace, to inject faults."""

    engine: str = ENGINE
    discover: Callable[[], Inventory] = discover
    read_devices: ReadDevices = read_devices
    fetch: Fetch = fetch
    find_local: FindLocal = find_local
    open_text: Callable[[Path], TextSource] | None = None
    """None: a tokenizer process for each model."""
    survey_text: Callable[[Path], TextSurvey] = survey_text
    policy: BackoffPolicy = field(default_factory=BackoffPolicy)
    timeouts: WorkerTimeouts | None = None
    first_retry_s: float = 5.0
    connect_peer: ConnectPeer = unconnected


class Node:
    """Made by `start`, ended by `close`; every method in between is called on the same loop."""

    def __init__(self, config: NeuronConfig, inventory: Inventory, parts: Parts) -> None:
        limits = config.limits
        timeouts = parts.timeouts or WorkerTimeouts(step_s=limits.step_timeout_s, load_s=limits.load_timeout_s)
        forecast = Forecast(config)
        ceilings = Ceilings.of(config)
        self.discovery = _discovery(inventory, config.limits.sleep_mb)
        self.devices = NodeDevices(inventory, parts.engine, timeouts, parts.read_devices, forecast.reserve, ceilings)
        self._config = config
        self._policy = parts.policy
        self._started_s = time.monotonic()
        self._library = Library(config)
        open_text = parts.open_text or partial(TokenizerClient, memory_bytes=config.text.memory_mb << 20)
        self._texts = Texts(open_text, config.text, limits.max_queue)
        room = DeviceRoom(self.devices, forecast, MemoryCeilings(ceilings, self._holdings), parts.read_devices)
        self._loader = ModelLoader(
            config,
            self._library,
            self.devices,
            forecast,
            room,
            fetch=parts.fetch,
            find_local=parts.find_local,
            texts=self._texts,
            survey_text=parts.survey_text,
            lead=Lead(config, self.devices, forecast, parts.connect_peer),
        )
        self.shares = HostedShares(Place(self._library, self._loader, room, self.devices))
        self._controllers: dict[str, ModelController] = {}
        self.files = ModelFiles(self._library, self._loader, self._models_in_memory)
        self._sleep_budget = SleepBudget(
            self._sleep_budget_bytes,
            self._sleeping_models,
            lambda model_id: self._controllers[model_id].unload_if_asleep(),
        )
        self._feed = EventFeed()
        self._startup_models = StartupModels(
            [default.model_id for default in config.default_models],
            lambda model_id: self.load(LoadRequest(model_id=model_id), wait=True),
            lambda: self._feed.publish(self._activation_event()),
            parts.first_retry_s,
        )
        self._tasks = Supervisor()
        self._regular: list[SupervisedTask] = []
        self._background: list[asyncio.Task[None]] = []
        """Work that runs once."""
        self._closing = False

    @classmethod
    async def start(cls, config: NeuronConfig, parts: Parts | None = None) -> Node:
        """Returns a node that serves at once; default models load in the background."""
        parts = parts or Parts()
        inventory = divided(await asyncio.to_thread(parts.discover), config.cpu_devices)
        node = cls(config, inventory, parts)
        _warn_of_unknown_devices(config, inventory)
        node._run_in_background(node.devices.warm(), "import the engine")
        await node._scan_cache()
        node._regular = [
            node._tasks.start("sample devices", node._keep_sampling),
            node._tasks.start("load default models", node._startup_models.run),
        ]
        return node

    # Reads

    def health(self) -> Health:
        failing = self._tasks.failing
        limits = self._config.limits
        return Health(
            status="draining" if self._closing else "degraded" if failing else "ok",
            uptime_s=round(time.monotonic() - self._started_s, 3),
            devices=self.devices.health(),
            models=self.models(),
            ceiling_bytes=None if limits.memory_mb is None else limits.memory_mb << 20,
            activation=self._startup_models.status(),
            failing_tasks=failing,
            pulls=self.files.pulls,
            disk=self.files.disk,
            shares=self.shares.statuses(),
        )

    def models(self) -> tuple[ModelStatus, ...]:
        return tuple(self.model(model.id) for model in self._library)

    def model(self, model_id: str) -> ModelStatus:
        """Raises ModelNotFound."""
        controller = self._controllers.get(model_id)
        known = self._library.find(model_id)
        model = controller.model if controller is not None else known
        survey = self._loader.surveys.get(model_id)
        footprint = self._loader.footprint(model, survey.facts) if survey is not None else None
        stage_layers = self._loader.stage_layers(model, survey.facts) if survey is not None else ()
        num_in_preparation = self._texts.num_jobs(model_id)
        return describe(
            model, controller, survey, footprint, stage_layers, num_in_preparation, self.files.disk_bytes(model)
        )

    def engine_stats(self) -> dict[str, EngineStats]:
        """The engines' counters by model id, as of their latest reports; models in memory only."""
        return {
            model_id: controller.instance.stats
            for model_id, controller in self._controllers.items()
            if controller.instance is not None
        }

    def task_restarts(self) -> Mapping[str, int]:
        """How often each background task failed and was started again."""
        return self._tasks.restarts

    def subscribe(self) -> AsyncIterator[NodeEvent]:
        """The state of every model that is not cold, then every change from now on."""
        warm = [status for status in self.models() if status.state is not ModelState.COLD]
        return self._feed.subscribe((self._activation_event(), *map(_model_event, warm)))

    # Models

    async def load(self, request: LoadRequest, *, wait: bool) -> ModelStatus:
        """Idempotent: joins a load in progress. With `wait`, returns when the model is ready or raises why not."""
        self._reject_when_closing()
        if request.harness not in self.discovery.harnesses:
            offered = ", ".join(self.discovery.harnesses)
            raise LoadFailed(f"this node has no harness {shorten(request.harness)!r}; it has {offered}")
        model = self._library.adopt(request)
        self.files.reject_if_deleting(model)
        if wait:
            await self._controller(model.id).ensure_ready(model)
        else:
            self._controller(model.id).want_ready(model)
        return self.model(request.model_id)

    async def unload(self, request: UnloadRequest) -> ModelStatus:
        """Returns when the model's memory is free; with `sleep`, when its device memory is. Running requests get
        `drain_s` to finish, or nothing with `force`."""
        drain_s = request.drain_s if request.drain_s is not None else self._config.drain_s
        controller = self._controller(request.model_id)
        ensure_unloaded = controller.ensure_asleep if request.sleep else controller.ensure_gone
        await ensure_unloaded(0.0 if request.force else drain_s)
        await self._rest_text(request.model_id)
        return self.model(request.model_id)

    async def text(self, model_id: str) -> TextModel:
        """The model's tokenizer, template and parsers, read once and without its weights. Raises ModelNotFound,
        LoadFailed or ShuttingDown."""
        return await self._texts.get(model_id, await self._text_path(model_id))

    async def prepare(self, request: PackedRequest, *, principal: str, in_context: bool = True) -> Prepared:
        """The prompts and the grammar of a request, prepared in the tokenizer process of its model; cancelling the call
        ends that. With `in_context`, the prompts must fit the model's context. Raises a CortexError."""
        model_id = request.head.model
        path = await self._text_path(model_id)
        rules = self._prompt_rules(model_id)
        if in_context:
            limits = self._config.limits
            rules = replace(
                rules,
                context_tokens=self.model(model_id).context_tokens,
                max_prompt_tokens=limits.max_prompt_tokens,
            )
        return await self._texts.prepare(model_id, path, request, rules, principal)

    async def count_tokens(self, request: PackedRequest, *, principal: str) -> int:
        """The number of tokens in the prompt of a request, which need not fit the context. Raises as `prepare` does."""
        model_id = request.head.model
        path = await self._text_path(model_id)
        return await self._texts.count(model_id, path, request, self._prompt_rules(model_id), principal)

    async def encode(self, model_id: str, text: str, *, principal: str) -> tuple[int, ...]:
        """The tokens of a text, including control tokens in it. Raises as `prepare` does."""
        return await self._texts.encode(model_id, await self._text_path(model_id), text, principal)

    def _prompt_rules(self, model_id: str) -> PromptRules:
        controller = self._controllers.get(model_id)
        model = controller.model if controller is not None else self._library.find(model_id)
        return PromptRules(control_tokens_in_messages=model.control_tokens_in_messages)

    async def _text_path(self, model_id: str) -> Path:
        """The model's local files. Raises ModelNotFound, LoadFailed or ShuttingDown."""
        self._reject_when_closing()
        model = self._library.find(model_id)
        survey = self._loader.surveys.get(model_id)
        path = survey.facts.path if survey is not None else await self._loader.find_local(model)
        if path is None:
            raise LoadFailed(f"the files of {model_id} are not on this node yet; POST /models/load fetches them")
        return path

    def submit(self, model_id: str, request: EngineRequest) -> Generation:
        """Starts or queues a request for a model that is ready.

        Raises ModelNotFound, Overloaded, Recovering, ShuttingDown, LoadFailed or ContextLengthExceeded.
        """
        self._reject_when_closing()
        return self._controller(model_id).serving_instance().submit(request)

    async def host_share(self, connection: Connection) -> None:
        """Holds a part of a model that another node leads, for as long as its connection lasts."""
        await self.shares.serve(connection)

    async def recycle(self, device: int) -> bool:
        """Replaces an idle device's worker, which frees all of its memory. False while models are on it."""
        return await self.devices.supervisors[device].recycle()

    async def close(self) -> None:
        """Ends queued requests at once, gives running ones `drain_s`, then ends the workers."""
        if self._closing:
            return
        self._closing = True
        self._feed.publish(NodeEvent(kind="shutdown", at_s=time.time()))
        for regular in self._regular:
            regular.cancel()
        for task in self._background:
            task.cancel()
        controllers = tuple(self._controllers.values())
        instances = [controller.instance for controller in controllers if controller.instance is not None]
        for instance in instances:
            instance.close_admission(_shutting_down())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                await asyncio.gather(*(instance.drained() for instance in instances))
        for instance in instances:
            instance.host.stop_reloads()
            instance.end(_shutting_down())
        for controller in controllers:
            controller.close()
        await self.shares.close()
        await self.devices.close()
        await self._texts.close()
        await self.files.close()
        await asyncio.gather(*(controller.closed() for controller in controllers))
        await asyncio.gather(*self._background, *(task.ended() for task in self._regular), return_exceptions=True)
        self._feed.close()

    def _controller(self, model_id: str) -> ModelController:
        """Raises ModelNotFound."""
        if model_id not in self._controllers:
            self._controllers[model_id] = ModelController(
                self._library.find(model_id), self._loader, self._sleep_budget, self._model_changed, self._policy
            )
        return self._controllers[model_id]

    def _reject_when_closing(self) -> None:
        if self._closing:
            raise _shutting_down()

    def _model_changed(self, model_id: str) -> None:
        self._feed.publish(_model_event(self.model(model_id)))
        if not self._is_in_memory(model_id):
            self._run_in_background(self._rest_text(model_id), f"end the tokenizer process of {model_id}")

    async def _rest_text(self, model_id: str) -> None:
        if not self._is_in_memory(model_id):  # a caller may have loaded it again
            await self._texts.rest(model_id)

    def _is_in_memory(self, model_id: str) -> bool:
        """Whether the model is loaded or asleep, or about to be."""
        controller = self._controllers.get(model_id)
        return controller is not None and controller.life.state not in (ModelState.COLD, ModelState.FAILED)

    def _holdings(self) -> list[Holding]:
        """What models hold of the devices. A sleeping one may hold a part still."""
        found = [
            Holding(share.model_id, share.devices, equal_parts(share.num_bytes, len(share.devices)))
            for share in self.shares.statuses()
            if share.devices
        ]
        for controller in self._controllers.values():
            if (instance := controller.instance) is None:
                continue
            indices, resident = instance.host.device_indices, instance.resident
            held = resident.device_bytes(len(indices))
            if controller.life.state is ModelState.ASLEEP:
                held = equal_parts(resident.process_bytes, len(indices))
            found.append(Holding(controller.model_id, indices, held))
        return found

    def _models_in_memory(self) -> list[tuple[str, Path | None]]:
        surveys = self._loader.surveys
        return [
            (model_id, surveys[model_id].facts.path if model_id in surveys else None)
            for model_id in (*self._controllers, *(share.model_id for share in self.shares.statuses()))
            if self._is_in_memory(model_id) or self.shares.has(model_id)
        ]

    def _sleeping_models(self) -> list[SleepingModel]:
        return [
            SleepingModel(model_id, host_bytes, controller.instance.idle_s, controller.life.state is ModelState.ASLEEP)
            for model_id, controller in self._controllers.items()
            if controller.instance is not None and (host_bytes := controller.instance.host_bytes)
        ]

    def _sleep_budget_bytes(self, held_bytes: int) -> int:
        return sleep_budget_bytes(self._config.limits.sleep_mb, self.devices.all, read_host_memory(), held_bytes)

    def _activation_event(self) -> NodeEvent:
        return NodeEvent(kind="activation", at_s=time.time(), activation=self._startup_models.status())

    # Background

    def _run_in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._background = [task for task in self._background if not task.done()]
        self._background.append(run_once(work, name))

    async def _keep_sampling(self) -> None:
        """Keeps device readings and library up to date."""
        sample = 0
        while True:
            await self.devices.sample()
            if sample % _SCAN_EVERY_SAMPLES == 0:
                await self._scan_cache()
                await self._loader.survey_library()
            await self._texts.rest_idle(self._is_in_memory)
            await asyncio.sleep(_SAMPLE_S)
            sample += 1

    async def _scan_cache(self) -> None:
        self._library.discovered(await asyncio.to_thread(scan_cache, self._library.cache))
        await self.files.scan()


def _warn_of_unknown_devices(config: NeuronConfig, inventory: Inventory) -> None:
    indices = [device.index for device in inventory.devices]
    for entry in config.devices:
        if entry.index not in indices:
            have = ", ".join(map(str, indices)) or "none"
            log.warning(
                "[[devices]] limits device %d, but this node has %s: the entry has no effect", entry.index, have
            )


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the node is shutting down; try another node, or this one later", retry_after_s=10)


def _model_event(status: ModelStatus) -> NodeEvent:
    return NodeEvent(kind="model", at_s=time.time(), model=status)


def _discovery(inventory: Inventory, sleep_mb: int | None) -> Discovery:
    return Discovery(
        host=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}",
        version=cortex.__version__,
        devices=inventory.devices,
        kernel=platform.release(),
        driver=inventory.driver,
        cuda_version=inventory.cuda_version,
        driver_problem=inventory.driver_problem,
        max_devices_per_model=len(inventory.devices),
        can_sleep=can_sleep(sleep_mb, inventory.devices),
        harnesses=HARNESSES,
    )
