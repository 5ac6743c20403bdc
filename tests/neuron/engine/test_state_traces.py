"""Random traces of a scheduler whose model folds its tokens into a state. The state of a row must always be the fold of
exactly its own tokens, whatever was saved, evicted, preempted, cancelled or retracted before."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cortex.neuron.engine.kv_pages import KVPages
from cortex.neuron.engine.recurrent_checkpoints import RecurrentCheckpoints
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.scheduler import Scheduler, SchedulerLimits
from cortex.neuron.engine.sequence import Sequence
from cortex.neuron.engine.speculation.drafter import Draft
from cortex.neuron.engine.step_plan import RowPlan, StepPlan

VOCAB = 3
Tokens = tuple[int, ...]
GARBAGE: Tokens = (-1,)


def next_token(past: Tokens) -> int:
    return hash(("next", past)) % VOCAB


class FoldingDevice:
    """The state of a prefix is the prefix itself, so that every mix-up shows."""

    def __init__(self) -> None:
        self.slots: dict[int, Tokens] = {}
        self.last_tokens: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> list[tuple[int, ...]]:
        """The tokens that each row drew."""
        for saved, restored in plan.restores:
            self.slots[restored] = self.slots[saved]
        drawn = []
        for row in plan.rows:
            past = self.slots[row.row] if row.start else ()
            assert len(past) == row.start, "a row goes on from the state of another position"
            assert row.writes, "a state cannot take in a token twice"
            tokens = (self.last_tokens[row.row],) if row.inputs.tokens is None else row.inputs.tokens
            past = self.slots[row.row] = past + tokens
            self.last_tokens[row.row] = next_token(past)
            ends = range(len(past) - row.outputs.draws + 1, len(past) + 1)
            given = tuple(next_token(past[:end]) for end in ends)
            drawn.append(given[: row.num_accepted(given)])
        for source, slot in plan.saves:
            self.slots[slot] = self.slots[source]
        return drawn

    def fail(self, plan: StepPlan) -> None:
        """A failed step: everything that it was to write is garbage."""
        for slot in [*(row.row for row in plan.rows), *(slot for _, slot in (*plan.restores, *plan.saves))]:
            self.slots[slot] = GARBAGE


class Trace(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(6, 14),
        page_tokens=st.integers(1, 4),
        max_rows=st.integers(1, 3),
        step_tokens=st.integers(4, 12),
        num_slots=st.integers(0, 5),
        spacing=st.integers(0, 8),
        late=st.booleans(),
    )
    def begin(
        self,
        num_pages: int,
        page_tokens: int,
        max_rows: int,
        step_tokens: int,
        num_slots: int,
        spacing: int,
        late: bool,
    ) -> None:
        self.limits = SchedulerLimits(max_rows, step_tokens, step_tokens // 2, context_tokens=num_pages * page_tokens)
        self.checkpoints = RecurrentCheckpoints(max_rows + 1, num_slots, spacing)
        self.scheduler = Scheduler(KVPages({None: num_pages + 1}, page_tokens), self.limits, self.checkpoints)
        self.device = FoldingDevice()
        self.late = late
        self.live: dict[str, Sequence] = {}
        self.in_flight: deque[list[tuple[Sequence, RowPlan, tuple[int, ...]]]] = deque()
        self.conversations: list[Tokens] = [()]
        self.num_submitted = 0

    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        turns=st.lists(st.integers(0, 40), max_size=3),
    )
    def next_turn(self, data: st.DataObject, more: list[int], max_tokens: int, turns: list[int]) -> None:
        """A request that continues an earlier conversation."""
        max_tokens = min(max_tokens, self.limits.context_tokens // 2)
        prompt = (*data.draw(st.sampled_from(self.conversations)), *more)[: self.limits.context_tokens - max_tokens]
        self.num_submitted += 1
        request = EngineRequest(str(self.num_submitted), prompt, max_tokens, checkpoint_at=tuple(turns))
        self.live[request.id] = self.scheduler.submit(request)

    @rule(drafted=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), min_size=3, max_size=3))
    def step_with_drafts(self, drafted: list[list[int]]) -> None:
        """Some draft tokens are right, and some wrong."""
        while self.in_flight:
            self._collect()
        for sequence, tokens in zip(self.scheduler.running, drafted, strict=False):
            past = tuple(sequence.tokens)
            for token in tokens:
                past = (*past, next_token(past) if token else token)
            guesses = past[len(sequence.tokens) :]
            sequence.draft = Draft(guesses, (1.0,) * len(guesses), "lookup")
        self.step()

    @rule()
    def step(self) -> None:
        if any(row.drafted for step in self.in_flight for _, row, _ in step):
            self._collect()
        plan = self.scheduler.plan()
        if plan is not None:
            assert plan.num_tokens <= self.limits.step_tokens
            by_row = {sequence.row: sequence for sequence in self.scheduler.running}
            drawn = zip(plan.rows, self.device.launch(plan), strict=True)
            self.in_flight.append([(by_row[row.row], row, tokens) for row, tokens in drawn])
        if self.in_flight and (not self.late or plan is None or len(self.in_flight) > 1):
            self._collect()

    @rule()
    def a_step_fails(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.device.fail(plan)
            self.scheduler.retract(plan)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def cancel(self, data: st.DataObject) -> None:
        self._end(self.live[data.draw(st.sampled_from(sorted(self.live)))])

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def a_result_is_not_finite(self, data: st.DataObject) -> None:
        sequence = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.scheduler.distrust(sequence)
        assert not any(map(self.checkpoints.knows, sequence.digests))
        self._end(sequence)

    def _collect(self) -> None:
        for sequence, row, tokens in self.in_flight.popleft():
            if sequence.finished:
                continue
            for number, token in enumerate(tokens):
                past = (*sequence.tokens, *tokens[:number])
                assert token == next_token(past), "a token was drawn from another history"
            self.scheduler.row_read(sequence, row, tokens)
            if len(sequence.tokens) == len(sequence.request.prompt) + sequence.request.max_tokens:
                self.conversations.append(tuple(sequence.tokens))
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.finished = True
        self.scheduler.drop(sequence)
        del self.live[sequence.request.id]

    @invariant()
    def whole(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        for _ in range(1000):
            if not self.live and not self.in_flight:
                break
            self.step()
        else:
            raise AssertionError("requests are left that never end")


TestTrace = Trace.TestCase
TestTrace.settings = settings(stateful_step_count=30)


def run(scheduler: Scheduler, device: FoldingDevice, request: EngineRequest) -> tuple[Sequence, list[StepPlan]]:
    """One request alone, to its end."""
    sequence, plans = scheduler.submit(request), []
    while len(sequence.tokens) < len(request.prompt) + request.max_tokens:
        plan = scheduler.plan()
        assert plan is not None
        plans.append(plan)
        for row, tokens in zip(plan.rows, device.launch(plan), strict=True):
            scheduler.row_read(sequence, row, tokens)
    sequence.finished = True
    scheduler.drop(sequence)
    scheduler.check_integrity()
    return sequence, plans


def conversation(num_slots: int = 8) -> tuple[Scheduler, FoldingDevice]:
    limits = SchedulerLimits(max_rows=2, step_tokens=100, mixed_prefill_tokens=100, context_tokens=400)
    return Scheduler(KVPages({None: 101}, 4), limits, RecurrentCheckpoints(3, num_slots)), FoldingDevice()


def test_next_turn_continues_from_the_end_of_the_last_response() -> None:
    scheduler, device = conversation()
    first, plans = run(scheduler, device, EngineRequest("1", (1,) * 21, max_tokens=12))
    assert first.cached == 0
    assert [row.count for plan in plans for row in plan.rows if row.inputs.tokens is not None] == [20, 1]
    second, _ = run(scheduler, device, EngineRequest("2", (*first.tokens, 2, 2), max_tokens=3))
    assert second.cached == 32  # the last token drawn is not computed: 21 + 12 − 1 positions, whole pages


def test_next_turn_that_rewrites_the_last_one_continues_from_the_turn_before() -> None:
    scheduler, device = conversation()
    first, plans = run(scheduler, device, EngineRequest("1", (1,) * 41, max_tokens=2, checkpoint_at=(9, 30)))
    assert [row.count for plan in plans for row in plan.rows if row.inputs.tokens is not None] == [8, 20, 12, 1]
    again, _ = run(scheduler, device, EngineRequest("2", (*first.tokens[:31], 2, 2, 2), max_tokens=1))
    assert again.cached == 28
    other, _ = run(scheduler, device, EngineRequest("3", (*first.tokens[:15], 0, 0, 0), max_tokens=1))
    assert other.cached == 8


def test_repeated_prompt_is_computed_from_its_last_page_end() -> None:
    scheduler, device = conversation()
    for length, cached in ((32, 28), (33, 32), (35, 32)):
        run(scheduler, device, EngineRequest("1", (length % VOCAB,) * length, max_tokens=1))
        again, plans = run(scheduler, device, EngineRequest("2", (length % VOCAB,) * length, max_tokens=1))
        assert again.cached == cached
        assert len(plans) == 1


def test_prompt_that_ends_at_a_checkpoint_cannot_use_it() -> None:
    """Its last token must be computed, and the state already includes it."""
    scheduler, device = conversation()
    run(scheduler, device, EngineRequest("1", (1,) * 41, max_tokens=1, checkpoint_at=(20,)))
    shorter, _ = run(scheduler, device, EngineRequest("2", (1,) * 40, max_tokens=1))
    assert shorter.cached == 20


def test_without_slots_nothing_is_reused_and_no_chunk_is_split() -> None:
    scheduler, device = conversation(num_slots=0)
    request = EngineRequest("1", (1,) * 41, max_tokens=8, checkpoint_at=(9, 30))
    for _ in range(2):
        sequence, plans = run(scheduler, device, request)
        assert sequence.cached == 0
        assert plans[0].num_tokens == 41
