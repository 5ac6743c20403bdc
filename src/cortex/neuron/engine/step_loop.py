"""Runs the requests of a model that is awake, step by step: plan, launch, collect, report."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import asdict, dataclass, replace
from functools import partial

from cortex.neuron.engine.active_request import ActiveRequest, draws_of, packed_tokens
from cortex.neuron.engine.errors import FaultyRequest, RequestError
from cortex.neuron.engine.execution.results import Launched, RowResult
from cortex.neuron.engine.execution.runner import NewMask, Runner
from cortex.neuron.engine.host_pages.rates import prompt_s
from cortex.neuron.engine.host_pages.tier import HostTier
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.request import Counters, EngineRequest, EngineStats, SamplingParams, StepOutput
from cortex.neuron.engine.sampling.constraints import Constraint, Constraints
from cortex.neuron.engine.sampling.sampler import Draw, GrammarMask
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.scheduling.step_plan import RowPlan, StepPlan, step_shape
from cortex.neuron.engine.speculation.speculation import Speculation
from cortex.neuron.engine.speculation.width_rule import StepTime

PRICED_TOKENS = 1024
"""The prompt length for which the time per token is reported."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step, and its rows with their requests."""

    launched: Launched
    plan: StepPlan
    rows: Ordered[tuple[ActiveRequest, RowPlan]]
    checks_drafts: bool
    follows: bool
    """See `StepTime`."""
    launched_at: float
    """When the host began to launch it."""


