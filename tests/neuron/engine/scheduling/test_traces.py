"""Random traces of a scheduler over a device that records the content of every slot of every page.

The device is a stand-in for a greedy model: the next token is a function of everything before it. So whatever was
batched, shared, preempted, cancelled or retracted, every request must end with the tokens that it gets alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cortex.neuron.engine.kv.page_groups import IncomingPages, KVPages, Window, window_pages
from cortex.neuron.engine.kv.pages import PADDING_PAGE
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.scheduling.budget import STREAM_SHARE, SchedulerLimits
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.scheduling.sequence import NO_ROW, Sequence
from cortex.neuron.engine.scheduling.step_plan import RowPlan, StepPlan
from cortex.system.fair_turns import IDLE, PRIORITY

from .planned_steps import TOKEN_S, read, token_costs

VOCAB = 3
"""Few tokens, so that requests also share prefixes by chance."""
TENANTS = st.sampled_from([b"", b"", b"of one tenant...", b"of another one.."])

History = int
"""A digest of the tenant and of tokens up to a position: the only KV that may be read at that position."""


def histories(tokens: Ordered[int], tenant: bytes) -> list[History]:
    digests, past = [], int.from_bytes(tenant)
    for token in tokens:
        past = hash((past, token))
        digests.append(past)
    return digests


def next_token(history: History) -> int:
    return hash((history, "next")) % VOCAB


def continuation(request: EngineRequest) -> list[int]:
    """The response to the request alone."""
    tokens = list(request.prompt)
    for _ in range(request.max_tokens):
        tokens.append(next_token(histories(tokens, request.tenant)[-1]))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[len(request.prompt) :]


Slot = tuple[int, int, int]
"""(group, page, position within the page)"""


class Device:
    """Runs plans like the worst real device: every row reads the pages as they were before the step."""

    def __init__(self, page_tokens: int, windows: Ordered[Window]) -> None:
        self._page_tokens = page_tokens
        self._windows = windows
        self._slots: dict[Slot, History] = {}
        self._tables: dict[tuple[int, int], dict[int, int]] = {}
        """By row and group: the page at each index."""
        self._last_tokens: dict[int, int] = {}
        self._tenants: dict[int, bytes] = {}

    def launch(self, plan: StepPlan, truth: dict[int, list[int]]) -> list[tuple[int, ...]]:
        """The tokens that each row drew. `truth`: of each row in the plan, its tokens so far."""
        self._extend_tables(plan)
        self._copy_pages(plan)
        written: set[Slot] = set()
        for row in plan.rows:
            for slot in self._written(row):
                assert slot not in written, "two rows write the same slot"
                written.add(slot)
        results = [self._compute(row, truth[row.row], written) for row in plan.rows]
        drawn = []
        for row, past in zip(plan.rows, results, strict=True):
            own = past[row.start : row.start + row.count]
            self._slots.update(zip(self._written(row), own * len(self._windows), strict=False))
            self._last_tokens[row.row] = next_token(own[-1])
            tokens = tuple(map(next_token, own[row.count - row.outputs.draws :]))
            drawn.append(tokens[: row.num_accepted(tokens)])
        return drawn

    def fail(self, plan: StepPlan) -> None:
        """A step that failed half-way: everything that it was to write is garbage."""
        self._extend_tables(plan)
        for group, _, page in plan.page_copies:
            self._slots.update({(group, page, place): -1 for place in range(self._page_tokens)})
        for row in plan.rows:
            self._slots.update(dict.fromkeys(self._written(row), -1))

    def overwrite(self, group: int, page: int, past: Ordered[History]) -> None:
        """A page is copied from elsewhere."""
        self._slots.update({(group, page, place): each for place, each in enumerate(past)})

    def _written(self, row: RowPlan) -> list[Slot]:
        if not row.writes:
            return []
        own = range(row.start, row.start + row.count)
        return [self._slot(group, row.row, position) for group in range(len(self._windows)) for position in own]

    def _compute(self, row: RowPlan, truth: list[int], written: set[Slot]) -> list[History]:
        own = range(row.start, row.start + row.count)
        tokens = [self._last_tokens[row.row]] if row.inputs.tokens is None else list(row.inputs.tokens)
        num_drafted = len(row.drafted)
        past = histories([*truth[: row.start], *tokens], self._tenants[row.row])
        known = tokens[: row.count - num_drafted]
        assert known == truth[row.start : row.start + len(known)], "a row computes tokens that are not its own"
        draws = own.stop - num_drafted == len(truth)
        assert row.outputs.draws == draws + num_drafted, "a row draws if and only if it computes its last token"
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, row.start + 1 - window)
            for position in range(first, own.stop if not row.writes else row.start):
                slot = self._slot(group, row.row, position)
                assert slot not in written, "a row reads what another writes in the same step"
                assert self._slots[slot] == past[position], "a row attends to another history than its own"
        return past

    def _extend_tables(self, plan: StepPlan) -> None:
        for row, request, _ in plan.new_rows:
            self._last_tokens.pop(row, None)
            self._tenants[row] = request.tenant
            for group in range(len(self._windows)):
                self._tables[row, group] = {}
        for row, group, first, pages in plan.new_pages:
            table = self._tables[row, group]
            assert not table or max(table) == first - 1, "pages do not follow on the row's table"
            table.update(enumerate(pages, first))

    def _copy_pages(self, plan: StepPlan) -> None:
        sources, targets = ([(group, pages[which]) for group, *pages in plan.page_copies] for which in (0, 1))
        assert set(sources).isdisjoint(targets), "a page is copied and overwritten at once"
        assert len(set(targets)) == len(targets)
        for (group, source), (_, target) in zip(sources, targets, strict=True):
            for place in range(self._page_tokens):
                self._slots[group, target, place] = self._slots.get((group, source, place), -1)

    def _slot(self, group: int, row: int, position: int) -> Slot:
        page = self._tables[row, group][position // self._page_tokens]
        assert page != PADDING_PAGE
        return group, page, position % self._page_tokens


class Trace(RuleBasedStateMachine):
    """Submits, steps, collects, cancels and breaks steps, in any order, over few pages."""

    @initialize(
        num_pages=st.integers(4, 12),
        page_tokens=st.integers(1, 4),
        max_rows=st.integers(1, 4),
        step_tokens=st.integers(4, 12),
        mixed=st.integers(1, 6),
        reserved=st.integers(0, 12),
        late=st.booleans(),
        windows=st.sampled_from([(None,), (None,), (None, 3), (None, 7, 1), (5,), (9, 4)]),
        spare=st.integers(0, 6),
    )
    def begin(
        self,
        num_pages: int,
        page_tokens: int,
        max_rows: int,
        step_tokens: int,
        mixed: int,
        reserved: int,
        late: bool,
        windows: tuple[Window, ...],
        spare: int,
    ) -> None:
        """`spare`: pages in the groups with a window besides those that one sequence needs."""
        self.limits = SchedulerLimits(
            max_rows=max_rows,
            step_tokens=step_tokens,
            step_s=(min(mixed, step_tokens) + 0.5) * TOKEN_S,
            context_tokens=num_pages * page_tokens,
            reserved_tokens=reserved,
        )
        counts = {
            window: 1 + (num_pages if window is None else min(num_pages, window_pages(window, page_tokens) + spare))
            for window in windows
        }
        self.scheduler = Scheduler(KVPages(counts, page_tokens), self.limits, token_costs())
        self.device = Device(page_tokens, windows)
        self.late = late
        """Steps are collected after the next one is launched, as on a GPU."""
        self.incoming: list[IncomingPages] = []
        """What is being fetched."""
        self.live: dict[str, Sequence] = {}
        self.truth: dict[str, list[int]] = {}
        self.in_flight: deque[list[tuple[Sequence, RowPlan, tuple[int, ...]]]] = deque()
        self.requests: list[EngineRequest] = []
        self.num_submitted = 0
        self._begun()

    def _begun(self) -> None:
        """For machines with more parts."""

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=6),
        max_tokens=st.integers(1, 10),
        stops=st.booleans(),
        principal=st.sampled_from(["", "ada", "bob"]),
        level=st.integers(IDLE, PRIORITY),
        tenant=TENANTS,
    )
    def submit(
        self,
        family: int,
        shared: int,
        own: list[int],
        max_tokens: int,
        stops: bool,
        principal: str,
        level: int,
        tenant: bytes,
    ) -> None:
        prefix = [(position * position + family) % VOCAB for position in range(shared)]
        prompt = tuple(prefix + own)[: self.limits.context_tokens - 1] or (family,)
        request = EngineRequest(
            str(self.num_submitted),
            prompt,
            max_tokens=min(max_tokens, self.limits.context_tokens - len(prompt)),
            stop_token_ids=(0,) if stops else (),
            principal=principal,
            level=level,
            tenant=tenant,
            transfer="t" * (shared % 2),
        )
        if request.max_tokens < 1:
            return
        self._add(request)

    @rule(data=st.data(), max_tokens=st.integers(1, 3), tenant=TENANTS)
    @precondition(lambda self: self.requests)
    def same_prompt(self, data: st.DataObject, max_tokens: int, tenant: bytes) -> None:
        """A prompt that came before, perhaps of another tenant."""
        earlier = data.draw(st.sampled_from(self.requests))
        max_tokens = min(max_tokens, self.limits.context_tokens - len(earlier.prompt))
        self._add(replace(earlier, id=str(self.num_submitted), max_tokens=max_tokens, tenant=tenant))

    def _add(self, request: EngineRequest) -> None:
        self.num_submitted += 1
        self.requests.append(request)
        self.live[request.id] = self.scheduler.add(request)
        self.truth[request.id] = list(request.prompt)

    @rule(drafted=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=4), min_size=4, max_size=4))
    def step_with_drafts(self, drafted: list[list[int]]) -> None:
        """Some draft tokens are right, and some wrong."""
        while self.in_flight:
            self._collect()
        guesses = {}
        for sequence, tokens in zip(self.scheduler.running, drafted, strict=False):
            right = continuation(sequence.request)[len(sequence.tokens) - len(sequence.request.prompt) :]
            guesses[sequence.request.id] = (*right[: len(tokens)], *tokens)[: 2 * len(tokens)]
        self._step(guesses)

    @rule()
    def step(self) -> None:
        self._step({})

    def _step(self, drafted: Mapping[str, tuple[int, ...]]) -> None:
        if any(row.drafted for step in self.in_flight for _, row, _ in step):
            self._collect()
        plan = self._plan(drafted)
        if plan is not None:
            self._launch(plan)
        if self.in_flight and (not self.late or plan is None or len(self.in_flight) > 1):
            self._collect()

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self._end(self.live[name])

    @rule()
    def a_step_fails(self) -> None:
        plan = self._plan({})
        if plan is not None:
            self.device.fail(plan)
            self.scheduler.retract(plan)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def a_result_is_not_finite(self, data: st.DataObject) -> None:
        sequence = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.scheduler.distrust(sequence)
        page_tokens = self.scheduler.pages.page_tokens
        assert [*self.scheduler.pages.match(sequence.digests_of_full_pages(page_tokens))] == [0]
        self._end(sequence)

    @invariant()
    def state_is_consistent(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity(self.incoming)
            for sequence in self.live.values():
                rows = [row for step in self.in_flight for owner, row, _ in step if owner is sequence]
                assert sequence.planned == sum(row.count for row in rows), "positions in flight are miscounted"
                assert sequence.in_flight == sum(row.outputs.draws for row in rows)
                assert sequence.row != NO_ROW or sequence.computed == 0
                self._check_windows(sequence)
            assert len(self.scheduler.running) + len(self.scheduler.waiting) == len(self.live)

    def _check_windows(self, sequence: Sequence) -> None:
        """Besides a window, a sequence holds pages of the latest step only."""
        page_tokens = self.scheduler.pages.page_tokens
        for group, held in zip(self.scheduler.pages.groups, sequence.pages, strict=False):
            if group.window is not None:
                most = window_pages(group.window, page_tokens) + -(-self.limits.step_tokens // page_tokens)
                assert len(held.pages) <= most, "pages behind the window are held"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # The oldest sequence gains at least one token in a step, or in two if results are read late.
        tokens = sum(len(sequence.tokens) + sequence.request.max_tokens for sequence in self.live.values())
        steps = 0
        while self.live:
            self.step()
            self.state_is_consistent()
            steps += 1
            assert steps <= 4 * (tokens + 1) * (self.num_submitted + 1), "somebody starves"
        while self.in_flight:
            self._collect()
        assert self.scheduler.plan() is None
        assert self.scheduler.pages.num_held == 0, "a page was leaked"

    def _plan(self, drafted: Mapping[str, tuple[int, ...]]) -> StepPlan | None:
        plan = self.scheduler.plan(drafted)
        if plan is None:
            return None
        assert plan.rows
        assert plan.num_tokens <= self.limits.step_tokens, "over the step's budget"
        prefill = sum(row.count for row in plan.rows if not row.decodes)
        num_decodes = plan.num_tokens - prefill
        levels = {sequence.row: sequence.level for sequence in self.scheduler.running}
        is_awaited = any(levels[row.row] > IDLE for row in plan.rows)
        if num_decodes and prefill > 1 and is_awaited:
            allowed_s = max(self.limits.step_s, num_decodes * TOKEN_S / STREAM_SHARE)
            assert plan.num_tokens * TOKEN_S <= allowed_s + 1e-9, "prefill holds up the running streams"
        assert [row.count > 1 for row in plan.rows] == sorted(row.count > 1 for row in plan.rows)
        assert plan.num_singles == sum(row.count == 1 for row in plan.rows)
        assert max(Counter(row.row for row in plan.rows).values()) == 1
        return plan

    def _launch(self, plan: StepPlan) -> None:
        by_row = {sequence.row: sequence for sequence in self.scheduler.running}
        truth = {row.row: self.truth[by_row[row.row].request.id] for row in plan.rows}
        for new, request, drawn in plan.new_rows:
            assert by_row[new].request is request
            assert [*request.prompt, *drawn] == self.truth[request.id], "a row starts without its own past"
        step = []
        for row, tokens in zip(plan.rows, self.device.launch(plan, truth), strict=True):
            truth[row.row] += tokens
            step.append((by_row[row.row], row, tokens))
        self.in_flight.append(step)

    def _collect(self) -> None:
        for sequence, row, tokens in self.in_flight.popleft():
            if sequence.request.id not in self.live:
                continue
            request = sequence.request
            ends = [number for number, token in enumerate(tokens, start=1) if token in request.stop_token_ids]
            tokens = tokens[: min(ends, default=len(tokens))]
            read(self.scheduler, sequence, row, tokens)
            drawn = sequence.tokens[len(request.prompt) :]
            if not set(tokens).isdisjoint(request.stop_token_ids) or len(drawn) == request.max_tokens:
                assert drawn == continuation(request), "scheduling changed what a request gets"
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        held = [set(each.pages) for each in sequence.pages]
        pools = [group.pool for group in self.scheduler.pages.groups]
        free = [pool.num_free for pool in pools]
        self.scheduler.drop(sequence)
        del self.live[sequence.request.id]
        for group, own in enumerate(held):
            others = {page for other in self.scheduler.running for page in other.pages[group].pages}
            others |= {page for each in self.incoming if each.group == group for page in each.pages}
            assert pools[group].num_free == free[group] + len(own - others), "its pages are not free at once"


Trace.TestCase.settings = settings(stateful_step_count=40)
TestTrace = Trace.TestCase
