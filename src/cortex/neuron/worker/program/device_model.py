"""A model in a worker and the requests in it. Runs on the engine thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from cortex.neuron.engine.errors import FaultyRequest
from cortex.neuron.engine.request import EngineRequest, StepOutput
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.neuron.worker import memory
from cortex.neuron.worker.faults import DeviceFault, FaultKind, choose_victims, explain, raise_device_fault
from cortex.neuron.worker.program.step_link import FollowerLink, LeaderLink
from cortex.neuron.worker.protocol import DeviceAddress, Event, Outputs, RequestFailed

if TYPE_CHECKING:
    from cortex.neuron.engine.engine import Engine  # imports torch, which only the engine itself may do
    from cortex.neuron.engine.parallel.ranks import Follower

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Consecutive failed steps after which a model is broken and must be reloaded."""


class DeviceModel:
    """Sends the events of its requests through `emit`. Every method raises DeviceFault when the device is unusable;
    other errors of a step end requests, or break the model."""

    def __init__(
        self,
        handle: int,
        engine: Engine,
        device: DeviceAddress,
        emit: Callable[[Event], None],
        link: LeaderLink | FollowerLink | None = None,
    ) -> None:
        """`link`: to the other ranks of a divided model."""
        self.handle = handle
        self.engine = engine
        self._link = link
        self.is_prepared = False
        """Whether the engine has nothing left to build for later steps."""
        self.broken: str | None = None
        """Why the model can serve no more requests, which have all ended."""
        self._device = device
        self._emit = emit
        self._live: dict[str, bool] = {}
        """Request id → whether it has produced output, oldest first."""
        self._failing: dict[str, tuple[FaultKind, str]] = {}
        """Requests that were cancelled because a step failed, and the failure to report when they end."""
        self._num_failed_steps = 0

    def close(self) -> None:
        """Frees everything that the model holds."""
        if self._link is not None:
            self._link.close()
        self.engine.close()

    def follow(self, plan: StepPlan) -> None:
        """Runs a step that the leader announced. A failed step leaves the ranks in different states."""
        try:
            cast("Follower", self.engine).follow(plan)
        except Exception as error:
            raise DeviceFault(f"a rank of a divided model failed in a step: {explain(error)}") from error

    def accept(self, request: EngineRequest) -> None:
        try:
            self.engine.submit(request)
        except Exception as error:  # noqa: BLE001 - classified: only a device fault may affect more than this request
            kind = raise_device_fault(error, "submit")
            self._fail(request.id, kind, str(error) if kind is FaultKind.REQUEST else explain(error))
        else:
            self._live[request.id] = False
            self.is_prepared = False  # pages of it may be copied when it has ended

    def cancel_all(self) -> None:
        for request_id in self._live:
            self.engine.cancel(request_id)

    def fail_all(self, message: str) -> None:
        """Reports every request as failed, without notifying the engine."""
        for request_id in self._live:
            self._fail(request_id, FaultKind.REQUEST, message)

    def step(self) -> bool:
        """Runs one step; whether it succeeded."""
        try:
            outputs = self.engine.step()
        except Exception as error:  # noqa: BLE001 - classified: the worker must survive any error of a model
            self._step_failed(error)
            return False
        self._num_failed_steps = 0
        reported = outputs
        if self._failing:
            reported = [output for output in outputs if not self._ended_by_fault(output)]
        for output in reported:
            if output.finish is not None:
                self._live.pop(output.request_id, None)
            elif output.tokens and output.request_id in self._live:
                self._live[output.request_id] = True
        if reported:
            self._emit(Outputs(self.handle, tuple(reported)))
        return True

    def _ended_by_fault(self, output: StepOutput) -> bool:
        """Whether `output` belongs to a request that a failed step ended; its end is reported as a failure."""
        if output.request_id not in self._failing:
            return False
        if output.finish is not None:
            kind, message = self._failing.pop(output.request_id)
            self._live.pop(output.request_id, None)
            self._fail(output.request_id, kind, message)
        return True

    def _step_failed(self, error: Exception) -> None:
        kind = raise_device_fault(error, "step")
        message = explain(error)
        log.error("step of model %d failed (%s): %s", self.handle, kind, message, exc_info=error)
        blamed = error.request_id if isinstance(error, FaultyRequest) else None
        live = {name: produced for name, produced in self._live.items() if name not in self._failing}
        if kind is not FaultKind.OUT_OF_MEMORY and blamed is None and self._isolate():
            victims = []
        else:
            victims = choose_victims(kind, live, blamed)
        for request_id in victims:
            self._failing[request_id] = (kind, message)
            self.engine.cancel(request_id)
        if kind is FaultKind.OUT_OF_MEMORY:
            memory.give_back(self._device)
        if victims and blamed is not None:
            self._num_failed_steps = 0  # the request caused the failure, the model works
        elif kind is not FaultKind.OUT_OF_MEMORY or not victims:
            # After out of memory, several requests in a row may have to end before the rest fits.
            self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            self._break(message)

    def _isolate(self) -> bool:
        """Whether the engine continues with one request at a time to find the cause; not if its self-test fails."""
        try:
            return self.engine.isolate()
        except Exception as error:
            raise_device_fault(error, "self-test")
            log.error("self-test of model %d failed: %s", self.handle, explain(error), exc_info=error)
            return False

    def _break(self, message: str) -> None:
        for request_id, (kind, reason) in self._failing.items():
            self._fail(request_id, kind, reason)
        self._live.clear()
        self.broken = message

    def _fail(self, request_id: str, kind: FaultKind, message: str) -> None:
        self._emit(RequestFailed(self.handle, request_id, kind, message))