class StepLoop:
    """Owns the requests of one engine from their submission to their last output. Belongs to the engine thread.

    Each fact has one writer: this loop writes a request's content (`ActiveRequest`), the scheduler its place
    (`Sequence`), and the speculation its drafts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        constraints: Constraints,
        counters: Counters,
        speculation: Speculation,
        *,
        overlaps: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`overlaps`: a step is launched before the host reads the previous one, as a GPU needs to stay busy. `clock`:
        seconds."""
        self._clock = clock
        self._speculation = speculation
        self._scheduler = scheduler
        self._runner = runner
        self._constraints = constraints
        self._counters = counters
        self._overlaps = overlaps
        self.host: HostTier | None = None
        """Pages outside of the device; None if they are not kept."""
        self._active: dict[str, ActiveRequest] = {}
        """By the id of the request, whether or not it has been admitted."""
        self._constrained: set[str] = set()
        """Requests with a grammar: a step that draws for one is planned only when all earlier tokens are read."""
        self._in_flight: deque[_InFlight] = deque()
        self._read_at: float | None = None
        """When the latest step was read, if the device has been busy since."""
        self._outputs: list[StepOutput] = []
        self._failed: tuple[ActiveRequest, ...] = ()
        """The requests of the step that raised last."""
        self._is_reading = False
        """Whether the previous step is being read while another is launched."""
        self._suspects: deque[ActiveRequest] = deque()
        """Requests to compute one at a time, in order."""

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Raises RequestError if the request can never be served."""
        if request.texts is not None:
            raise RequestError("this model generates text and pools none; use an embedding or rerank model")
        vocab = self._runner.model.config.vocab
        if request.id in self._active:
            raise RequestError(f"request id {request.id!r} is already running")
        packed = packed_tokens("prompt", request.prompt, vocab)
        packed_tokens("prediction", request.prediction, vocab)
        request.sampling.check()
        allowed = request.sampling.allowed_token_ids
        if allowed and not any(0 <= token < vocab for token in allowed):
            raise RequestError(f"none of the allowed token ids is in the model's vocabulary of {vocab}")
        grammar = request.grammar
        constraint = None if grammar is None else self._constraints.compile(grammar, request.tenant, allowed)
        tokens = list(request.prompt)
        sequence = self._scheduler.add(request, tokens, packed)
        if self._runner.pictures is not None:
            self._runner.pictures.add(request.pictures)
        self._speculation.begin(request, tokens, constraint)
        self._active[request.id] = ActiveRequest(request, tokens, sequence, constraint)
        if constraint is not None:
            self._constrained.add(request.id)

    def cancel(self, request_id: str) -> None:
        """Ends a request and frees what it holds at once. Unknown ids are ignored."""
        active = self._active.get(request_id)
        if active is not None:
            self._finish(active, StepOutput(request_id, finish="cancelled"))

    @property
    def has_work(self) -> bool:
        return bool(self._active or self._in_flight or self._outputs)

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Launches the next step and reports the latest finished one: the previous one if steps overlap, else the same.

        Raises FaultyRequest if one request is known to be at fault, and anything else that a step may raise."""
        self._failed = ()
        if self.host is not None:
            self.host.collect()
        if self._must_read_first():
            self._collect_all()
        plan = self._plan()
        if plan is not None:
            self._launch(self._with_proposals(plan))
        elif not self._in_flight:
            self._read_at = None
            if self.host is not None:
                self.host.await_fetches()
        if self._in_flight and (not self._overlaps or plan is None or len(self._in_flight) > 1):
            self._collect(self._in_flight.popleft())
        outputs, self._outputs = self._outputs, []
        return outputs

    def _must_read_first(self) -> bool:
        """Whether the next step depends on the tokens of those in flight."""
        if not self._in_flight:
            return False
        scheduler = self._scheduler
        if self._suspects or any(step.checks_drafts or step.plan.num_proposals for step in self._in_flight):
            return True
        if not self._speculation.is_on:
            return False
        return self._speculation.is_likely(scheduler.decoding, is_mixed=scheduler.is_prefilling)

    def prepare(self) -> bool:
        """Builds one more graph or plan for later steps, or copies pages to host memory; false if nothing is left."""
        has_built = self._runner.prepare()
        if has_built:
            self._speculation.rule.forget()
        return has_built or (self.host is not None and self.host.copy_while_idle())

    def keep_pages(self, new_tier: Callable[[Scheduler], HostTier]) -> None:
        """Enables copies of pages to host memory."""
        self.host = new_tier(self._scheduler)
        self._scheduler.use_offloaded(self.host)

    def end_copies(self) -> None:
        """Waits for the copies of pages: the device memory is about to be freed."""
        if self.host is not None:
            self.host.collect(wait=True)

    def forget(self, is_chosen: Callable[[Digest], bool]) -> None:
        """Drops the device's cached pages of these prefixes. Running requests keep theirs."""
        self.end_copies()
        self._scheduler.forget(is_chosen)

    def save_pages(self, *, to_disk: bool) -> bool:
        """Copies pages that are not in host memory yet. There must be no work. See `HostTier.save`."""
        return self.host is not None and self.host.save(to_disk=to_disk)

    def prepare_first(self) -> None:
        """Builds what a short prompt and its response need."""
        self._runner.prepare_first()

    def self_test(self) -> tuple[int, ...]:
        """The greedy response to a fixed short prompt; not counted. There must be no work."""
        counters = self._counters
        request = self._self_test_request()
        self.add(request)
        tokens: list[int] = []
        try:
            while self.has_work:
                for output in self.step():
                    tokens += output.tokens
        except BaseException:
            self.cancel(request.id)
            self._outputs.clear()
            raise
        finally:
            self._counters = counters
        return tuple(tokens)

    def _self_test_request(self) -> EngineRequest:
        token = min(1, self._runner.model.config.vocab - 1)
        prompt = (token,) * min(4, self._scheduler.limits.context_tokens - 2)
        return EngineRequest("self-test", prompt, max_tokens=2, sampling=SamplingParams(temperature=0.0))

    def isolate(self) -> bool:
        """After a step that raised for an unknown reason: computes the requests of that step one at a time, until each
        has drawn a token, so that the one at fault is blamed alone. False: the requests of that step are not known.

        A self-test comes first. If it raises, the model is at fault and no request is; nothing is isolated then.
        """
        suspects, self._failed = self._failed, ()
        if not suspects:
            return False
        self._collect_all()
        sequence = self._scheduler.add(self._self_test_request())
        try:
            plan = self._scheduler.plan_alone(sequence)
            if plan is not None:
                self._launched(plan, [Draw(sequence.row, 0)]).read()
        finally:
            self._scheduler.drop(sequence)
        self._suspects.extend(suspects)
        return True

    def _plan(self) -> StepPlan | None:
        """While there are suspects, a step of the first one; a suspect that cannot be computed alone now rejoins."""
        may_draft = not self._in_flight and not self._suspects
        while self._suspects:
            suspect = self._suspects[0]
            plan = None if suspect.is_finished else self._scheduler.plan_alone(suspect.sequence)
            if plan is not None:
                return plan
            self._suspects.popleft()
        scheduler = self._scheduler
        if may_draft:
            return scheduler.plan(self._speculation.draft(scheduler.decoding, is_mixed=scheduler.is_prefilling))
        return scheduler.plan()

    def _with_proposals(self, plan: StepPlan) -> StepPlan:
        """The plan with its number of draft tokens to compute."""
        if not self._speculation.proposes:
            return plan
        planned = {row.row: row for row in plan.rows if row.decodes}
        running = self._scheduler.running
        decoding = [(sequence, planned[sequence.row]) for sequence in running if sequence.row in planned]
        count = self._speculation.num_proposals(decoding, is_mixed=not plan.only_decodes)
        return plan if count is None else replace(plan, num_proposals=count)

    def _launch(self, plan: StepPlan) -> None:
        by_row = {sequence.row: sequence.request.id for sequence in self._scheduler.running}
        rows = [(self._active[by_row[row.row]], row) for row in plan.rows]
        drawing = [(active, row) for active, row in rows if row.outputs.draws]
        checks_drafts = plan.has_drafts
        draws = [draw for active, row in drawing for draw in draws_of(active.request, row)]
        follows, launched_at = bool(self._in_flight) or not self._overlaps, self._clock()
        mask = None
        try:
            if self._constrained and any(active.constraint is not None for active, _ in drawing):
                mask = partial(self._mask, drawing)
            launched = self._launched(plan, draws, mask)
        except Exception as error:
            self._scheduler.retract(plan)
            if self._suspects and not isinstance(error, FaultyRequest):
                raise FaultyRequest(self._suspects[0].request.id) from error
            # An error in the step before is none of these requests' faults.
            self._failed = () if self._is_reading else tuple(active for active, _ in rows)
            self._is_reading = False
            raise
        if self._suspects and drawing:
            self._suspects.popleft()
        if self.host is not None:
            self.host.after_launch()
        self._in_flight.append(_InFlight(launched, plan, rows, checks_drafts, follows, launched_at))
        num_prompt_tokens = sum([row.inputs.count for row in plan.rows if not row.decodes])
        self._counters = self._counters.plus(Counters(steps=1, prompt_tokens=num_prompt_tokens))

    def _launched(self, plan: StepPlan, draws: Ordered[Draw], mask: NewMask | None = None) -> Launched:
        """Launches a step after the copies to host memory of what it overwrites."""
        if self.host is not None:
            self.host.before_launch(plan)
        return self._runner.launch(plan, draws, mask)

    def _mask(self, drawing: Ordered[tuple[ActiveRequest, RowPlan]]) -> GrammarMask | None:
        """The tokens that the rows of a step may draw. Called while the device computes the step: reads the previous
        step's tokens first, so the device waits only if it finishes earlier."""
        self._is_reading = True
        self._collect_all()
        self._is_reading = False
        return self._constraints.mask(
            [(None if active.is_finished else active.constraint, row.drafted) for active, row in drawing]
        )

    def _collect_all(self) -> None:
        while self._in_flight:
            self._collect(self._in_flight.popleft())

    def _time(self, step: _InFlight) -> None:
        """Reports how long a step took: the time since the step before it was read, or since its own launch."""
        now, costs = self._clock(), self._scheduler.costs
        began = step.launched_at if self._read_at is None else max(self._read_at, step.launched_at)
        costs.record(step_shape(step.plan.rows, costs.work), now - began)
        if self._read_at is not None and step.plan.only_decodes:
            took = StepTime(
                num_rows=len(step.rows),
                num_tokens=step.plan.num_tokens,
                seconds=now - self._read_at,
                checks_drafts=step.checks_drafts,
                num_proposals=step.plan.num_proposals or 0,
                follows=step.follows,
            )
            self._speculation.rule.record(took)
        self._read_at = now

    def _match(self, step: _InFlight, results: Ordered[RowResult]) -> None:
        """Matches the first tokens of all rows with a grammar at once."""
        drawn = [
            (active.constraint, result.tokens[0])
            for (active, _), result in zip(step.rows, results, strict=True)
            if active.constraint is not None and not active.is_finished and result.healthy and result.tokens
        ]
        Constraint.accept_all(drawn)

    def _collect(self, step: _InFlight) -> None:
        results = step.launched.read()
        self._time(step)
        if self._constrained:
            self._match(step, results)
        num_tokens = num_cached = 0
        drafted: Counter[str] = Counter()
        accepted: Counter[str] = Counter()
        for (active, row), result in zip(step.rows, results, strict=True):
            if active.is_finished:
                continue  # ended after this step was launched
            if scores := result.prompt_logprobs:
                active.prompt_logprobs[row.start : row.start + len(scores)] = scores  # again after a preemption
            if not result.healthy:
                self._scheduler.distrust(active.sequence)
                message = "the model computed logits that are not finite for this prompt; the request was ended"
                self._finish(active, StepOutput(active.request.id, finish="error", error=message))
                continue
            tokens, finish = active.until_end(result.tokens)
            active.tokens += tokens
            self._scheduler.row_read(active.sequence, row, len(tokens))
            checked = self._speculation.read(active.request.id, row, tokens, result.proposed)
            if checked.num_drafted:
                drafted[checked.kind] += checked.num_drafted
                accepted[checked.kind] += checked.num_accepted
            if tokens:
                num_tokens += len(tokens)
                output = active.output(tokens, finish, result.logprobs[: len(tokens)], checked)
                num_cached += output.cached_tokens or 0
                if finish is None:
                    self._outputs.append(output)
                else:
                    self._finish(active, output)
        self._counters = self._counters.plus(
            Counters(
                completion_tokens=num_tokens,
                cached_tokens=num_cached,
                drafted_tokens=drafted,
                accepted_tokens=accepted,
            )
        )

    def _finish(self, active: ActiveRequest, last: StepOutput) -> None:
        active.is_finished = True
        request = active.request
        if self._runner.pictures is not None:
            self._runner.pictures.remove(request.pictures)
        self._scheduler.drop(active.sequence)
        self._speculation.end(request.id)
        self._constrained.discard(request.id)
        del self._active[request.id]
        self._outputs.append(last)

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """This loop's work, and that of the loops before it."""
        num_fetched = 0 if self.host is None else self.host.num_fetched_tokens
        return self._counters.plus(Counters(preemptions=self._scheduler.preemptions, fetched_tokens=num_fetched))

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_pages=scheduler.pages.num_held,
            cached_pages=scheduler.pages.num_idle,
            num_pages=scheduler.pages.num_pages,
            prompt_token_s=prompt_s(scheduler.costs, scheduler.limits.step_tokens, 0, PRICED_TOKENS)
            / scheduler.costs.work.prompt_worth(0, PRICED_TOKENS),
            **asdict(self._runner.graph_costs),
            **asdict(self.counters),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every row and page is accounted for."""
        incoming = () if self.host is None else (self.host.incoming, self.host.incoming_states)
        self._scheduler.check_integrity(*incoming)
