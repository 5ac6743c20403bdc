"""A model that is loaded and serving: its requests, who waits for a seat, and how busy it is.

Lives from the end of a load to the unload or to the loss of its worker, through any sleep; the owner makes a new one
after that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from cortex.neuron.engine.request import EngineRequest, EngineStats, StepOutput
from cortex.neuron.node.admission import Admission, QueuedRequest, QueueFull
from cortex.neuron.node.generation import Generation
from cortex.neuron.node.throughput import Throughput
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.reclaim import Reclaimed
from cortex.neuron.worker.supervisor import Resident, WorkerSupervisor
from cortex.wire.errors import (
    ContextLengthExceeded,
    CortexError,
    GenerationFailed,
    InvalidValue,
    Overloaded,
    PromptTooLongForMemory,
    Recovering,
    ShuttingDown,
)
from cortex.wire.node import ModelLoad


_CACHE_TOKENS_AHEAD = 512
"""KV cache that a request needs beyond its prompt before it starts. The engine keeps as much ahead of each sequence."""


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What a loaded model takes from its callers."""

    slots: int
    max_queue: int
    max_prompt_tokens: int | None = None


@dataclass(eq=False, slots=True)
class _Running:
    """A request between `submit` and its end."""

    request: EngineRequest
    generation: Generation
    queued: QueuedRequest


