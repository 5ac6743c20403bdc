"""One loaded model and everything that runs on it. See the package's docstring for the contract."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from cortex.neuron.engine.errors import RequestError, SleepError, StepBlamed
from cortex.neuron.engine.execution.runner import Launched, Runner
from cortex.neuron.engine.loading import LoadedModel, Progress, load_model
from cortex.neuron.engine.pages import PagePool
from cortex.neuron.engine.recurrent_checkpoints import RecurrentCheckpoints
from cortex.neuron.engine.request import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    LoadSpec,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from cortex.neuron.engine.sampling.constraints import Constraints
from cortex.neuron.engine.sampling.sampler import Draw
from cortex.neuron.engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from cortex.neuron.engine.sequence import Sequence
from cortex.neuron.engine.sleep import SleepingModel

STEP_TOKENS = {"cuda": 16_384, "cpu": 512}
MIXED_PREFILL_TOKENS = {"cuda": 2_048, "cpu": 128}
RESERVED_TOKENS = 512
"""Answers up to this length do not take pages from each other."""
CHECKPOINT_SPACING_TOKENS = {"cuda": 256, "cpu": 32}
"""A checkpoint costs a step of its own, and saves so many tokens of a later prompt: about as much as a step takes."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step and the sequences that draw in it, in order."""

    launched: Launched
    drawing: tuple[Sequence, ...]


