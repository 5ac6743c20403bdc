"""The measurements of a node: one at a time, each followed to its end or cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cortex.neuron.node.bench.measurement import Measurement
from cortex.neuron.node.controller import ModelController
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.models import Models
from cortex.wire.errors import (
    CortexError,
    LoadFailed,
    ModelInUse,
    ModelNotFound,
    ModelUnsupported,
    UnloadedWhileLoading,
    shorten,
)
from cortex.wire.node.bench import BenchRequest, BenchResult, BenchState, BenchStatus
from cortex.wire.words import plural

log = logging.getLogger(__name__)

NewMeasurement = Callable[[ModelController, Callable[[str], None]], Measurement]


@dataclass(slots=True, eq=False)
class _Bench:
    controller: ModelController
    task: asyncio.Task[None] | None = None
    state: BenchState = "running"
    stage: str = "starting"
    result: BenchResult | None = None
    error: CortexError | None = None

    @property
    def model_id(self) -> str:
        return self.controller.model_id

    def ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.state = "cancelled"

    def status(self) -> BenchStatus:
        return BenchStatus(
            model_id=self.model_id,
            state=self.state,
            stage=self.stage if self.state == "running" else "",
            result=self.result,
            reason=None if self.error is None else self.error.message,
            code=None if self.error is None else self.error.code,
        )


class Benches:
    """Belongs to the daemon's loop."""

    def __init__(
        self,
        models: Models,
        measure: NewMeasurement,
        is_served_elsewhere: Callable[[KnownModel], bool],
        on_changed: Callable[[str], None],
    ) -> None:
        """`is_served_elsewhere`: whether another server than the built-in engine runs a model. `on_changed`: called
        with the id of a model that has a new result."""
        self._models = models
        self._measure = measure
        self._is_served_elsewhere = is_served_elsewhere
        self._on_changed = on_changed
        self._benches: dict[str, _Bench] = {}
        """The latest of each model."""

    @property
    def is_running(self) -> bool:
        return any(bench.state == "running" for bench in self._benches.values())

    def start(self, request: BenchRequest) -> BenchStatus:
        """Raises CortexError: the model is not ready, is in use, or is none that can be measured."""
        running = next((bench for bench in self._benches.values() if bench.state == "running"), None)
        if running is not None and running.model_id == request.model_id:
            return running.status()
        if running is not None:
            raise ModelInUse(f"{running.model_id} is being measured; wait for that, or cancel it")
        controller = self._models.controller(request.model_id)
        if self._is_served_elsewhere(controller.model):
            raise ModelUnsupported(f"{request.model_id} is run by a server of its own, which is not measured")
        instance = controller.serving_instance()
        if instance.resident.info.vector_width:
            raise ModelUnsupported(f"{request.model_id} generates no text; only models that do are measured")
        if not request.force and (busy := self._models.busy_on(instance.host.device_indices)):
            named = ", ".join(f"{model_id} has {plural(count, 'request')}" for model_id, count in busy.items())
            raise ModelInUse(f"{named}: wait until they have ended, or send `force: true` to measure all the same")
        bench = self._benches[request.model_id] = _Bench(controller)
        bench.task = asyncio.create_task(self._run(bench, request), name=f"measure {request.model_id}")
        bench.task.add_done_callback(bench.ended)  # also of a task that was cancelled before it began
        return bench.status()

    def status(self, model_id: str) -> BenchStatus:
        """Raises ModelNotFound when there was no measurement of it since the start."""
        if model_id not in self._benches:
            raise ModelNotFound(f"this node has not measured {shorten(model_id)}", param="model_id")
        return self._benches[model_id].status()

    async def cancel(self, model_id: str) -> BenchStatus:
        """Returns when the measurement has ended; the model gets ready again. Raises ModelNotFound if there is none."""
        self.status(model_id)
        bench = self._benches[model_id]
        if bench.state == "running":
            # Before the first `await`: an unload that comes meanwhile is the later wish.
            bench.controller.want_ready(bench.controller.model)
            await self._stop(bench)
        return bench.status()

    async def give_way(self, model_id: str) -> None:
        """Ends the measurement, if any, of a model that is to be unloaded, because it would load the model again."""
        bench = self._benches.get(model_id)
        if bench is not None and bench.state == "running":
            bench.error = UnloadedWhileLoading(f"{model_id} was unloaded while it was measured")
            await self._stop(bench)

    async def close(self) -> None:
        for bench in self._benches.values():
            await self._stop(bench)

    async def _stop(self, bench: _Bench) -> None:
        if bench.task is not None:
            bench.task.cancel()
            await asyncio.wait({bench.task})

    async def _run(self, bench: _Bench, request: BenchRequest) -> None:
        def on_stage(stage: str) -> None:
            bench.stage = stage

        try:
            devices = bench.controller.serving_instance().host.device_indices
            result = await self._measure(bench.controller, on_stage).run(reload=request.reload)
            self._models.keep_bench(bench.model_id, devices, result)
            self._on_changed(bench.model_id)
            bench.state, bench.result = "done", result
        except CortexError as error:
            bench.state, bench.error = "failed", error
            log.warning("the measurement of %s failed: %s", bench.model_id, error.message)
        except Exception as error:
            bench.state, bench.error = "failed", LoadFailed("the measurement failed; see the node's log")
            log.error("the measurement of %s failed", bench.model_id, exc_info=error)
