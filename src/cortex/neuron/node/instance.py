"""A loaded model: its requests, its admission and its statistics.

An instance lives from the end of a load to the unload or the loss of its worker, and through any sleep. The
controller makes a new one for the next load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cortex.neuron.config import Limits
from cortex.neuron.engine.request import EngineRequest, EngineStats, StepOutput
from cortex.neuron.node.admission import Admission, QueuedRequest, QueueFull
from cortex.neuron.node.generation import Generation
from cortex.neuron.node.library import FileStamps
from cortex.neuron.node.power import EnergyMeter
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import ModelHost, Resident
from cortex.system.tasks import run_once
from cortex.wire.errors import (
    CortexError,
    GenerationFailed,
    InvalidValue,
    Overloaded,
    Recovering,
    ShuttingDown,
    prompt_too_long,
    prompt_too_long_for_memory,
)
from cortex.wire.fields.request_class import CLASSES
from cortex.wire.node.protocol import ModelLoad
from cortex.wire.words import duration, plural


class Throughput:
    """Completion tokens per second over the latest seconds in which the model generated.

    Counts like the request log, without a request's first token and the time before it. The rate of one request equals
    its logged rate; rates of several add up.
    """

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()
        """Seconds with generation, and the tokens of all requests in them."""
        self._total_s = 0.0
        self._num_tokens = 0
        self._latest_s = float("-inf")
        self._since_s: float | None = None
        """The end of the latest sample, while a request generates."""

    def sample(self, now_s: float, num_tokens: int, *, is_generating: bool) -> None:
        """`num_tokens` have arrived since the last call. `is_generating`: a request has its first token and
        continues."""
        if self._since_s is None and now_s - self._latest_s > self._window_s:
            self._samples.clear()
            self._total_s, self._num_tokens = 0.0, 0
        elapsed_s = 0.0 if self._since_s is None else now_s - self._since_s
        self._since_s = now_s if is_generating else None
        self._latest_s = now_s
        if self._samples and not elapsed_s:  # samples of no length never fill the window, so none would leave it
            latest_s, latest = self._samples[-1]
            self._samples[-1] = (latest_s, latest + num_tokens)
        else:
            self._samples.append((elapsed_s, num_tokens))
        self._total_s += elapsed_s
        self._num_tokens += num_tokens
        while self._total_s - self._samples[0][0] >= self._window_s:
            oldest_s, oldest = self._samples.popleft()
            self._total_s -= oldest_s
            self._num_tokens -= oldest

    def per_s(self, now_s: float) -> float:
        """0 when the latest sample is older than the window."""
        if self._total_s <= 0 or now_s - self._latest_s > self._window_s:
            return 0.0
        return round(self._num_tokens / self._total_s, 2)


log = logging.getLogger(__name__)

_CACHE_TOKENS_AHEAD = 512
"""KV cache that a request needs beyond its prompt before it starts; the engine reserves this much ahead of each
sequence."""


@dataclass(frozen=True, slots=True)
class ModelCallbacks:
    """The controller's callbacks for a load and, later, for the instance. Called on the loop."""

    on_progress: Callable[[str, int, int], None]
    """Stage, bytes done, total bytes."""
    on_files_ready: Callable[[], None]
    on_wait: Callable[[str | None], None]
    """What the load waits for; None if nothing."""
    on_lost: Callable[[str], None]
    """The worker is gone, with the reason."""
    on_produced: Callable[[], None]
    """The model produced its first tokens."""


@dataclass(eq=False, slots=True)
class _Running:
    """A request from `generate` to its end."""

    request: EngineRequest
    generation: Generation
    queued: QueuedRequest
    has_token: bool = False
    drawn_j: float = 0.0
    """The energy meter's value when it got its slot."""