@dataclass(slots=True)
class _Counted:
    """What was done for requests since the load, sleep or no sleep."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    """Of schedulers that are gone."""


class Engine:
    """Belongs to the engine thread of its device's worker; nothing here may be called from another."""

    def __init__(self, loaded: LoadedModel, spec: LoadSpec) -> None:
        device = loaded.model.parameters.device
        memory = loaded.memory
        self._loaded = loaded
        self._spec = spec
        self._device = device
        self._overlaps = device.type == "cuda"
        self._moves_weights = device.type == "cuda"
        self._asleep: SleepingModel | None = None
        step_tokens = max(spec.prefill_chunk_tokens or STEP_TOKENS[device.type], memory.slots.rows)
        self._limits = SchedulerLimits(
            max_rows=memory.slots.rows,
            step_tokens=step_tokens,
            mixed_prefill_tokens=min(step_tokens, MIXED_PREFILL_TOKENS[device.type]),
            context_tokens=loaded.context_tokens,
            reserved_tokens=RESERVED_TOKENS,
        )
        self._constraints = Constraints(Path(spec.path), loaded.model.config.vocab, device)
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._pending: list[StepOutput] = []
        self._failed: tuple[Sequence, ...] = ()
        """What the step that raised last was to compute."""
        self._suspects: deque[Sequence] = deque()
        """Computed one at a time, the first of them next."""
        self._counted = _Counted()
        self._build_runtime()
        self.info = EngineInfo(
            family=str(loaded.model.architecture.raw["model_type"]),
            dtype=str(loaded.dtype).removeprefix("torch."),
            context_tokens=loaded.context_tokens,
            vocab_size=loaded.model.config.vocab,
            weight_bytes=loaded.weight_bytes,
            kv_bytes=memory.num_bytes,
            page_tokens=memory.page_tokens,
            num_pages=self._scheduler.pool.num_pages,
            notes=loaded.notes,
        )

    def _build_runtime(self) -> None:
        """What runs sequences, with nothing in it yet. The memory they are kept in must be there."""
        memory, rows = self._loaded.memory, self._limits.max_rows
        # Slots are the rows', one for padding rows, then the checkpoints'.
        states = None
        if memory.states is not None:
            states = RecurrentCheckpoints(
                rows + 1, memory.slots.checkpoints, CHECKPOINT_SPACING_TOKENS[self._device.type]
            )
        pool = PagePool(memory.num_pages, memory.page_tokens)
        limits = self._limits
        runner = Runner(
            self._loaded.model, memory.page_tokens, rows, limits.context_tokens, limits.step_tokens, memory.states
        )
        self._scheduler, self._runner = Scheduler(pool, self._limits, states), runner

    @classmethod
    def load(cls, spec: LoadSpec, device: torch.device, progress: Progress, cancelled: Callable[[], bool]) -> Engine:
        """Raises LoadError or LoadCancelled, and then leaves nothing on the device."""
        engine = cls(load_model(spec, device, progress, cancelled), spec)
        progress("warm", 0, 0)
        engine.warm_up()
        return engine

    def warm_up(self) -> None:
        """Runs one short prompt and captures the smallest graph: what the first answer needs, and no more of it."""
        self._ask()
        self._runner.prepare()

    def prepare(self) -> bool:
        """Builds one more thing that later steps may want, while there are none; false when nothing is left."""
        return self._asleep is None and self._runner.prepare()

    def _ask(self) -> tuple[int, ...]:
        """The greedy answer to a fixed short prompt; not counted. The engine must be idle."""
        counted = replace(self._counted)
        self.submit(self._self_test())
        answer: list[int] = []
        try:
            while self.has_work:
                for output in self.step():
                    answer += output.tokens
        except BaseException:
            self.cancel("self-test")
            self._pending.clear()
            raise
        self._counted = counted
        return tuple(answer)

    def _self_test(self) -> EngineRequest:
        token = min(1, self.info.vocab_size - 1)
        prompt = (token,) * min(4, self.info.context_tokens - 2)
        return EngineRequest("self-test", prompt, max_tokens=2, sampling=SamplingParams(temperature=0.0))

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Raises RequestError when it can never be served."""
        if self._asleep is not None:
            raise RequestError("the model is asleep; wake it first")
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is already running")
        if request.prompt and not 0 <= min(request.prompt) <= max(request.prompt) < self.info.vocab_size:
            raise RequestError(f"the prompt has token ids outside the model's vocabulary of {self.info.vocab_size}")
        request.sampling.check()
        constraint = self._constraints.compile(request.grammar) if request.grammar is not None else None
        sequence = self._scheduler.submit(request)
        sequence.constraint = constraint
        self._sequences[request.id] = sequence

    def cancel(self, request_id: str) -> None:
        """Ends a request; what it held is free at once. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, StepOutput(request_id, finish="cancelled"))

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight or self._pending)

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Launches the next step and reports the last finished one: on a GPU the one before, on a CPU the same.

        Raises StepBlamed where one request is known to be at fault, and anything else a step may raise."""
        self._failed = ()
        if self._suspects or any(sequence.constraint is not None for sequence in self._scheduler.running):
            self._collect_all()  # what may come next depends on what came last
        plan = self._plan()
        if plan is not None:
            self._launch(plan)
        if self._in_flight and (not self._overlaps or plan is None or len(self._in_flight) > 1):
            self._collect(self._in_flight.popleft())
        outputs, self._pending = self._pending, []
        return outputs

    def isolate(self) -> bool:
        """After a step that raised for an unknown reason: computes the requests of that step one at a time, until each
        has drawn a token, so that the one at fault is blamed alone. False: it is not known which they were.

        A self-test comes first. What it raises is the model's fault, and no request's; nothing is isolated then.
        """
        suspects, self._failed = self._failed, ()
        if not suspects:
            return False
        self._collect_all()
        sequence = self._scheduler.submit(self._self_test())
        try:
            plan = self._scheduler.plan_alone(sequence)
            if plan is not None:
                self._runner.launch(plan, [Draw(sequence.row, 0)]).read()
        finally:
            self._scheduler.drop(sequence)
        self._suspects.extend(suspects)
        return True

    def _plan(self) -> StepPlan | None:
        """While there are suspects, a step of the first of them; one that cannot be computed alone now rejoins."""
        while self._suspects:
            suspect = self._suspects[0]
            plan = None if suspect.finished else self._scheduler.plan_alone(suspect)
            if plan is not None:
                return plan
            self._suspects.popleft()
        return self._scheduler.plan()

    def _launch(self, plan: StepPlan) -> None:
        by_row = {sequence.row: sequence for sequence in self._scheduler.running}
        drawing = tuple(by_row[row.row] for row in plan.rows if row.draws)
        # The plan counts this draw already.
        draws = [Draw(sequence.row, sequence.num_drawn - 1) for sequence in drawing]
        try:
            mask = self._constraints.mask([sequence.constraint for sequence in drawing])
            launched = self._runner.launch(plan, draws, mask)
        except Exception as error:
            self._scheduler.retract(plan)
            if self._suspects and not isinstance(error, StepBlamed):
                raise StepBlamed(self._suspects[0].request.id) from error
            self._failed = tuple(by_row[row.row] for row in plan.rows)
            raise
        if self._suspects and drawing:
            self._suspects.popleft()
        self._in_flight.append(_InFlight(launched, drawing))
        self._counted.steps += 1
        self._counted.prompt_tokens += sum(row.count for row in plan.rows if row.tokens is not None)

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect(self._in_flight.popleft())

    def _collect(self, step: _InFlight) -> None:
        result = step.launched.read()
        for index, sequence in enumerate(step.drawing):
            if sequence.finished:
                continue  # ended after this step was launched
            logprobs = None if result.logprobs is None else result.logprobs[index]
            self._deliver(sequence, result.tokens[index], result.healthy[index], logprobs)

    def _deliver(self, sequence: Sequence, token: int, healthy: bool, logprobs: TokenLogprobs | None) -> None:
        request = sequence.request
        if not healthy:
            self._scheduler.distrust(sequence)
            message = "the model produced numbers that are not finite for this prompt; the request was ended"
            self._finish(sequence, StepOutput(request.id, finish="error", error=message))
            return
        self._scheduler.token_drawn(sequence, token)
        self._counted.completion_tokens += 1
        num_drawn = len(sequence.tokens) - len(request.prompt)
        finish: FinishReason | None = None
        constraint = sequence.constraint
        is_complete = constraint is not None and constraint.is_complete_after(token)
        if constraint is not None and constraint.failure is not None:
            self._finish(sequence, StepOutput(request.id, finish="error", error=constraint.failure))
            return
        if is_complete or (token in request.stop_token_ids and num_drawn > request.min_tokens):
            finish = "stop"
        elif num_drawn >= request.max_tokens:
            finish = "length"
        cached = None
        if not sequence.reported_cached:
            sequence.reported_cached = True
            cached = sequence.cached or 0
            self._counted.cached_tokens += cached
        output = StepOutput(
            request.id,
            (token,),
            () if logprobs is None or request.sampling.top_logprobs is None else (_trimmed(logprobs, request),),
            cached,
            finish,
        )
        if finish is None:
            self._pending.append(output)
        else:
            self._finish(sequence, output)

    def _finish(self, sequence: Sequence, last: StepOutput) -> None:
        sequence.finished = True
        self._scheduler.drop(sequence)
        del self._sequences[sequence.request.id]
        self._pending.append(last)

    # -- sleep -----------------------------------------------------------------------------------------------------

    def sleep(self) -> int:
        """Gives the device memory back and keeps the weights in host memory; returns how many bytes of it.

        What the model remembered of earlier prompts is gone: prefix cache, states and graphs are made anew by `wake`.
        Asleep it takes no requests. Asleep already, it sleeps on. Raises SleepError, and then is awake as before.
        """
        if self._asleep is not None:
            return self._asleep.host_bytes
        if self.has_work:
            raise SleepError("the model still has requests to answer")
        asleep = SleepingModel(self._loaded, self._ask(), moves_weights=self._moves_weights)
        self._fall_asleep(asleep)
        return asleep.host_bytes

    def wake(self, progress: Progress) -> None:
        """Takes the memory again, and answers a question as it did before it fell asleep. Awake, it stays so.

        Raises LoadError (it does not fit now), torch's own error (memory ran out midway) or anything a step raises:
        then it sleeps as before. Raises DamagedError where it is not the model that fell asleep: close it.
        """
        asleep = self._asleep
        if asleep is None:
            return
        asleep.refuse_without_room(self._spec, self._device)
        progress("place", 0, asleep.moved_bytes)
        try:
            asleep.end()
            self._build_runtime()
            self._asleep = None
            progress("warm", 0, 0)
            self.warm_up()
            asleep.check(self._ask())
        except BaseException:
            self._fall_asleep(asleep)
            raise
        asleep.forget()

    def _fall_asleep(self, asleep: SleepingModel) -> None:
        self._dismantle()
        asleep.begin()
        self._asleep = asleep
        self._give_back()

    def _dismantle(self) -> None:
        """The end of what runs sequences, and of whatever is in it; the counters go on."""
        self._in_flight.clear()
        self._sequences.clear()
        self._pending.clear()
        self._suspects.clear()
        self._failed = ()
        if hasattr(self, "_runner"):  # a wake may fail before there is one
            self._counted.preemptions += self._scheduler.preemptions
            del self._runner, self._scheduler

    # -- facts -----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        counted = self._counted
        if self._asleep is not None:
            return EngineStats(**asdict(counted))
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_pages=scheduler.pool.num_held,
            cached_pages=scheduler.pool.num_idle,
            num_pages=scheduler.pool.num_pages,
            steps=counted.steps,
            prompt_tokens=counted.prompt_tokens,
            cached_tokens=counted.cached_tokens,
            completion_tokens=counted.completion_tokens,
            preemptions=counted.preemptions + scheduler.preemptions,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every row and page is accounted for."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Frees everything; the object is dead afterwards."""
        self._dismantle()
        if self._asleep is not None:
            self._asleep.forget()
        del self._loaded, self._asleep
        self._give_back()

    def _give_back(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _trimmed(logprobs: TokenLogprobs, request: EngineRequest) -> TokenLogprobs:
    """As many alternatives as this request asked for; the batch may have asked for more."""
    count = request.sampling.top_logprobs or 0
    return TokenLogprobs(logprobs.logprob, logprobs.top_ids[:count], logprobs.top_logprobs[:count])