class Instance:
    """The `ModelSink` of one loaded model. Belongs to the daemon's loop."""

    def __init__(
        self,
        model_id: str,
        supervisor: WorkerSupervisor,
        limits: ServingLimits,
        *,
        on_progress: Callable[[str, int, int], None],
        on_lost: Callable[[str], None],
        on_proved: Callable[[], None],
    ) -> None:
        self.model_id = model_id
        self.supervisor = supervisor
        self._limits = limits
        self._tell_progress = on_progress
        self._tell_lost = on_lost
        self._tell_proved = on_proved
        self._resident: Resident | None = None
        self._admission = Admission(limits.slots, limits.max_queue)
        self._requests: dict[str, _Running] = {}
        self._closed: CortexError | None = None
        self._proved = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._stats = EngineStats()
        self._throughput = Throughput()
        self._idle_since_s = time.monotonic()

    def loaded(self, resident: Resident) -> None:
        self._resident = resident
        self._admission.cache_reported(resident.info.num_pages * resident.info.page_tokens, time.monotonic())

    @property
    def resident(self) -> Resident:
        assert self._resident is not None, "the model is still being loaded"
        return self._resident

    @property
    def host_bytes(self) -> int:
        """Its weights in host memory while it sleeps or wakes; 0 else."""
        return self._resident.host_bytes if self._resident is not None else 0

    @property
    def stats(self) -> EngineStats:
        """The engine's own counters, as of its last report."""
        return self._stats

    @property
    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while one runs."""
        return 0.0 if self._requests else time.monotonic() - self._idle_since_s

    def load(self) -> ModelLoad:
        """How busy it is. The counts are the daemon's own and always current; the rest is the last report."""
        waiting_inside = self._stats.waiting
        return ModelLoad(
            running=max(0, self._admission.running - waiting_inside),
            waiting=self._admission.waiting + waiting_inside,
            kv_used_fraction=round(self._stats.used_pages / max(self._stats.num_pages, 1), 4),
            tokens_per_s=self._throughput.per_s(time.monotonic()),
        )

    # Requests

    def submit(self, request: EngineRequest) -> Generation:
        """Takes a request, to run now or when a seat is free.

        Raises Overloaded when the queue is full or the model is on its way out, ContextLengthExceeded and
        PromptTooLongForMemory for what it cannot take, InvalidValue for an id that is in use.
        """
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        self._check(request)
        generation = Generation(request.id, lambda: self._cancel(request.id))
        queued = QueuedRequest(
            request.principal,
            len(request.prompt) + min(request.max_tokens, _CACHE_TOKENS_AHEAD),
            start=lambda: self.supervisor.submit(self.resident, request),
            reject=lambda retry_after_s: self._end_with_error(
                request.id, self._overloaded(self._admission.waiting, retry_after_s)
            ),
        )
        self._requests[request.id] = _Running(request, generation, queued)
        self._empty.clear()
        try:
            self._admission.enter(queued, time.monotonic())
        except QueueFull as full:
            self._forget(request.id)
            raise self._overloaded(full.waiting, full.retry_after_s) from full
        return generation

    def _overloaded(self, waiting: int, retry_after_s: float) -> Overloaded:
        message = f"{self.model_id} is busy: {waiting} requests wait already; try again in {retry_after_s:.0f} s"
        return Overloaded(message, retry_after_s=retry_after_s)

    def _check(self, request: EngineRequest) -> None:
        prompt_tokens, context_tokens = len(request.prompt), self.resident.info.context_tokens
        if request.id in self._requests:
            raise InvalidValue(f"request id {request.id!r} is in use; give every request its own", param="id")
        if prompt_tokens >= context_tokens:
            raise ContextLengthExceeded(
                f"prompt is too long: {prompt_tokens} tokens > {context_tokens - 1} maximum "
                f"(the context of {context_tokens} tokens, less one for the answer); shorten the conversation",
                details={"prompt_tokens": prompt_tokens, "context_tokens": context_tokens},
            )
        if self._limits.max_prompt_tokens is not None and prompt_tokens > self._limits.max_prompt_tokens:
            raise PromptTooLongForMemory(
                f"prompt is too long: {prompt_tokens} tokens > {self._limits.max_prompt_tokens} maximum that this "
                "node takes (limits.max_prompt_tokens in neuron.toml); shorten the conversation",
                details={"prompt_tokens": prompt_tokens, "max_prompt_tokens": self._limits.max_prompt_tokens},
            )

    def _cancel(self, request_id: str) -> None:
        running = self._requests.get(request_id)
        if running is None:
            return
        if running.queued.has_slot:
            # The seat is free when the engine says so: its final output follows.
            self.supervisor.cancel(self.resident, request_id)
        else:
            running.generation.push(StepOutput(request_id, finish="cancelled"))
            self._over(running, finished=False)

    # What the worker says

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self._tell_progress(stage, done_bytes, total_bytes)

    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None:
        if not self._proved and any(output.tokens for output in outputs):
            self._proved = True
            self._tell_proved()
        for output in outputs:
            running = self._requests.get(output.request_id)
            if running is None:
                continue
            if output.finish == "error":
                message = output.error or "the engine ended this request without saying why; see the node's log"
                running.generation.fail(GenerationFailed(message))
            else:
                running.generation.push(output)
                if output.tokens:
                    self._admission.produced(running.queued, time.monotonic())
            if output.finish is not None:
                self._over(running, finished=output.finish in ("stop", "length"))

    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None:
        if (running := self._requests.get(request_id)) is not None:
            alone = self._admission.running <= 1
            self._end_with_error(request_id, _error_of(kind, message, running, alone=alone))

    def on_stats(self, stats: EngineStats) -> None:
        self._stats = stats
        now_s = time.monotonic()
        self._throughput.sample(now_s, stats.completion_tokens)
        info = self.resident.info
        self._admission.cache_reported((info.num_pages - stats.used_pages) * info.page_tokens, now_s)

    def on_lost(self, reason: str) -> None:
        self.end(
            Recovering(f"{self.model_id} lost its device and is coming back by itself; try again", retry_after_s=2)
        )
        self._tell_lost(reason)

    # The way out

    def close_admission(self, error: CortexError) -> None:
        """From now on `submit` raises `error`, and those still in the queue get it at once."""
        self._closed = error
        for queued in self._admission.clear():
            waiting = next(each for each in self._requests.values() if each.queued is queued)
            waiting.generation.fail(error)
            self._forget(waiting.request.id)

    async def drained(self, timeout_s: float) -> bool:
        """Waits for the running requests, at most `timeout_s`; whether none is left."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def end(self, error: CortexError) -> None:
        """Ends every request with `error`, now."""
        self.close_admission(error)
        for running in list(self._requests.values()):
            self.supervisor.cancel(self.resident, running.request.id)
            self._end_with_error(running.request.id, error)

    async def sleep(self) -> None:
        """Parks the weights in host memory and gives the rest back. Raises SleepRefused or WorkerLost."""
        self.end(ShuttingDown(f"{self.model_id} was put to sleep; try again to have it woken"))
        self._resident = await self.supervisor.sleep(self.resident)

    async def wake(self) -> None:
        """Back to serving. Raises LoadRefused (it sleeps as before), Damaged or WorkerLost."""
        self._resident = await self.supervisor.wake(self.resident)
        self._closed = None

    async def unload(self) -> Reclaimed:
        """Gives the memory back; the instance is dead afterwards."""
        self.end(ShuttingDown(f"{self.model_id} was unloaded; try again to have it loaded"))
        return await self.supervisor.unload(self.resident)

    def _end_with_error(self, request_id: str, error: CortexError) -> None:
        if (running := self._requests.get(request_id)) is not None:
            running.generation.fail(error)
            self._over(running, finished=False)

    def _over(self, running: _Running, *, finished: bool) -> None:
        self._forget(running.request.id)
        self._admission.release(running.queued, time.monotonic(), finished=finished)

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        if not self._requests:
            self._idle_since_s = time.monotonic()
            self._empty.set()


def _error_of(kind: FaultKind, message: str, running: _Running, *, alone: bool) -> CortexError:
    if kind is FaultKind.REQUEST:
        return InvalidValue(message)
    if kind is FaultKind.OUT_OF_MEMORY:
        if alone and not running.queued.has_output:
            tokens = len(running.request.prompt)
            return PromptTooLongForMemory(
                f"a prompt of {tokens} tokens does not fit the device's memory; shorten it ({message})",
                details={"prompt_tokens": tokens},
            )
        return Overloaded(f"the device ran out of memory with others at work; try again ({message})", retry_after_s=5)
    return GenerationFailed(f"the engine failed on this request: {message}")