class Instance:
    """The `ModelSink` of one loaded model. Belongs to the daemon's loop."""

    def __init__(
        self, model_id: str, host: ModelHost, limits: Limits, callbacks: ModelCallbacks, *, preempts: bool = True
    ) -> None:
        """`preempts`: the engine runs it, and preempts requests of lower classes."""
        self.model_id = model_id
        self.host = host
        self.stage_layers: tuple[int, ...] = ()
        """Number of layers on each of its devices, if the model is divided by layers."""
        self.files: tuple[Path, FileStamps] = (Path(), ())
        """The path that it was loaded from, and the stamps of its files."""
        self.files_changed = False
        """Whether the files have changed since."""
        self.lost_reason: str | None = None
        """Why the worker that held the model is gone."""
        self._max_prompt_tokens = limits.max_prompt_tokens
        self._callbacks = callbacks
        self._unloading: asyncio.Task[Reclaimed] | None = None
        self._max_num_seqs = limits.max_num_seqs
        self._preempts = preempts
        self._admission = Admission(self._num_slots, limits.max_queue, preempted_slots=self._num_slots * preempts)
        self._energy = EnergyMeter()
        self._requests: dict[str, _Running] = {}
        self._closed: CortexError | None = None
        self._has_produced = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._stats = EngineStats()
        self._throughput = Throughput()
        self.fetched_tokens_per_s: float | None = None
        """Rate of KV from other nodes; None until some has arrived."""
        self._num_generating = 0
        """Requests that have their first token."""
        self._idle_since_s = time.monotonic()

    def loaded(self) -> None:
        """The model is in memory: the instance takes requests from now on."""
        self._idle_since_s = time.monotonic()
        self._update_capacity()

    @property
    def resident(self) -> Resident:
        assert self.host.resident is not None, "the model is being loaded, or gone"
        return self.host.resident

    @property
    def host_bytes(self) -> int:
        """Bytes of the model's weights in host memory: all of them while it sleeps or wakes, otherwise those that do
        not fit its device."""
        resident = self.host.resident
        return 0 if resident is None else resident.host_bytes or resident.info.host_weight_bytes

    @property
    def sleeps(self) -> bool:
        """Whether all of its weights are in host memory."""
        return self.host.resident is not None and self.host.resident.host_bytes > 0

    @property
    def stats(self) -> EngineStats:
        """The engine's counters, as of its latest report."""
        return self._stats

    @property
    def num_requests(self) -> int:
        """Requests that run or wait in its queue."""
        return len(self._requests)

    @property
    def idle_s(self) -> float:
        """Seconds since the last request ended, or since the load; 0 while one runs."""
        return 0.0 if self._requests else time.monotonic() - self._idle_since_s

    @property
    def waited_s(self) -> float:
        """How long the first request of the queue has waited; 0 if there is none."""
        return self._admission.waited_s(time.monotonic())

    def load(self, num_in_preparation: int = 0) -> ModelLoad:
        """How busy the model is. The counts are current; the rest is as of the engine's latest report.
        `num_in_preparation` requests wait before they are submitted."""
        waiting_in_engine = self._stats.waiting
        return ModelLoad(
            running=max(0, self._admission.running - waiting_in_engine),
            waiting=self._admission.waiting + waiting_in_engine + num_in_preparation,
            kv_used_fraction=round(self._stats.used_pages / max(self._stats.num_pages, 1), 4),
            tokens_per_s=self._throughput.per_s(time.monotonic()),
            fetched_tokens_per_s=self.fetched_tokens_per_s,
            waiting_by_class={name: n for name, n in zip(CLASSES, self._admission.waiting_at, strict=True) if n},
        )

    # Requests

    def generate(self, request: EngineRequest) -> Generation:
        """Starts or queues a request.

        Raises Overloaded when the queue is full or the model is being unloaded, ContextLengthExceeded
        for a prompt over the limits, InvalidValue for an id that is in use.
        """
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        self._check(request)
        generation = Generation(request.id, lambda: self._cancel(request.id))
        queued = QueuedRequest(
            request.principal,
            len(request.prompt) + min(request.max_tokens, _CACHE_TOKENS_AHEAD),
            level=request.level,
            prompt_tokens=len(request.prompt),
            start=lambda: self._start(request, generation, queued),
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

    def _start(self, request: EngineRequest, generation: Generation, queued: QueuedRequest) -> None:
        now_s = time.monotonic()
        generation.queued_s = now_s - queued.entered_s
        # The slot is counted already.
        self._requests[request.id].drawn_j = self._energy.advance(now_s, self._admission.running - 1)
        self.host.submit(request)

    @property
    def power_devices(self) -> tuple[int, ...]:
        return tuple(index for replica in self.host.replica_devices for index in replica)

    @property
    def num_running(self) -> int:
        return self._admission.running

    def draws(self, watts: float) -> None:
        """The total power draw of its running requests from now on."""
        self._energy.advance(time.monotonic(), self._admission.running)
        self._energy.draws(watts)

    def _overloaded(self, waiting: int, retry_after_s: float) -> Overloaded:
        queue = plural(waiting, "request is", "requests are")
        message = f"{self.model_id} is busy: {queue} waiting; try again in {duration(retry_after_s)}"
        return Overloaded(message, retry_after_s=retry_after_s)

    def _check(self, request: EngineRequest) -> None:
        prompt_tokens, context_tokens = len(request.prompt), self.resident.info.context_tokens
        if request.id in self._requests:
            raise InvalidValue(f"request id {request.id!r} is in use; give every request its own", param="id")
        if not prompt_tokens:  # a request that goes to a server as text, and is counted there
            return
        if prompt_tokens >= context_tokens or prompt_tokens > (self._max_prompt_tokens or context_tokens):
            raise prompt_too_long(prompt_tokens, context_tokens, self._max_prompt_tokens)

    def _cancel(self, request_id: str) -> None:
        running = self._requests.get(request_id)
        if running is None:
            return
        if running.queued.has_slot:
            # The engine frees the slot: its final output follows.
            self.host.cancel(request_id)
        else:
            running.generation.push(StepOutput(request_id, finish="cancelled"))
            self._release(running, finished=False)

    # ModelSink: what the worker reports

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self._callbacks.on_progress(stage, done_bytes, total_bytes)

    def _meter(self, running: _Running, now_s: float) -> None:
        """Sets the energy of a request that ends, before its last output is delivered."""
        if running.queued.has_slot:
            running.generation.energy_j = self._energy.advance(now_s, self._admission.running) - running.drawn_j

    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None:
        if not self._has_produced and any(output.tokens or output.vectors for output in outputs):
            self._has_produced = True
            self._callbacks.on_produced()
        now_s = time.monotonic()
        num_tokens = 0
        for output in outputs:
            running = self._requests.get(output.request_id)
            if running is None:
                continue
            if output.finish is not None:
                self._meter(running, now_s)
            if output.finish in ("error", "rejected"):
                message = output.error or "the engine ended this request without a reason; see the node's log"
                failed = InvalidValue if output.finish == "rejected" else GenerationFailed
                running.generation.fail(failed(message))
            else:
                try:
                    running.generation.push(output)
                except Exception:
                    log.exception("an output of a request of %s cannot be delivered", self.model_id)
                    self._fail_alone(output)
                    continue
                num_tokens += len(output.tokens)
                self._admission.spent(running.queued, len(output.tokens) - (output.cached_tokens or 0))
                if not running.has_token and (output.tokens or output.vectors):
                    self._admission.produced(running.queued, now_s)
                    num_tokens -= self._note_first(running, output)
            if output.finish is not None:
                self._release(running, finished=output.finish in ("stop", "length"))
        self._throughput.sample(now_s, num_tokens, is_generating=self._num_generating > 0)

    def _fail_alone(self, output: StepOutput) -> None:
        """Ends only the request whose consumer raised; the others of the step get their outputs."""
        if output.finish is None:
            self.host.cancel(output.request_id)
        self._end_with_error(
            output.request_id, GenerationFailed("its output could not be delivered; see the node's log")
        )

    def _note_first(self, running: _Running, output: StepOutput) -> int:
        """Records the first token of a request that had none. Returns the number of tokens, 0 or 1, to exclude from the
        rate."""
        running.has_token = bool(output.tokens)
        self._num_generating += running.has_token
        return int(running.has_token)

    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None:
        if (running := self._requests.get(request_id)) is not None:
            alone = self._admission.running <= 1
            self._end_with_error(request_id, _request_error(kind, message, running, alone=alone))

    def on_stats(self, stats: EngineStats) -> None:
        self._stats = stats
        self._update_capacity()

    def on_lost(self, reason: str) -> None:
        self.lost_reason = reason
        message = f"the process of {self.model_id} has ended and is being started again; try again"
        self.end(Recovering(message, retry_after_s=2))
        self._callbacks.on_lost(reason)

    def on_ending(self, reason: str) -> None:
        self.close_admission(Recovering(f"{self.model_id} pauses ({reason}); try again", retry_after_s=5))
        run_once(self._leave(reason), f"unload {self.model_id} before a member of its group ends")

    async def _leave(self, reason: str) -> None:
        await self.drained()
        if self.lost_reason is None and self._unloading is None:
            await self.unload()
            self.on_lost(reason)

    @property
    def _num_slots(self) -> int:
        return self._max_num_seqs * len(self.host.replica_devices)

    def _update_capacity(self) -> None:
        if self.host.resident is not None:  # reports may come before the load has ended
            info = self.host.resident.info
            num_pages = max(info.num_pages, self._stats.num_pages)  # more with extra replicas
            free_tokens = (num_pages - self._stats.used_pages) * info.page_tokens
            self._admission.slots = self._num_slots
            self._admission.preempted_slots = self._num_slots * self._preempts
            self._admission.cache_reported(free_tokens, time.monotonic())

    # Drain, sleep and unload

    def close_admission(self, error: CortexError) -> None:
        """From now on `generate` raises `error`; requests in the queue end with it at once."""
        self._closed = error
        for queued in self._admission.clear():
            waiting = next(each for each in self._requests.values() if each.queued is queued)
            waiting.generation.fail(error)
            self._forget(waiting.request.id)

    async def drained(self) -> None:
        """Returns when all requests have ended."""
        await self._empty.wait()

    def end(self, error: CortexError) -> None:
        """Ends every request with `error`, now."""
        self.close_admission(error)
        for running in list(self._requests.values()):
            self.host.cancel(running.request.id)
            self._end_with_error(running.request.id, error)

    async def sleep(self) -> None:
        """Moves the weights to host memory and frees the rest. Raises SleepRejected or WorkerLost."""
        self.end(ShuttingDown(f"{self.model_id} was put to sleep; try again to have it woken"))
        await self.host.sleep()

    def woken(self) -> None:
        """Serves again."""
        self._closed = None

    async def unload(self) -> Reclaimed:
        """Frees all memory, once. The instance must not be used afterwards."""
        self.end(ShuttingDown(f"{self.model_id} was unloaded; try again to have it loaded"))
        if self._unloading is None:
            self._unloading = asyncio.create_task(self.host.unload())
        return await asyncio.shield(self._unloading)

    def _end_with_error(self, request_id: str, error: CortexError) -> None:
        if (running := self._requests.get(request_id)) is not None:
            running.generation.fail(error)
            self._release(running, finished=False)

    def _release(self, running: _Running, *, finished: bool) -> None:
        self._forget(running.request.id)
        self._admission.release(running.queued, time.monotonic(), finished=finished)

    def _forget(self, request_id: str) -> None:
        running = self._requests.pop(request_id, None)
        if running is not None and running.has_token:
            self._num_generating -= 1
            self._throughput.sample(time.monotonic(), 0, is_generating=self._num_generating > 0)
        if not self._requests:
            self._idle_since_s = time.monotonic()
            self._empty.set()


def _request_error(kind: FaultKind, message: str, running: _Running, *, alone: bool) -> CortexError:
    if kind is FaultKind.REQUEST:
        return InvalidValue(message)
    if kind is FaultKind.DEVICE:
        return Recovering(f"{message}; try again", retry_after_s=1)
    if kind is FaultKind.OUT_OF_MEMORY:
        if alone and not running.queued.has_output:
            return prompt_too_long_for_memory(len(running.request.prompt), message)
        return Overloaded(
            f"the device ran out of memory together with other requests; try again ({message})", retry_after_s=5
        )
    return GenerationFailed(f"the engine failed on this request: {message}")
