"""Decides what the next step computes. Pure: no tensors, no clock, no I/O.

Every step is made of decode rows (sequences that need exactly their last drawn token computed) and a bounded chunk of
prefill. Decode rows go first, so that running streams keep their pace; what is left of the budget prefills, oldest
first. When pages run out the youngest sequence gives its pages back and is computed again later; the oldest always
advances, so nothing deadlocks. A step may be planned before the previous one's tokens are known to the host.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.pages import Digest, PagePool
from cortex.neuron.engine.recurrent_checkpoints import DecodeCheckpoint, RecurrentCheckpoints, checkpoint_positions
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.sequence import NO_ROW, Sequence

CROWD = 8
"""So many prompts that wait beside running streams get a newcomer's share of a step each time."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_rows: int
    """Sequences that run at once."""
    step_tokens: int
    """Most tokens one step computes, decode rows included."""
    mixed_prefill_tokens: int
    """Prefill tokens in a step that also decodes, unless many wait: what keeps running streams at their pace."""
    context_tokens: int
    """Longest sequence, prompt and output together."""
    reserved_tokens: int = 0
    """How far ahead of each row's latest token pages are kept for it, where `max_tokens` allows it so many: where no
    answer is longer, none is preempted. Clients allow far more than answers are long; all of it would idle rows."""

    def prefill_tokens(self, num_decodes: int, num_waiting: int) -> int:
        """Most prefill tokens of a step. Beside decode rows a few newcomers get little, so that running streams do not
        stutter; a crowd gets up to half of a step, which lets it in at nearly full pace and ends all stutter sooner."""
        room = self.step_tokens - num_decodes
        if num_decodes == 0:
            return room
        for_a_crowd = min(self.mixed_prefill_tokens * (num_waiting // CROWD), self.step_tokens // 2)
        return min(room, max(self.mixed_prefill_tokens, for_a_crowd))


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What a step computes for one sequence: positions `start` up to `start + count`.

    `tokens` is None for a decode row: its token was drawn by an earlier step and never left the device.
    """

    row: int
    start: int
    count: int
    tokens: tuple[int, ...] | None
    draws: bool
    """Whether a token is drawn after the last position."""
    writes: bool = True
    """False when the KV of these positions is already in the pages (a prompt that was wholly cached)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, as plain values: everything another rank would need to run it too."""

    rows: tuple[RowPlan, ...]
    """Rows of one token come first: to the kernels they are all decodes."""
    num_singles: int
    new_rows: tuple[tuple[int, EngineRequest, tuple[int, ...]], ...]
    """(row, request, tokens drawn for it before): rows given to a sequence with this step."""
    new_pages: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(row, first index, pages): additions to the rows' page tables."""
    restores: tuple[tuple[int, int], ...] = ()
    """(slot, row): recurrent states to copy before the step."""
    saves: tuple[tuple[int, int], ...] = ()
    """(row, slot): recurrent states to copy after the step."""

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class Scheduler:
    """Owns the sequences of one engine and their pages. Belongs to the engine thread."""

    def __init__(self, pool: PagePool, limits: SchedulerLimits, states: RecurrentCheckpoints | None = None) -> None:
        """`states`: the checkpoints of a model with recurrent layers, which cannot go on from its pages alone."""
        self.pool = pool
        self.states = states
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        """First in, first out; preempted sequences go to the front. The node decides whose request is sent when."""
        self.running: list[Sequence] = []
        """In order of admission: the first is the oldest."""
        self.preemptions = 0
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> Sequence:
        """Puts a request in line. Raises RequestError for one that could never run."""
        if not request.prompt:
            raise RequestError("the prompt is empty: send at least one token")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}: ask for at least one token")
        longest = len(request.prompt) + request.max_tokens
        if longest > self.limits.context_tokens:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens and asks for {request.max_tokens} more, "
                f"but this model holds {self.limits.context_tokens} in all"
            )
        sequence = Sequence.of(request)
        self.waiting.append(sequence)
        return sequence

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives back what it holds. Steps in flight may still compute it;
        their results are to be ignored. The device runs in order, so its pages can be given away at once."""
        if sequence.row == NO_ROW:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._give_back(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """Makes sure that nothing this sequence is made of is used again: any page of it may be the one to blame."""
        digests = sequence.digests_of_full_pages(self.pool.page_tokens)
        self.pool.disown(digests)
        if self.states is not None:
            self.states.forget(digests)
            self._end_decode_checkpoint(sequence, None)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.decode_checkpoint is not None:
            digests = sequence.digests_of_full_pages(self.pool.page_tokens)
            self._end_decode_checkpoint(sequence, next(iter(digests[sequence.decode_checkpoint.num_pages - 1 :]), None))
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.committed = 0
        sequence.drew_in_row = False
        self._free_rows.append(sequence.row)
        sequence.row = NO_ROW

    # -- planning --------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        draft = _Draft()
        self._plan_decodes(draft)
        num_prefilling = sum(not sequence.is_decoding for sequence in self.running)
        budget = self.limits.prefill_tokens(len(draft.rows), num_prefilling + len(self.waiting))
        budget = self._continue_prefills(draft, budget)
        self._admit(draft, budget)
        return draft.step()

    def plan_alone(self, sequence: Sequence) -> StepPlan | None:
        """A step of prefill of this sequence and nothing else, or None when it cannot be computed now."""
        draft = _Draft()
        if sequence.row == NO_ROW:
            known = self._known_pages(sequence, draft) if self._free_rows else None
            if known is None or not self._try_admit(sequence, known, draft):
                return None
        self._prefill(sequence, draft, self.limits.step_tokens)
        return draft.step()

    def retract(self, plan: StepPlan) -> None:
        """Undoes the plan made last, whose step could not be run: its sequences go back in line, to be computed again.
        What the step may have written in part is forgotten."""
        page_tokens = self.pool.page_tokens
        planned = {row.row: row for row in plan.rows}
        for sequence in [sequence for sequence in reversed(self.running) if sequence.row in planned]:
            row = planned[sequence.row]
            if row.writes:
                touched = sequence.digests[row.start // page_tokens : sequence.computed // page_tokens]
                self.pool.disown(touched)
                if self.states is not None:
                    self.states.forget(touched)
                    if (
                        sequence.decode_checkpoint is not None
                        and sequence.decode_checkpoint.num_pages * page_tokens == sequence.computed
                    ):
                        self._end_decode_checkpoint(sequence, None)
            sequence.in_flight -= row.draws
            self._preempt(sequence)

    def _plan_decodes(self, draft: _Draft) -> None:
        for sequence in list(self.running):
            if sequence.row == NO_ROW or not sequence.is_decoding or not sequence.wants_more:
                continue
            if len(draft.rows) == self.limits.step_tokens:
                break
            if self._make_room(sequence, sequence.computed + 1, draft):
                draft.rows.append(RowPlan(sequence.row, sequence.computed, 1, None, draws=True))
                self._advance(sequence, 1, draft, draws=True)
                self._keep_trail(sequence, draft)

    def _continue_prefills(self, draft: _Draft, budget: int) -> int:
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence.row != NO_ROW and not sequence.is_decoding and sequence.wants_more:
                budget -= self._prefill(sequence, draft, budget)
        return budget

    def _admit(self, draft: _Draft, budget: int) -> None:
        """Admits waiting sequences in order. The first that cannot start in this step blocks the rest, so that small
        requests never starve a large one."""
        while budget > 0 and self._free_rows and self.waiting:
            first = self.waiting[0]
            known = self._known_pages(first, draft)
            if known is None or not self._try_admit(first, known, draft):
                return
            budget -= self._prefill(first, draft, budget)

    def _known_pages(self, sequence: Sequence, draft: _Draft) -> list[int] | None:
        """The pages of its prefix that are computed already; None when the sequence has to wait for the next step."""
        if sequence.in_flight:
            return None  # preempted while a step was in flight: its last token is not known yet
        digests = sequence.digests_of_full_pages(self.pool.page_tokens)
        known = self.pool.match(digests)
        if not draft.being_computed.isdisjoint(digests[: len(known)]):
            return None  # rows of one step may not rely on each other's writes
        if self.states is not None:
            # The last token is computed whatever is known, so a state that includes it is of no use.
            most = min(len(known), (len(sequence.tokens) - 1) // self.pool.page_tokens)
            known = known[: self.states.longest(digests[:most])]
        return known

    def _try_admit(self, sequence: Sequence, known: list[int], draft: _Draft) -> bool:
        needed = self._pages_ahead(sequence) - len(known)
        promised = sum(max(0, self._pages_ahead(other) - len(other.pages)) for other in self.running)
        if needed + self.pool.num_idle_among(known) + promised > self.pool.num_free:
            return False
        self.waiting.remove(sequence)
        self.pool.hold(known)
        sequence.pages = known
        sequence.committed = len(known)
        # The last token is computed even when it is cached: its logits are what the next token is drawn from.
        sequence.computed = min(len(known) * self.pool.page_tokens, len(sequence.tokens) - 1)
        if sequence.cached is None:
            sequence.cached = sequence.computed
        sequence.row = self._free_rows.pop()
        self.running.append(sequence)
        drawn = tuple(sequence.tokens[len(sequence.request.prompt) :])
        draft.new_rows.append((sequence.row, sequence.request, drawn))
        if known:
            draft.new_pages.append((sequence.row, 0, tuple(known)))
        if self.states is not None:
            self._resume(sequence, self.states, draft)
        return True

    def _pages_ahead(self, sequence: Sequence) -> int:
        """Pages that it is to have in all, as far ahead as admission looks: for its prompt and a part of its answer."""
        allowed = sequence.request.max_tokens - sequence.num_drawn
        ahead = max(1, min(self.limits.reserved_tokens, allowed))
        return -(-(sequence.length + ahead) // self.pool.page_tokens)

    def _resume(self, sequence: Sequence, states: RecurrentCheckpoints, draft: _Draft) -> None:
        """Gives an admitted sequence the state after its known pages, and decides where its own will be kept."""
        page_tokens = self.pool.page_tokens
        if sequence.pages:
            draft.restores.append((states.use(sequence.digests[len(sequence.pages) - 1]), sequence.row))
        positions = checkpoint_positions(
            sequence.request.checkpoint_at,
            sequence.computed,
            len(sequence.tokens),
            page_tokens,
            states.spacing_tokens,
        )
        sequence.checkpoints = tuple(
            position for position in positions if states.lacks(sequence.digests[position // page_tokens - 1])
        )

    def _prefill(self, sequence: Sequence, draft: _Draft, budget: int) -> int:
        """Adds the next chunk of `sequence` to the draft; returns the tokens it took (0 when no page is to be had)."""
        start = sequence.computed
        end = start + min(budget, sequence.remaining)
        end = next((cut for cut in sequence.checkpoints if start < cut < end), end)
        count = end - start
        if not self._make_room(sequence, end, draft):
            return 0
        draws = end == len(sequence.tokens)
        writes = start >= sequence.committed * self.pool.page_tokens
        draft.rows.append(RowPlan(sequence.row, start, count, tuple(sequence.tokens[start:end]), draws, writes))
        self._advance(sequence, count, draft, draws=draws)
        if self.states is not None and end in sequence.checkpoints:
            slot = self.states.keep(sequence.digests[end // self.pool.page_tokens - 1])
            if slot is not None:
                draft.saves.append((sequence.row, slot))
        return count

    def _keep_trail(self, sequence: Sequence, draft: _Draft) -> None:
        """At every page end of a sequence that decodes its state replaces the one kept at the page end before."""
        num_pages, inside = divmod(sequence.computed, self.pool.page_tokens)
        if self.states is None or inside:
            return
        slot = self.states.lend() if sequence.decode_checkpoint is None else sequence.decode_checkpoint.slot
        if slot is not None:
            sequence.decode_checkpoint = DecodeCheckpoint(slot, num_pages)
            draft.saves.append((sequence.row, slot))

    def _end_decode_checkpoint(self, sequence: Sequence, digest: Digest | None) -> None:
        """Leaves the sequence's latest state to others, under the name of its prefix; None: it is of no use."""
        if self.states is not None and sequence.decode_checkpoint is not None:
            self.states.take_back(sequence.decode_checkpoint.slot, digest)
            sequence.decode_checkpoint = None

    def _advance(self, sequence: Sequence, count: int, draft: _Draft, *, draws: bool) -> None:
        first_named = sequence.committed
        sequence.computed += count
        self._commit(sequence)
        draft.being_computed.update(sequence.digests[first_named : sequence.committed])
        sequence.in_flight += draws
        sequence.drew_in_row |= draws

    def _commit(self, sequence: Sequence) -> None:
        """Names the pages that the launched steps have filled with known tokens."""
        digests = sequence.digests_of_full_pages(self.pool.page_tokens)
        full = min(len(digests), sequence.computed // self.pool.page_tokens)
        for index in range(sequence.committed, full):
            self.pool.commit(sequence.pages[index], digests[index])
        sequence.committed = max(sequence.committed, full)

    def _make_room(self, sequence: Sequence, length: int, draft: _Draft) -> bool:
        """Extends the sequence's pages to hold `length` positions, preempting younger sequences if it must."""
        missing = -(-length // self.pool.page_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        pages = self.pool.allocate(missing)
        while pages is None:
            victim = self._youngest_after(sequence, draft)
            if victim is None:
                if self.running[0] is not sequence:
                    self._preempt(sequence)
                return False
            self._preempt(victim)
            pages = self.pool.allocate(missing)
        draft.new_pages.append((sequence.row, len(sequence.pages), tuple(pages)))
        sequence.pages.extend(pages)
        return True

    def _youngest_after(self, sequence: Sequence, draft: _Draft) -> Sequence | None:
        """The youngest running sequence that came after `sequence` and that this step does not compute."""
        planned = {row.row for row in draft.rows}
        for candidate in reversed(self.running):
            if candidate is sequence:
                return None
            if candidate.row not in planned:
                return candidate
        return None

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._give_back(sequence)
        self.waiting.appendleft(sequence)

    # -- results ---------------------------------------------------------------------------------------------------

    def token_drawn(self, sequence: Sequence, token: int) -> None:
        """Records the token that a launched step drew, now that the host has read it."""
        sequence.in_flight -= 1
        sequence.tokens.append(token)
        if sequence.row != NO_ROW:
            self._commit(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError unless rows and pages are accounted for exactly once."""
        self.pool.check_integrity([sequence.pages for sequence in self.running])
        rows = [sequence.row for sequence in self.running] + self._free_rows
        assert sorted(rows) == list(range(self.limits.max_rows)), "a row is lost or used twice"
        for sequence in self.running:
            held = len(sequence.pages) * self.pool.page_tokens
            assert sequence.computed <= held, "a sequence has computed past its pages"
        assert all(not sequence.pages and sequence.row == NO_ROW for sequence in self.waiting), "a waiter holds memory"
        if self.states is not None:
            decode_checkpoints = [sequence.decode_checkpoint for sequence in (*self.running, *self.waiting)]
            self.states.check_integrity(
                decode_checkpoint.slot for decode_checkpoint in decode_checkpoints if decode_checkpoint is not None
            )


class _Draft:
    """The step being planned."""

    def __init__(self) -> None:
        self.rows: list[RowPlan] = []
        self.new_rows: list[tuple[int, EngineRequest, tuple[int, ...]]] = []
        self.new_pages: list[tuple[int, int, tuple[int, ...]]] = []
        self.restores: list[tuple[int, int]] = []
        self.saves: list[tuple[int, int]] = []
        self.being_computed: set[Digest] = set()

    def step(self) -> StepPlan | None:
        """None when there is nothing to compute."""
        if not self.rows:
            return None
        rows = tuple(sorted(self.rows, key=lambda row: row.count > 1))
        num_singles = sum(row.count == 1 for row in rows)
        return StepPlan(
            rows,
            num_singles,
            tuple(self.new_rows),
            tuple(self.new_pages),
            tuple(self.restores),
            tuple(self.saves),
        )
