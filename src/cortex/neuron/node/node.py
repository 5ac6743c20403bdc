"""The node: its devices, its models, and the operations of the HTTP API. Lives on the daemon's loop.

Reads (`discovery`, `health`, `models`, `model`) return known state and never wait for a worker, a disk or a driver.
Each model has one controller; the node finds it and passes requests on. All errors for the API are CortexErrors.
Cancelling a call cancels its work, except for a load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.request import EngineRequest, EngineStats
from cortex.neuron.node.bench.benches import Benches
from cortex.neuron.node.bench.measurement import Measurement
from cortex.neuron.node.bench.results import BenchResults
from cortex.neuron.node.dependencies import NodeDependencies
from cortex.neuron.node.devices import NodeDevices, inventory_of, warn_of_unknown_devices
from cortex.neuron.node.event_feed import EventFeed, model_event
from cortex.neuron.node.generation import Generation
from cortex.neuron.node.harness.command.group import MemberPorts
from cortex.neuron.node.harness.command.harness import CommandHarness
from cortex.neuron.node.harness.engine import EngineHarness
from cortex.neuron.node.harness.forecast import Forecast
from cortex.neuron.node.harness.harness import Harnesses, Upstream
from cortex.neuron.node.inspection_process.client import InspectionProcess
from cortex.neuron.node.library import KnownModel, Library, files_sample, scan_cache, scan_folders
from cortex.neuron.node.loading.contents import Contents
from cortex.neuron.node.loading.context_allocator import ContextAllocator
from cortex.neuron.node.loading.device_allocator import DeviceAllocator
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.loading.model_files import ModelFiles
from cortex.neuron.node.loading.replicas import ReplicaDemand, ReplicaRules
from cortex.neuron.node.loading.startup_models import StartupModels
from cortex.neuron.node.memory.ceilings import Ceilings, MemoryCeilings
from cortex.neuron.node.memory.host_budget import HostBudget, HostLimits
from cortex.neuron.node.memory.kv_exchange import KvExchange
from cortex.neuron.node.models import Models
from cortex.neuron.node.power import attribute
from cortex.neuron.node.status import ServedModel, describe_node
from cortex.neuron.node.texts import Texts
from cortex.neuron.picture_process.client import Pictures
from cortex.neuron.servers.ready_made import usable as usable_servers
from cortex.neuron.tokenizer_process.client import TokenizerClient
from cortex.neuron.worker.discovery import Inventory
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.system.tasks import SupervisedTask, Supervisor, run_once
from cortex.wire.errors import (
    GroupClaimed,
    LoadFailed,
    ModelInUse,
    ModelNotFound,
    ModelUnsupported,
    ShuttingDown,
    SourceNotFound,
    shorten,
)
from cortex.wire.node.groups import PreparedMember, PrepareMember
from cortex.wire.node.load_options import is_path
from cortex.wire.node.neighbours import Neighbour
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import Health, ModelState, ModelStatus, NodeEvent

log = logging.getLogger(__name__)

_CHANGING = (ModelState.DOWNLOADING, ModelState.LOADING, ModelState.UNLOADING, ModelState.RECOVERING)
_SUSPEND_AFTER_S = 0.5
"""Delay of the suspend command after the order, so that the response is sent first."""
_SAMPLE_S = 1.0


_RELOADED = (
    *("keys", "key_file", "models", "default_models", "model_roots", "model_dirs", "harnesses", "drain_s"),
    *("log_level", "log_format"),
)
"""The keys of `neuron.toml` that a reload applies; of `default_models` only the options."""


class Node:
    """Made by `start`, ended by `close`; every method in between is called on the same loop."""

    def __init__(self, config: NeuronConfig, inventory: Inventory, parts: NodeDependencies) -> None:
        limits = config.limits
        timeouts = parts.timeouts or WorkerTimeouts(
            step_s=limits.step_timeout_s, load_s=limits.load_timeout_s, saves_kv=limits.kv_disk_mb > 0
        )
        bench_results = BenchResults(inventory.devices, limits.max_num_seqs, parts.bench_folder)
        forecast = Forecast(config, bench_results.rates)
        ceilings = Ceilings.of(config)
        self.devices = NodeDevices(
            inventory,
            parts.make_workers(),
            timeouts,
            parts.read_devices,
            forecast.reserve,
            ceilings,
            limits.kv_host_mb,
            boosts=not config.harness.torch.idle_clock,
        )
        self.kv = KvExchange(
            limits.kv_disk_folder, limits.kv_disk_mb << 20, self.devices.supervisors.values(), parts.exchange_rules
        )
        self._inspector = (parts.inspector or partial(InspectionProcess.of, limits))()
        self._library = Library(config)
        engine = self._engine = EngineHarness(config, self.devices, forecast, self._inspector, self._library, self.kv)
        self._ports = MemberPorts(config.cluster_address)
        self._read_devices = parts.read_devices
        self._server_times = parts.server_times
        self._servers: dict[str, CommandHarness] = {}
        self._harnesses = Harnesses(engine, *parts.harnesses)
        self._use_servers(config)
        self._num_reloads = 0
        self.discovery = describe_node(inventory, limits.sleep_mb, *self._harness_names(config))
        self._config = config
        self._started_s = time.monotonic()
        open_text = parts.open_text or partial(
            TokenizerClient, memory_bytes=config.text.memory_mb << 20, read_s=config.text.timeout_s
        )
        self.pictures = Pictures(config.pictures)
        self.texts = Texts(
            open_text,
            config.text,
            limits.max_queue,
            self._local_path,
            lambda model_id: self._models.prompt_rules(model_id),
            lambda model_id: self._models.options(model_id).chat_template,
        )
        held = self._ceilings = MemoryCeilings(ceilings, lambda: self._models.holdings())
        room = DeviceAllocator(
            self.devices,
            forecast,
            lambda model: self._harnesses.of(model).estimates,
            held,
            parts.read_devices,
            lambda sleep_frees: self._models.leaving(sleep_frees),
        )
        self.host = HostBudget(
            HostLimits(inventory.devices, limits.host_mb, limits.sleep_mb),
            lambda: self._models.in_host_memory(),
            lambda model_id: self._models.controller(model_id).unload_if_asleep(),
            self.devices.kv_host,
            parts.read_host,
        )
        digests = parts.digests()
        self._loader = ModelLoader(
            config,
            self._library,
            self.devices,
            self._harnesses,
            room,
            fetch=parts.fetch,
            inspector=self._inspector,
            texts=self.texts,
            make_room=lambda model, metadata: self._context_room.make_room(model, metadata),
            host=self.host,
            digests=digests,
        )
        self.files = ModelFiles(self._library, self._loader, self._models_in_memory, digests)
        self._models = Models(
            self._library,
            self._loader,
            self.files,
            self.texts,
            self._model_changed,
            parts.policy,
            self.host,
            limits.max_prompt_tokens,
            bench_results,
            self.devices.kv_host,
        )
        self._contents = Contents(digests, self._loader, self._models, self._model_changed)
        default_ids = [default.id for default in config.default_models]
        self._context_room = ContextAllocator(room, self._loader, self._models, parts.context_rules, kept=default_ids)
        self.benches = Benches(
            self._models,
            lambda controller, on_stage: Measurement(
                controller,
                self.devices,
                config,
                parts.workload,
                can_sleep=self.discovery.can_sleep,
                on_stage=on_stage,
            ),
            lambda model: self._harnesses.of(model).upstream(model) is not None,
            self._model_changed,
        )
        self._replica_demand = ReplicaDemand(
            ReplicaRules.of(limits), self._models.growing, self._loader.add_replica, self._model_changed
        )
        self._feed = EventFeed()
        self._startup_models = StartupModels(
            default_ids,
            lambda model_id: self.load(LoadRequest(model_id=model_id), wait=True),
            lambda: self._feed.publish(self._activation_event()),
            parts.first_retry_s,
        )
        self._tasks = Supervisor()
        self._scan_s = parts.scan_s
        self._regular: list[SupervisedTask] = []
        self._background: list[asyncio.Task[None]] = []
        """Tasks that run once."""
        self._closing = False

    def _use_servers(self, config: NeuronConfig) -> None:
        for name, entry in usable_servers(config.commands).items():
            if (server := self._servers.get(name)) is not None:
                server.use(entry, config)
            else:
                self._servers[name] = CommandHarness(
                    entry, config, self._read_devices, ports=self._ports, times=self._server_times
                )
                self._harnesses.add(self._servers[name])

    def _harness_names(self, config: NeuronConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The harnesses that can run a model, and those among them that can run a group member."""
        engine, entries = self._engine, usable_servers(config.commands).values()
        usable = [name for name in self._harnesses.names if engine.is_usable or name not in engine.names]
        groups = [entry.name for entry in entries if entry.group is not None and config.cluster_address is not None]
        return tuple(usable), tuple(groups)

    async def reconfigure(self, config: NeuronConfig) -> tuple[str, ...]:
        """Apply the settings that can change while the node runs: models, their folders, servers and `drain_s`. Loaded
        models stay as they are. Returns the changed keys that need a restart."""
        before = self._config
        lost = {entry.name for entry in before.harnesses} - {entry.name for entry in config.harnesses}
        others = [name for name in config.__struct_fields__ if name not in _RELOADED]
        changed = [name for name in others if getattr(before, name) != getattr(config, name)]
        self._use_servers(config)
        usable, groups = self._harness_names(config)
        self.discovery = replace(self.discovery, harnesses=usable, group_harnesses=groups)
        self._num_reloads += 1
        self._models.forget(self._library.use(config))
        applied = {name: getattr(config, name) for name in _RELOADED}
        self._config = replace(before, **applied)
        await self.scan_library()
        return (*changed, *(f"harnesses.{name}" for name in sorted(lost)))

    @classmethod
    async def start(cls, config: NeuronConfig, parts: NodeDependencies | None = None) -> Node:
        """Returns a node that serves at once; default models load in the background."""
        parts = parts or NodeDependencies()
        inventory = await asyncio.to_thread(inventory_of, config, parts.discover)
        node = cls(config, inventory, parts)
        warn_of_unknown_devices(config.devices, inventory)
        if node._engine.is_usable:
            node._run_in_background(node.devices.warm(), "import the engine")
        await node.scan_library()
        node._regular = [
            node._tasks.start("sample devices", node._keep_sampling),
            node._tasks.start("inspect models", node._keep_inspecting),
            node._tasks.start("read contents", node._keep_reading_contents),
            node._tasks.start("load default models", node._startup_models.run),
            node._tasks.start("replicas", node._replica_demand.run),
            node._tasks.start("contexts", node._context_room.run),
        ]
        return node

    # Reads

    def health(self) -> Health:
        failing = self._tasks.failing
        return Health(
            num_reloads=self._num_reloads,
            status="draining" if self._closing else "degraded" if failing else "ok",
            uptime_s=round(time.monotonic() - self._started_s, 3),
            devices=self.devices.health(),
            models=self.models(),
            ceiling_bytes=self._ceilings.configured.node_bytes,
            activation=self._startup_models.status(),
            failing_tasks=failing,
            pulls=self.files.pulls,
            disk=self.files.disk,
            host=self.host.health(),
            watts=None if self.devices.total_watts is None else round(self.devices.total_watts, 1),
        )

    def models(self) -> tuple[ModelStatus, ...]:
        return self._models.statuses()

    def model(self, model_id: str) -> ModelStatus:
        """Raises ModelNotFound."""
        return self._models.status(model_id)

    def served(self, model_id: str) -> ServedModel:
        """Raises ModelNotFound."""
        return self._models.served(model_id)

    def engine_stats(self) -> dict[str, EngineStats]:
        """The engines' counters by model id, as of their latest reports; models in memory only."""
        return self._models.engine_stats()

    def task_restarts(self) -> Mapping[str, int]:
        """How often each background task failed and was started again."""
        return self._tasks.restarts

    def subscribe(self) -> AsyncIterator[NodeEvent]:
        """The state of every model that is not cold, then every change from now on."""
        warm = [status for status in self.models() if status.state is not ModelState.COLD]
        return self._feed.subscribe((self._activation_event(), *map(model_event, warm)))

    # Models

    async def load(self, request: LoadRequest, *, wait: bool) -> ModelStatus:
        """Idempotent: joins a load in progress. With `wait`, returns when the model is ready or raises why not."""
        model = self._adopt(request)
        if request.wake_only and not self._models.is_in_memory(model.id):
            raise LoadFailed(f"nothing of {model.id} is left on this node; load it again")
        if request.member is not None:
            await self._end_other_group(model)
        elif not (request.devices or request.harness or request.wake_only):  # no order of a gateway
            self._check_not_in_group(model.id)
        if request.quant is not None:
            self._models.free_another_quant(model.id, request.quant)
        if request.member is not None:
            self._ports.await_load(request.member.group, model.id)
        if wait:
            await self._models.controller(model.id).ensure_ready(model)
        else:
            self._models.controller(model.id).want_ready(model)
        return self.model(request.model_id)

    def _check_not_in_group(self, model_id: str) -> None:
        """Raises ModelNotFound for a model that a group ran and that is not ready: it must not be loaded here alone,
        and its gateway restarts the group."""
        is_absent = self.model(model_id).state in (ModelState.COLD, ModelState.FAILED, ModelState.ASLEEP)
        if is_absent and self._models.options(model_id).member is not None:
            raise ModelNotFound(f"{shorten(model_id)} runs on several nodes, and its group has ended; try again")

    async def _end_other_group(self, model: KnownModel) -> None:
        """Ends remains of an earlier start of the group, so that no load joins them."""
        controller = self._models.controller(model.id)
        if self._models.is_in_memory(model.id) and controller.model.member != model.member:
            await controller.ensure_gone(0.0)

    async def prepare_member(self, request: PrepareMember) -> PreparedMember:
        """Chooses the ports of a member of a group, and holds them for its load. Raises LoadFailed, GroupClaimed, and
        what `load` raises of a request."""
        self._check_open()
        if (server := self._servers.get(request.harness)) is None:
            raise LoadFailed(f"this node has no server `{shorten(request.harness)}` that runs a model on several nodes")
        model = self._adopt(LoadRequest(model_id=request.model_id, **request.shared_with(LoadRequest)))
        member = self._models.options(model.id).member
        if member is not None and member.group != request.group and self._models.is_starting_or_ready(model.id):
            raise GroupClaimed(f"{shorten(model.id)} already runs on {', '.join(member.nodes)}")
        prepared = await server.prepare(request)
        if not server.member_needs_files(request.rank):
            return prepared
        path = await self._loader.find_local(model)
        if path is None and is_path(model.source):
            raise SourceNotFound(f"{shorten(model.id)}: there is no complete model at {model.source}")
        if path is None:
            return replace(prepared, lacks_files=True)
        sample, content = await asyncio.to_thread(files_sample, path), await self._loader.content(path)
        return replace(prepared, files_sample=sample, content_digest=content)

    async def inspect(self, request: LoadRequest) -> ModelStatus:
        """Lists a model and reads its files, to learn its size or why it cannot be loaded. The options apply to later
        loads, and replace those of earlier ones. Leaves configured models unchanged, and those that this node found at
        another source; reads no files of one in memory. Raises what `load` raises of a request."""
        model = self._adopt(request)
        if self._library.takes_options(model):
            before = self._models.options(model.id)
            kept = self._library.keep_options(request)
            if not self._models.is_in_memory(model.id):
                if kept != before:
                    self._models.set_options(kept)
                    self._loader.forget(model.id)
                await self._loader.inspect_listed(kept)
        return self.model(model.id)

    def _adopt(self, request: LoadRequest) -> KnownModel:
        """The model with the options of the request. Raises ModelNotFound, ModelUnsupported, ModelInUse or
        LoadFailed."""
        self._check_open()
        if request.harness is not None:
            self._harnesses.named(request.harness)
        model = self._library.adopt(request)
        self.files.reject_if_deleting(model)
        return model

    async def unload(self, request: UnloadRequest) -> ModelStatus:
        """Returns when the model's memory is free; with `sleep`, when its device memory is. Running requests get
        `drain_s` to finish, or nothing with `force`. A model without files whose load failed is forgotten."""
        if request.forget and not self._library.is_adopted(request.model_id):
            self._library.find(request.model_id)  # else the inspection would adopt it
            return await self.inspect(LoadRequest(model_id=request.model_id))
        if request.group is not None:
            self._ports.release(request.group)
        drain_s = request.drain_s if request.drain_s is not None else self._config.drain_s
        controller = self._models.controller(request.model_id)
        member = controller.model.member
        if request.group is not None and (member is None or member.group != request.group):
            return self.model(request.model_id)
        if self._models.has_more_context(request.model_id, request.seen_context_tokens):
            return self.model(request.model_id)
        await self.benches.give_way(request.model_id)
        has_failed = controller.life.state is ModelState.FAILED
        ensure_unloaded = controller.ensure_asleep if request.sleep else controller.ensure_gone
        await ensure_unloaded(0.0 if request.force else drain_s)
        await self._rest_text(request.model_id)
        status = self.model(request.model_id)
        if has_failed and status.state is ModelState.COLD:
            self.files.forget_if_absent(controller.model)
        if request.forget and status.state is ModelState.COLD:
            self._library.forget(request.model_id)
            self._loader.forget(request.model_id)
        return status

    def forget_size(self, model_id: str) -> ModelStatus:
        """Discards measured sizes, so that the model is estimated again. Raises ModelNotFound or ModelUnsupported."""
        self._harnesses.of(self._models.options(model_id)).forget_size(model_id)
        return self.model(model_id)

    def generate(self, model_id: str, request: EngineRequest) -> Generation:
        """Starts or queues a request for a model that is ready.

        Raises ModelNotFound, Overloaded, Recovering, ShuttingDown, LoadFailed or ContextLengthExceeded.
        """
        self._check_open()
        return self._models.controller(model_id).serving_instance().generate(request)

    async def fetch_kv(self, model_id: str, request: EngineRequest, source: Neighbour) -> None:
        """Fetches KV of the prompt from a node that has computed it, if that is expected to be faster. Raises
        ModelNotFound."""
        instance = self._models.controller(model_id).instance
        if instance is not None and instance.host.resident is not None:  # else its worker was lost just now
            info = instance.resident.info
            try:
                await self.kv.fetch(model_id, info, instance.stats, request, source)
            finally:
                if info.token_bytes and (rate := self.kv.bytes_per_s(source)) is not None:
                    instance.fetched_tokens_per_s = rate / info.token_bytes

    def computes_fronts(self, model_id: str) -> bool:
        """Whether a request of the model may be computed while its KV is fetched. Raises ModelNotFound."""
        instance = self._models.controller(model_id).instance
        resident = None if instance is None else instance.host.resident
        return resident is not None and resident.info.computes_fronts

    def upstream(self, model_id: str) -> Upstream | None:
        """The server that takes the model's requests as text; None if `generate` takes them. `generate` with an empty
        prompt then reserves a slot in it, which the first output grants. Raises ModelNotFound or LoadFailed."""
        model = self._models.options(model_id)
        return self._harnesses.of(model).upstream(model)

    async def recycle(self, device: int) -> bool:
        """Replaces an idle device's worker, which frees all of its memory, after unloading extra replicas. False while
        other models are on it."""
        await self.devices.extras.give_back((device,), self._config.drain_s)
        return await self.devices.supervisors[device].recycle()

    def suspend(self) -> tuple[str, ...]:
        """Runs `suspend_command` in a moment, and returns it. Raises ModelInUse while the node has work, and
        ModelUnsupported without a command."""
        self._check_open()
        if not (command := self._config.suspend_command):
            raise ModelUnsupported("this node is never suspended: its `suspend_command` is empty")
        if work := self._work():
            raise ModelInUse(f"this node is not suspended: {work}")
        run_once(self._suspend(command), "suspend this host")
        return command

    async def _suspend(self, command: tuple[str, ...]) -> None:
        await asyncio.sleep(_SUSPEND_AFTER_S)
        if work := self._work():  # which came with the last requests
            log.info("this host is not suspended: %s", work)
            return
        log.info("this host is suspended: %s", " ".join(command))
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
        except OSError as problem:
            log.error("this host cannot be suspended: %s", problem)
            return
        if status := await process.wait():
            log.error("this host was not suspended: `%s` failed with status %d", command[0], status)

    def _work(self) -> str | None:
        """Work that a suspension would interrupt; None if there is none."""
        for status in self.models():
            if status.load.running or status.load.waiting:
                return f"{status.id} has requests"
            if status.state in _CHANGING:
                return f"{status.id} is {status.state.value}"
            if status.rank or status.nodes:
                return f"{status.id} runs on several nodes"
        if any(pull.state == "running" for pull in self.health().pulls):
            return "it downloads a model"
        if self.files.num_shared:
            return "another node downloads a model from it"
        return "a model is being measured" if self.benches.is_running else None

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
        await self.benches.close()
        drain_s = self._config.drain_s
        leaving = (server.leave(drain_s) for server in self._servers.values())
        await asyncio.gather(self._models.close(_shutting_down(), drain_s), *leaving)
        self.kv.close()
        self._ports.close()
        await self._harnesses.close()
        await self.texts.close()
        await self.pictures.close()
        self._contents.close()
        await self.files.close()
        await self._inspector.close()
        await self._models.closed()
        await asyncio.gather(*self._background, *(task.ended() for task in self._regular), return_exceptions=True)
        self._feed.close()

    def _check_open(self) -> None:
        if self._closing:
            raise _shutting_down()

    async def _local_path(self, model_id: str) -> Path:
        self._check_open()
        return await self._loader.local_path(self._models.options(model_id))

    def _model_changed(self, model_id: str) -> None:
        status = self.model(model_id)
        self._feed.publish(model_event(status))
        if status.state in (ModelState.COLD, ModelState.FAILED):
            self._ports.load_ended(model_id)
        if not self._models.is_in_memory(model_id):
            self._run_in_background(self._rest_text(model_id), f"end the tokenizer process of {model_id}")

    async def _rest_text(self, model_id: str) -> None:
        if not self._models.is_in_memory(model_id):  # a caller may have loaded it again
            await self.texts.rest(model_id)

    def _models_in_memory(self) -> list[tuple[str, Path | None]]:
        return [(model_id, self._loader.known_path(model_id)) for model_id in self._models.in_memory()]

    def _activation_event(self) -> NodeEvent:
        return NodeEvent(kind="activation", at_s=time.time(), activation=self._startup_models.status())

    # Background

    def _run_in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._background = [task for task in self._background if not task.done()]
        self._background.append(run_once(work, name))

    async def _keep_sampling(self) -> None:
        """Keeps device readings up to date."""
        while True:
            await self.devices.sample()
            attribute(self.devices.watts, self._models.instances())
            self._ceilings.watch()
            await self.host.watch()
            await self.texts.rest_idle(self._models.is_in_memory)
            await asyncio.gather(self.pictures.rest_idle(), self._inspector.rest_idle())
            await asyncio.sleep(_SAMPLE_S)

    async def _keep_inspecting(self) -> None:
        """Keeps the library up to date. A damaged model may take minutes."""
        while True:
            await self._loader.inspect_library(self._models.is_in_memory)
            await asyncio.sleep(self._scan_s)
            await self.scan_library()
            await self._models.notice_changed_files()

    async def _keep_reading_contents(self) -> None:
        while True:
            await asyncio.sleep(self._scan_s)
            await self._contents.read()

    async def scan_library(self) -> None:
        """Updates the list of models after files were added or removed."""
        if self._engine.is_usable:  # nothing else runs models that no entry names
            self._library.discovered(await asyncio.to_thread(scan_cache, self._library.cache))
        found = await asyncio.to_thread(scan_folders, self._library.folders)
        self._models.forget(self._library.found_in_folders(found))
        await self.files.scan()


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the node is shutting down; try another node, or this one later", retry_after_s=10)
