"""Random traces of a scheduler whose model folds its tokens into a state. The state of a row must always be the fold of
exactly its own tokens, whatever was saved, evicted, preempted, cancelled or retracted before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.neuron.engine.scheduling.folding_device import VOCAB, FoldingDevice, Tokens, next_token
from tests.neuron.engine.scheduling.planned_steps import TOKEN_S, read, token_costs

from cortex.neuron.engine.kv.page_groups import KVPages
from cortex.neuron.engine.kv.recurrent_checkpoints import RecurrentCheckpoints
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.scheduling.budget import SchedulerLimits
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.step_plan import RowPlan

TENANTS = st.sampled_from([b"", b"", b"of one tenant...", b"of another one.."])


class Trace(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(6, 14),
        page_tokens=st.integers(1, 4),
        max_rows=st.integers(1, 3),
        step_tokens=st.integers(4, 12),
        num_slots=st.integers(0, 5),
        spacing=st.integers(0, 8),
        response_tokens=st.integers(1, 8),
        late=st.booleans(),
        cuts_rows=st.booleans(),
    )
    def begin(
        self,
        num_pages: int,
        page_tokens: int,
        max_rows: int,
        step_tokens: int,
        num_slots: int,
        spacing: int,
        response_tokens: int,
        late: bool,
        cuts_rows: bool,
    ) -> None:
        self.limits = SchedulerLimits(
            max_rows, step_tokens, step_tokens // 2 * TOKEN_S, context_tokens=num_pages * page_tokens
        )
        slots = max_rows + 1, num_slots
        self.checkpoints = RecurrentCheckpoints(*slots, spacing, response_tokens, cuts_rows=cuts_rows)
        self.scheduler = Scheduler(
            KVPages({None: num_pages + 1}, page_tokens), self.limits, token_costs(), self.checkpoints
        )
        self.device = FoldingDevice(page_tokens)
        self.late = late
        self.live: dict[str, Sequence] = {}
        self.in_flight: deque[list[tuple[Sequence, RowPlan, tuple[int, ...]]]] = deque()
        self.conversations: list[Tokens] = [()]
        self.prompts: list[Tokens] = []
        self.num_submitted = 0

    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        turns=st.lists(st.integers(0, 40), max_size=3),
        tenant=TENANTS,
    )
    def next_turn(self, data: st.DataObject, more: list[int], max_tokens: int, turns: list[int], tenant: bytes) -> None:
        """A request that continues an earlier conversation."""
        max_tokens = min(max_tokens, self.limits.context_tokens // 2)
        prompt = (*data.draw(st.sampled_from(self.conversations)), *more)[: self.limits.context_tokens - max_tokens]
        self.num_submitted += 1
        self.prompts.append(prompt)
        name, turn_ends = str(self.num_submitted), tuple(turns)
        request = EngineRequest(name, prompt, max_tokens, checkpoint_at=turn_ends, tenant=tenant)
        self.live[request.id] = self.scheduler.add(request)

    @rule(data=st.data(), max_tokens=st.integers(1, 3), tenant=TENANTS)
    @precondition(lambda self: self.prompts)
    def same_prompt(self, data: st.DataObject, max_tokens: int, tenant: bytes) -> None:
        """A request that came before, perhaps of another tenant."""
        prompt = data.draw(st.sampled_from(self.prompts))
        max_tokens = min(max_tokens, self.limits.context_tokens - len(prompt))
        self.num_submitted += 1
        request = EngineRequest(str(self.num_submitted), prompt, max_tokens, tenant=tenant)
        self.live[request.id] = self.scheduler.add(request)

    @rule(drafted=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), min_size=3, max_size=3))
    def step_with_drafts(self, drafted: list[list[int]]) -> None:
        """Some draft tokens are right, and some wrong."""
        while self.in_flight:
            self._collect()
        guesses = {}
        for sequence, tokens in zip(self.scheduler.running, drafted, strict=False):
            past = tuple(sequence.tokens)
            for token in tokens:
                past = (*past, next_token(past) if token else token)
            guesses[sequence.request.id] = past[len(sequence.tokens) :]
        self._step(guesses)

    @rule()
    def step(self) -> None:
        self._step({})

    def _step(self, drafted: Mapping[str, tuple[int, ...]]) -> None:
        if any(row.drafted for step in self.in_flight for _, row, _ in step):
            self._collect()
        plan = self.scheduler.plan(drafted)
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
        assert sequence.tail is None or not self.checkpoints.knows(sequence.tail)
        self._end(sequence)

    def _collect(self) -> None:
        for sequence, row, tokens in self.in_flight.popleft():
            if sequence.request.id not in self.live:
                continue
            for number, token in enumerate(tokens):
                past = (*sequence.tokens, *tokens[:number])
                assert token == next_token(past), "a token was drawn from another history"
            read(self.scheduler, sequence, row, tokens)
            if len(sequence.tokens) == len(sequence.request.prompt) + sequence.request.max_tokens:
                self.conversations.append(tuple(sequence.tokens))
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
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
