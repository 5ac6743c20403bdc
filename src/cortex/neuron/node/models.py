"""The models of a node: a controller for each model that was used, their status, and the memory that they hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from cortex.formats.quant_names import is_same_quant
from cortex.neuron.engine.request import EngineStats
from cortex.neuron.node.bench.results import BenchResults
from cortex.neuron.node.controller import ModelController
from cortex.neuron.node.instance import Instance
from cortex.neuron.node.library import KnownModel, Library, file_stamps
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.loading.model_files import ModelFiles
from cortex.neuron.node.memory.ceilings import ModelHolding, equal_parts
from cortex.neuron.node.memory.host_budget import HostBudget, HostModel, KvHostMemory
from cortex.neuron.node.status import ServedModel, describe_model, served_model
from cortex.neuron.node.texts import Texts
from cortex.neuron.text.template.prompt import PromptRules
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.wire.errors import CortexError, ModelInUse, shorten
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.protocol import ModelState, ModelStatus

log = logging.getLogger(__name__)


class IdleModel(NamedTuple):
    """A model in memory, ready or asleep, without requests."""

    controller: ModelController
    instance: Instance
    idle_s: float
    """Seconds since its last request, or since it became ready or fell asleep."""
    holding: ModelHolding


class _UnusedModel(NamedTuple):
    """The status of a model that was never loaded, and its inputs."""

    sources: tuple[object, ...]
    estimate_basis: object
    status: ModelStatus


class Models:
    """Belongs to the daemon's loop."""

    def __init__(
        self,
        library: Library,
        loader: ModelLoader,
        files: ModelFiles,
        texts: Texts,
        on_changed: Callable[[str], None],
        policy: BackoffPolicy,
        host_budget: HostBudget,
        max_prompt_tokens: int | None,
        bench_results: BenchResults,
        kv_host: KvHostMemory,
    ) -> None:
        """`on_changed`: called with the id of a model whose status has changed."""
        self._library = library
        self._loader = loader
        self._files = files
        self._texts = texts
        self._on_changed = on_changed
        self._policy = policy
        self._controllers: dict[str, ModelController] = {}
        self._unused: dict[str, _UnusedModel] = {}
        self._host_budget = host_budget
        self._max_prompt_tokens = max_prompt_tokens
        self._bench_results = bench_results
        self._kv_host = kv_host

    def controller(self, model_id: str) -> ModelController:
        """Raises ModelNotFound."""
        if model_id not in self._controllers:
            self._controllers[model_id] = ModelController(
                self._library.find(model_id), self._loader, self._host_budget, self._on_changed, self._policy
            )
        return self._controllers[model_id]

    def options(self, model_id: str) -> KnownModel:
        """The model with the options of its latest or next load. Raises ModelNotFound."""
        known = self._library.find(model_id)
        controller = self._controllers.get(model_id)
        return controller.model if controller is not None else known

    def free_another_quant(self, model_id: str, quant: str) -> None:
        """Starts to unload the model if it sleeps in a quantisation other than `quant`. Raises ModelInUse if it serves,
        or soon will, in another one: joining would give the caller other weights than requested."""
        held, requested = self.status(model_id), self.options(model_id).quant
        # Until a load has read its files, the status describes those that were read before it.
        stored = held.quant if held.requested_quant == requested else None
        if held.state in (ModelState.COLD, ModelState.FAILED) or is_same_quant(quant, requested, stored):
            return
        if self.controller(model_id).unload_sleeping():
            return
        is_leaving = self.controller(model_id).life.state is ModelState.UNLOADING
        state = "about to be loaded" if is_leaving else held.state.value
        loaded = requested or stored or "dense weights"
        raise ModelInUse(
            f"{shorten(model_id)} is {state} as {loaded}, not as {shorten(quant)}; unload it first, or leave out the "
            "quantisation"
        )

    def set_options(self, model: KnownModel) -> None:
        """Sets the options of the model's next load, unless it is in memory."""
        if (controller := self._controllers.get(model.id)) is not None:
            controller.set_options(model)

    def statuses(self) -> tuple[ModelStatus, ...]:
        found = tuple(self.status(model.id) for model in self._library)
        if len(self._unused) > len(found):  # some are not listed any more
            listed = {status.id for status in found}
            self._unused = {model: unused for model, unused in self._unused.items() if model in listed}
        return found

    def status(self, model_id: str) -> ModelStatus:
        """Raises ModelNotFound. Returns the same object for a never-used model until something changes, because a node
        may list hundreds and every poll reads them all."""
        model = self.options(model_id)
        inspection, damage = self._loader.inspections.get(model_id), self._loader.damaged.get(model_id)
        controller = self._controllers.get(model_id)
        devices = None
        if controller is not None and controller.instance is not None:
            devices = controller.instance.host.device_indices
        bench = self._bench_results.find(model, inspection.metadata.digest if inspection is not None else None, devices)
        sources = (model, inspection, damage, self._files.sizes, bench)
        estimate_basis = None if inspection is None else self._loader.estimate_basis(model)
        if controller is None and (known := self._unused.get(model_id)) is not None:
            is_same = known.estimate_basis == estimate_basis and all(map(operator.is_, known.sources, sources))
            if is_same:
                return known.status
        status = describe_model(
            model,
            controller,
            inspection,
            self._loader.estimate(self._next(model, controller), inspection.metadata) if inspection else None,
            self._texts.num_jobs(model_id),
            self._files.disk_bytes(model),
            self._max_prompt_tokens,
            damage,
            bench,
            self._kv_host.kept(model_id, model.num_devices // model.replicas),
            self._loader.last_lines(model) if model.member is not None else (),
            self._library.find(model_id).devices,
        )
        if controller is None:
            self._unused[model_id] = _UnusedModel(sources, estimate_basis, status)
        else:
            self._unused.pop(model_id, None)
        return status

    def _next(self, model: KnownModel, controller: ModelController | None) -> KnownModel:
        """The model whose size is reported: of a load in progress, else of the next one. Neither the context nor the
        limit of an earlier load request is that of the next one."""
        if controller is None or self._is_loading(controller):
            return model
        own, is_gone = self._library.find(model.id), controller.life.state in (ModelState.COLD, ModelState.FAILED)
        context_tokens = own.context_tokens if is_gone else model.context_tokens
        return replace(model, context_tokens=context_tokens, memory_bytes=own.memory_bytes)

    @staticmethod
    def _is_loading(controller: ModelController) -> bool:
        return controller.life.state in (ModelState.DOWNLOADING, ModelState.LOADING, ModelState.RECOVERING)

    def served(self, model_id: str) -> ServedModel:
        """Raises ModelNotFound."""
        return served_model(
            self.options(model_id), self._controllers.get(model_id), self._loader.inspections.get(model_id)
        )

    def prompt_rules(self, model_id: str) -> PromptRules:
        """The bounds of the model's prompts. Raises ModelNotFound."""
        return PromptRules(
            context_tokens=self.served(model_id).context_tokens,
            max_prompt_tokens=self._max_prompt_tokens,
            control_tokens_in_messages=self.options(model_id).control_tokens_in_messages,
        )

    def engine_stats(self) -> dict[str, EngineStats]:
        """The engines' counters by model id, as of their latest reports; models in memory only."""
        return {
            model_id: controller.instance.stats
            for model_id, controller in self._controllers.items()
            if controller.instance is not None
        }

    def busy_on(self, devices: Iterable[int]) -> dict[str, int]:
        """The models with requests on any of `devices`, and the number of their requests."""
        return {
            model_id: count
            for model_id, controller in self._controllers.items()
            if (instance := controller.instance) is not None
            and not set(devices).isdisjoint(instance.host.device_indices)
            and (count := instance.num_requests + self._texts.num_jobs(model_id))
        }

    def keep_bench(self, model_id: str, devices: Iterable[int], result: BenchResult) -> None:
        """Adds this result to the model's status, unless the model is on other hardware than `devices`, where it was
        measured. Raises ModelNotFound."""
        inspection = self._loader.inspections.get(model_id)
        digest = inspection.metadata.digest if inspection is not None else None
        self._bench_results.keep(self.options(model_id), digest, devices, result)

    def instances(self) -> list[Instance]:
        """The models that are loaded and awake."""
        held = [controller.instance for controller in self._controllers.values()]
        return [each for each in held if each is not None and each.host.resident is not None]

    def in_memory(self) -> list[str]:
        return [model_id for model_id in self._controllers if self.is_in_memory(model_id)]

    def is_in_memory(self, model_id: str) -> bool:
        """Whether the model is loaded or asleep, or about to be."""
        controller = self._controllers.get(model_id)
        return controller is not None and controller.life.state not in (ModelState.COLD, ModelState.FAILED)

    def is_starting_or_ready(self, model_id: str) -> bool:
        """Whether it serves, or will without a further order."""
        controller = self._controllers.get(model_id)
        starting = (ModelState.DOWNLOADING, ModelState.LOADING, ModelState.RECOVERING)
        return controller is not None and controller.life.state in (ModelState.READY, *starting)

    def was_loaded(self, model_id: str) -> bool:
        controller = self._controllers.get(model_id)
        return controller is not None and controller.load_s is not None

    def is_loading_any(self) -> bool:
        """Safe on other threads."""
        return any(map(self._is_loading, list(self._controllers.values())))

    def has_more_context(self, model_id: str, seen_tokens: int | None) -> bool:
        """Whether the model has a longer context than it had, or is being loaded. Raises ModelNotFound."""
        if seen_tokens is None or not self.is_starting_or_ready(model_id):
            return False
        status = self.status(model_id)
        return status.state is not ModelState.READY or (status.context_tokens or 0) > seen_tokens

    def forget(self, model_ids: Iterable[str]) -> None:
        """Stop listing models whose files are gone, unless they are in memory."""
        for model_id in model_ids:
            if not self.is_in_memory(model_id):
                self._controllers.pop(model_id, None)
                self._library.forget(model_id)
                self._loader.forget(model_id)

    async def notice_changed_files(self) -> None:
        """Reports each model in memory whose files have changed since the load, once. They stay loaded, because a load
        in the middle of a copy would fail."""
        for model_id, controller in list(self._controllers.items()):
            if (instance := controller.instance) is None or instance.files_changed:
                continue
            path, stamps = instance.files
            if stamps and await asyncio.to_thread(file_stamps, path) != stamps:
                instance.files_changed = True
                log.warning("%s: %s has changed since it was loaded; unload and load it to use it", model_id, path)
                self._on_changed(model_id)

    def holdings(self) -> list[ModelHolding]:
        """Device memory that the models hold. A sleeping model may still hold some."""
        return [_holding(each, each.instance) for each in self._controllers.values() if each.instance is not None]

    def idle(self) -> list[IdleModel]:
        """The models in memory without requests, least recently used first."""
        found = []
        for controller in self._controllers.values():
            instance, life = controller.instance, controller.life
            if instance is None or life.state not in (ModelState.READY, ModelState.ASLEEP):
                continue
            if not instance.num_requests and not self._texts.num_jobs(controller.model_id):
                idle_s = min(instance.idle_s, time.monotonic() - life.since_s)
                found.append(IdleModel(controller, instance, idle_s, _holding(controller, instance)))
        return sorted(found, key=lambda each: -each.idle_s)

    def is_any_changing(self) -> bool:
        """Whether a load or an unload is changing the free memory."""
        changing = (ModelState.LOADING, ModelState.UNLOADING, ModelState.RECOVERING)
        return any(controller.life.state in changing for controller in self._controllers.values())

    def leaving(self, sleep_frees: bool) -> list[ModelHolding]:
        """The models that are being unloaded, and what they still hold. `sleep_frees`: models that fall asleep also
        free their devices."""
        return [
            holding
            for controller in self._controllers.values()
            if (holding := controller.leaving) is not None
            and controller.life.wanted == "gone"  # else it is loaded again at once
            and (sleep_frees or not controller.falls_asleep)
        ]

    def growing(self) -> list[tuple[KnownModel, Instance]]:
        """The ready models that may have extra replicas."""
        return [
            (controller.model, controller.instance)
            for controller in self._controllers.values()
            if controller.life.state is ModelState.READY
            and controller.instance is not None
            and controller.model.may_grow
        ]

    def in_host_memory(self) -> list[HostModel]:
        """The models with weights in host memory."""
        return [
            HostModel(
                model_id,
                host_bytes,
                instance.idle_s,
                instance.sleeps,
                instance.sleeps and controller.life.state is ModelState.ASLEEP,
                instance.resident.info.host_locked_bytes,
            )
            for model_id, controller in self._controllers.items()
            if (instance := controller.instance) is not None and (host_bytes := instance.host_bytes)
        ]

    async def close(self, reason: CortexError, drain_s: float) -> None:
        """Ends queued requests at once and running ones after `drain_s`. End the workers next."""
        instances = [each.instance for each in self._controllers.values() if each.instance is not None]
        for instance in instances:
            instance.close_admission(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await asyncio.gather(*(instance.drained() for instance in instances))
        for instance in instances:
            instance.host.stop_reloads()
            instance.end(reason)
        for controller in self._controllers.values():
            controller.close()

    async def closed(self) -> None:
        """Returns when nothing is in progress."""
        await asyncio.gather(*(controller.closed() for controller in self._controllers.values()))


def _holding(controller: ModelController, instance: Instance) -> ModelHolding:
    indices, resident = instance.host.device_indices, instance.resident
    held = resident.device_bytes(len(indices))
    if controller.life.state is ModelState.ASLEEP:
        held = equal_parts(resident.process_bytes, len(indices))
    return ModelHolding(controller.model_id, indices, held, resident.process_bytes)
