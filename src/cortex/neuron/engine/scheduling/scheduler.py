"""Decides what the next step computes. Pure: no tensors, no clock, no I/O.

Every step is made of decode rows (sequences that need exactly their last drawn token computed) and a bounded chunk of
prefill. Decode rows go first. Prompts extend the step up to a bound on its expected time, so that running streams keep
their pace: principals get equal shares, and a principal's prompts go by age, except that short ones overtake. Rows and
prompts of the idle class come last and must hardly delay the rest. When pages run out, the youngest sequence of the
lowest class is preempted: it gives its pages back and is computed again later. It is also preempted for a waiting
sequence of a higher class. The oldest of the highest class is never preempted, so there is no deadlock. A step may be
planned before the host knows the tokens of the previous one.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from itertools import islice
from math import ceil

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.kv.page_groups import IncomingPages, KVPages
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.kv.recurrent_checkpoints import RecurrentCheckpoints
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.roofline.step_costs import StepCosts, StepShape
from cortex.neuron.engine.roofline.step_work import StepWork
from cortex.neuron.engine.scheduling.admission import OffloadedPages, PromptTails, SequenceAdmission
from cortex.neuron.engine.scheduling.budget import (
    LEAST_CHUNK,
    Flow,
    PrefillShares,
    Prompt,
    SchedulerLimits,
    StepShares,
    turns,
)
from cortex.neuron.engine.scheduling.idle_work import IdleBudget, IdleWork
from cortex.neuron.engine.scheduling.picture_positions import NO_PICTURES, PicturePositions
from cortex.neuron.engine.scheduling.sequence import NO_ROW, Sequence
from cortex.neuron.engine.scheduling.sequence_states import SequenceStates
from cortex.neuron.engine.scheduling.step_plan import RowPlan, StepDraft, StepPlan, step_shape
from cortex.neuron.pictures.picture import PictureRules
from cortex.system.fair_turns import IDLE

NOTHING_DRAFTED: Mapping[str, tuple[int, ...]] = {}
_COUNT = StepWork(weight_bytes=0)
"""All tokens count equally, because only the prompt itself waits for the step."""
_LOOKED_UP = 32
"""Number of waiting prompts per step whose cached part is looked up before their turn."""


class Scheduler:
    """Owns the sequences of one engine and their pages. Belongs to the engine thread."""

    def __init__(
        self,
        pages: KVPages,
        limits: SchedulerLimits,
        costs: StepCosts,
        checkpoints: RecurrentCheckpoints | None = None,
        pictures: PictureRules | None = None,
    ) -> None:
        """`costs`: the expected times of steps, updated by the caller. `checkpoints`: only for a model with recurrent
        layers. `pictures`: only for one that takes pictures."""
        self.pages = pages
        self.checkpoints = checkpoints
        self.limits = limits
        self.costs = costs
        self.waiting: deque[Sequence] = deque()
        """By class, and within a class first in, first out per principal; preempted sequences go to the front of their
        class. The node decides the order of requests."""
        self.running: list[Sequence] = []
        """By class, and within a class in order of admission: the first is the oldest of the highest class."""
        self.preemptions = 0
        self._offloaded: OffloadedPages | None = None
        """Pages outside of the device; None if they are not kept."""
        self._pictures = pictures
        self._states = SequenceStates(checkpoints, pages.page_tokens)
        self._tails = PromptTails(pages, checkpoints)
        self._admission = SequenceAdmission(pages, self._states, self.running, limits.reserved_tokens)
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))
        self._shares = PrefillShares()
        self._idle_shares = PrefillShares()
        self._idle_work = IdleWork()
        self._is_blocked = False
        """Whether a waiting sequence lacked pages, and none were released since."""
        self._starved: Sequence | None = None
        """The waiting sequence that last lacked pages, which no other overtakes."""

    # -- requests --------------------------------------------------------------------------------------------------

    def add(
        self, request: EngineRequest, tokens: Ordered[int] | None = None, packed: array[int] | None = None
    ) -> Sequence:
        """Queues a request. `tokens`: its prompt, to which the caller appends what it reads; None: nothing will be
        appended. `packed`: the prompt in 32 bits, if the caller has it. Raises RequestError for a request that could
        never run."""
        if not request.prompt:
            raise RequestError("the prompt is empty: send at least one token")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}: ask for at least one token")
        longest = len(request.prompt) + request.max_tokens
        if longest > self.limits.context_tokens:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens and asks for {request.max_tokens} more, "
                f"but the context of this model holds {self.limits.context_tokens}: shorten the prompt or max_tokens"
            )
        if request.pictures and self._pictures is None:
            raise RequestError("the model was loaded without its vision tower, and the prompt has pictures")
        if any(picture.end > len(request.prompt) for picture in request.pictures):
            raise RequestError("a picture of the request has no place in its prompt")
        places = NO_PICTURES
        if request.pictures and self._pictures is not None:
            places = PicturePositions(request.pictures, self._pictures)
        packed = array("I") if packed is None else packed
        sequence = Sequence(request, list(request.prompt) if tokens is None else tokens, packed, places)
        place = len(self.waiting)
        while place and self.waiting[place - 1].level < sequence.level:
            place -= 1
            self._is_blocked = False  # it may have pages that a lower class gives up
        self.waiting.insert(place, sequence)
        return sequence

    def use_offloaded(self, pages: OffloadedPages) -> None:
        """Use these pages for the prefixes of waiting sequences from now on."""
        self._offloaded = pages

    def drop(self, sequence: Sequence) -> None:
        """Removes a waiting or running sequence and frees what it holds.

        Steps in flight may still compute it; ignore their results. The device runs steps in order, so the pages can be
        used again at once.
        """
        if self._offloaded is not None:
            self._offloaded.ended(sequence.request.id)
        if sequence is self._starved:
            self._starved = None
        if sequence.row == NO_ROW:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """Forgets all cached pages and states of a sequence: any of them may have caused its failure."""
        digests = sequence.digests_of_full_pages(self.pages.page_tokens)
        if sequence.tail is not None:
            digests = [*digests, sequence.tail]
        self.pages.disown(digests)
        self._states.distrust(sequence, digests)
        if self._offloaded is not None:
            self._offloaded.forget(digests)

    def forget(self, is_chosen: Callable[[Digest], bool]) -> None:
        """Forgets the cached pages and states of these prefixes. Sequences that hold them keep them."""
        digests = [each for each in (*self.pages.digests(), *self._states.digests()) if is_chosen(each)]
        self.pages.disown(digests)
        self._states.forget(digests)

    def _release(self, sequence: Sequence) -> None:
        self._admission.running_change()
        self._states.release(sequence)
        self.pages.release(sequence.pages)
        sequence.pages = ()
        sequence.computed = sequence.committed = sequence.leaves_row_at = 0
        sequence.drew_in_row = sequence.is_token_on_device = False
        self._free_rows.append(sequence.row)
        sequence.row = NO_ROW
        self._is_blocked = False

    # -- planning --------------------------------------------------------------------------------------------------

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences that the next step decodes, the oldest first."""
        return [sequence for sequence in self.running if sequence.drew_in_row and sequence.wants_more]

    @property
    def is_prefilling(self) -> bool:
        """Whether prompts wait or are computed."""
        return bool(self.waiting) or not all(sequence.drew_in_row for sequence in self.running)

    def plan(self, drafted: Mapping[str, tuple[int, ...]] = NOTHING_DRAFTED) -> StepPlan | None:
        """The next step, or None if nothing can be computed now. `drafted`: draft tokens that the rows of `decoding`
        check, by the id of their request; only if no step is in flight."""
        draft = self._new_draft()
        self._end_fronts()
        self._preempt_lower_classes(draft)
        if drafted:
            for sequence in self.decoding:  # the host gives all tokens of a step that checks drafts
                sequence.is_token_on_device = False
        self._plan_decodes(draft, [sequence for sequence in self.decoding if sequence.level > IDLE], drafted)
        is_full = self._plan_prompts(draft)
        if self._has_idle:
            self._plan_idle(draft, drafted, is_full=is_full)
        return self._finish(draft)

    @property
    def _has_idle(self) -> bool:
        """Whether the last running or waiting sequence is of the idle class, which sorts last."""
        return any(sequences and sequences[-1].level == IDLE for sequences in (self.running, self.waiting))

    def _plan_idle(self, draft: StepDraft, drafted: Mapping[str, tuple[int, ...]], *, is_full: bool) -> None:
        """Adds what the idle class may compute. `is_full`: a request of another class waits for room."""
        work, others = self._idle_work, self._shape(draft)
        decoding = [sequence for sequence in self.decoding if sequence.level == IDLE]
        contexts = [sequence.scheduled for sequence in decoding]
        room = work.room(self.costs, others)
        prompt_tokens = 0 if is_full else self._idle_prompt_tokens()
        turn = work.turn(room, contexts, prompt_tokens, self._idle_worth(room, draft) if prompt_tokens else 0)
        if turn == "prompts":
            self._plan_prompts(draft, self._idle_worth(room, draft))
            if self._shape(draft).prompt_tokens == others.prompt_tokens:
                turn = "both"  # no page is free
        num_rows = 0 if turn == "prompts" else room.num_rows(contexts)
        self._plan_decodes(draft, decoding[:num_rows], drafted if room.is_alone else NOTHING_DRAFTED)
        if turn == "both" and prompt_tokens:
            self._plan_prompts(draft, self._idle_worth(room, draft))
        advances = self._shape(draft).prompt_tokens > others.prompt_tokens
        leaves_prompts = prompt_tokens > 0 and not advances
        work.planned(room, turn, leaves_rows=bool(decoding) and not num_rows, leaves_prompts=leaves_prompts)

    def _idle_prompt_tokens(self) -> int:
        """The tokens of prompts of the idle class that could be computed."""
        waiting = [len(each.tokens) for each in islice(self.waiting, len(self._free_rows)) if each.level == IDLE]
        running = [each.remaining for each in self.running if each.level == IDLE and not each.drew_in_row]
        return sum(waiting) + sum(running)

    def _idle_worth(self, room: IdleBudget, draft: StepDraft) -> int:
        """The maximum work of prompts of the idle class in this step."""
        planned = self._shape(draft)
        worth = room.prompt_worth(planned, self.limits.step_tokens - draft.num_tokens)
        return self.limits.graph_tokens(planned.num_streams, worth)

    def _shape(self, draft: StepDraft) -> StepShape:
        return step_shape(draft.rows, self.costs.work)

    def _preempt_lower_classes(self, draft: StepDraft) -> None:
        """Makes room for the first waiting sequence by preempting running ones of lower classes."""
        while self.waiting and self.running and self.running[-1].level < self.waiting[0].level:
            first = self.waiting[0]
            if self._offloaded is not None and self._offloaded.is_fetching(first.request.id):
                return
            cached = self._admission.cached_pages(first, draft)
            if cached is None or (self._free_rows and self._admission.fits(first, cached)):
                return
            self._preempt(self.running[-1])

    def _end_fronts(self) -> None:
        """Sequences that have computed all pages before the fetched ones wait for these without a row. Their pages are
        known and idle meanwhile, and they are admitted again with their whole prefix."""
        page_tokens = self.pages.page_tokens
        for sequence in [each for each in self.running if each.awaits_blocks]:
            if self._offloaded is not None and sequence.scheduled < (sequence.leaves_row_at or sequence.length):
                progress = max(1, -(-sequence.scheduled // page_tokens)), sequence.leaves_row_at // page_tokens
                front = self._offloaded.shortened_front(sequence.request.id, sequence.digests, *progress)
                sequence.leaves_row_at = front * page_tokens
            if sequence.leaves_row_at and sequence.scheduled >= sequence.leaves_row_at:
                sequence.front_tokens = sequence.scheduled - (sequence.cached or 0)
                sequence.cached = None
                self._requeue(sequence)

    def plan_alone(self, sequence: Sequence) -> StepPlan | None:
        """A step that prefills this sequence and nothing else, or None if it cannot be computed now."""
        draft = self._new_draft()
        sequence.leaves_row_at = 0
        if sequence.row == NO_ROW:
            cached = self._admission.cached_pages(sequence, draft) if self._free_rows else None
            if cached is None or not self._try_admit(sequence, cached, draft):
                return None
        self._prefill(sequence, draft, self.limits.step_tokens)
        return self._finish(draft)

    def retract(self, plan: StepPlan) -> None:
        """Undoes the latest plan, whose step failed. Its sequences are queued again and recomputed; anything that the
        step may have written is forgotten."""
        page_tokens = self.pages.page_tokens
        planned = {row.row: row for row in plan.rows}
        for sequence in [sequence for sequence in reversed(self.running) if sequence.row in planned]:
            row = planned[sequence.row]
            if row.writes:
                touched = sequence.digests[row.start // page_tokens : sequence.scheduled // page_tokens]
                if sequence.tail is not None and not row.decodes:
                    touched = [*touched, sequence.tail]
                self.pages.disown(touched)
                self._states.retract(sequence, row.start, touched)
            sequence.planned -= row.count
            sequence.in_flight -= row.outputs.draws
            self._preempt(sequence)

    def _new_draft(self) -> StepDraft:
        """Begins a step. Releases pages that no later step reads: those behind the windows of layers."""
        self._states.begin_step()
        self._admission.running_change()
        if self.pages.has_windows:
            for sequence in self.running:
                self.pages.trim(sequence.pages, sequence.scheduled)
        return StepDraft()

    def _finish(self, draft: StepDraft) -> StepPlan | None:
        if self._tails.end_step():
            self._is_blocked = False
        return draft.finish()

    def _plan_decodes(
        self, draft: StepDraft, decoding: Ordered[Sequence], drafted: Mapping[str, tuple[int, ...]]
    ) -> None:
        spare = 0
        if drafted:
            spare = self.limits.step_tokens - draft.num_tokens - sum([sequence.remaining for sequence in decoding])
        for sequence in decoding:
            if sequence.row == NO_ROW:
                continue  # preempted
            end = sequence.length
            if draft.num_tokens + end - sequence.scheduled > self.limits.step_tokens:
                break
            if self._make_room(sequence, end, draft):
                tokens = drafted.get(sequence.request.id, ()) if drafted else ()
                if spare and tokens:
                    num_drafts = self._fit_drafts(sequence, min(spare, len(tokens)), draft)
                    spare -= num_drafts
                    end += num_drafts
                self._states.before_decode(sequence, end, draft)
                self._add_row(sequence, end, draft, tokens)
                self._states.decode(sequence, draft)

    def _fit_drafts(self, sequence: Sequence, count: int, draft: StepDraft) -> int:
        """How many of `count` draft tokens the next row of `sequence` checks. They take no page that another sequence
        would be preempted for."""
        allowed = sequence.request.max_tokens - sequence.num_drawn - 1
        count = self._states.num_drafts(sequence, min(count, allowed))
        added = self.pages.extend(sequence.pages, sequence.length + count) if count > 0 else None
        if added is None:
            return 0
        draft.new_pages += [(sequence.row, *pages) for pages in added]
        return count

    def _plan_prompts(self, draft: StepDraft, idle_budget: int | None = None) -> bool:
        """Adds chunks of prompts: of short ones that overtake, of running ones by age, of waiting ones in order.
        `idle_budget`: the maximum work of prompts of the idle class; None: adds those of the other classes. Returns
        True if a request waits for room that others must not take."""
        is_idle = idle_budget is not None
        if idle_budget == 0:
            return False
        running = [each for each in self.running if not each.drew_in_row and each.wants_more]
        running = [each for each in running if (each.level == IDLE) == is_idle]
        waiting: Ordered[Sequence] = () if self._is_blocked and running else self.waiting
        waiting = [each for each in waiting if (each.level == IDLE) == is_idle]
        if self._offloaded is not None:
            waiting = [each for each in waiting if not self._offloaded.is_fetching(each.request.id)]
        sequences = sorted((*running, *islice(waiting, len(self._free_rows))), key=lambda each: -each.level)
        has_row = [sequence.row != NO_ROW for sequence in sequences]
        if not sequences:
            return bool(waiting)
        streams = self._shape(draft)
        num_prompts = len(sequences)
        if self._offloaded is not None:
            # Blocks go to the device between steps, so steps are as short as if another prompt waited.
            num_prompts += sum([self._offloaded.is_receiving(each.request) for each in sequences])
        budget = self.limits.prompt_budget(self.costs, streams, num_prompts) if idle_budget is None else idle_budget
        work = _COUNT if budget is None else self.costs.work
        prompts = self._prompts(sequences, draft, work)
        needed: dict[Flow, int] = {}
        for flow, worth in prompts:
            needed[flow] = needed.get(flow, 0) + worth
        budget = self.limits.step_tokens - draft.num_tokens if budget is None else budget
        prefill_shares = self._idle_shares if is_idle else self._shares
        shares = StepShares(work, prefill_shares.of_step(budget, needed))
        order, preemptions, num_streams = turns(prompts, shares.left), self.preemptions, len(draft.rows)
        for index in (*order.overtaking, *order.by_age):
            sequence, overtakes = sequences[index], index in order.overtaking
            share = shares.left.get(_flow(sequence), 0)
            if share <= 0 or (share < min(LEAST_CHUNK, prompts[index].worth) and len(draft.rows) > num_streams):
                continue
            if has_row[index]:
                if sequence.row != NO_ROW:  # else preempted
                    self._prefill_share(sequence, draft, shares)
            elif not self._free_rows or self.preemptions > preemptions:
                return True  # a sequence that has just lost its pages comes first
            elif overtakes:
                if self._starved is None:
                    self._admit(sequence, draft, shares)
            elif not self._admit(sequence, draft, shares, is_next=True):
                return True
        return False

    def _prompts(self, sequences: Ordered[Sequence], draft: StepDraft, work: StepWork) -> list[Prompt]:
        """The remaining needs of these prompts; of waiting ones, those that are known."""
        prompts, num_looked_up = [], 0
        for sequence in sequences:
            start, remaining = sequence.scheduled, sequence.remaining
            if sequence.row == NO_ROW:
                if sequence.expected_start is None and num_looked_up < _LOOKED_UP:
                    num_looked_up += 1
                    cached = self._admission.cached_pages(sequence, draft)
                    sequence.expected_start = None if cached is None else self._admission.start(sequence, cached)
                start = sequence.expected_start or 0
                remaining = max(1, len(sequence.tokens) - start)
            prompts.append(Prompt(_flow(sequence), ceil(work.prompt_worth(start, remaining))))
        return prompts

    def _admit(self, sequence: Sequence, draft: StepDraft, shares: StepShares, *, is_next: bool = False) -> bool:
        """Admits a waiting sequence and adds its first chunk. False if it cannot start in this step; if it is next in
        order, it then blocks the rest, so that small requests never starve a large one."""
        cached = self._admission.cached_pages(sequence, draft)
        if cached is None or not self._has_room(sequence, self._admission.start(sequence, cached), draft, shares):
            return False
        if self._offloaded is not None:
            front = self._admission.fetch(sequence, cached, self._offloaded)
            if front == cached:
                return True
            sequence.leaves_row_at = (front or 0) * self.pages.page_tokens
        if not self._try_admit(sequence, cached, draft):
            sequence.leaves_row_at = 0
            if is_next:
                self._is_blocked, self._starved = True, sequence
            return False
        # False: it lacks a page that admission had counted; another step may have it.
        return self._prefill_share(sequence, draft, shares) > 0

    def _prefill_share(self, sequence: Sequence, draft: StepDraft, shares: StepShares) -> int:
        """Prefills what the share of the sequence's principal allows, and subtracts it."""
        flow, start = _flow(sequence), sequence.scheduled
        num_tokens = self._prefill(sequence, draft, shares.tokens(flow, start, sequence.remaining))
        prefilled = self._idle_shares if flow.level == IDLE else self._shares
        prefilled.count(flow, shares.take(flow, start, num_tokens))
        return num_tokens

    def _try_admit(self, sequence: Sequence, cached: int, draft: StepDraft) -> bool:
        if not self._admission.fits(sequence, cached):
            return False
        self.waiting.remove(sequence)
        if sequence is self._starved:
            self._starved = None
        self._enter_row(sequence, cached, draft)
        place = len(self.running)
        while place and self.running[place - 1].level < sequence.level:
            place -= 1
        if place < len(self.running):
            self._admission.running_change()
        self.running.insert(place, sequence)
        return True

    def _enter_row(self, sequence: Sequence, cached: int, draft: StepDraft) -> None:
        """Gives a sequence that fits its row and the known part of its prefix, after which it continues in this
        step."""
        start = self._admission.start(sequence, cached)
        sequence.pages = self.pages.hold(sequence.digests, cached, start)
        sequence.row, sequence.committed, sequence.computed = self._free_rows.pop(), cached, start
        drawn = tuple(sequence.tokens[len(sequence.request.prompt) :])
        draft.assign_row(sequence.row, sequence.request, drawn, sequence.pages)
        if resumes_tail := self._tails.resume(sequence, draft):
            sequence.computed = len(sequence.request.prompt) - 1
        self._states.admit(sequence, draft, resumes_tail=resumes_tail)
        if sequence.cached is None:
            sequence.cached = max(0, sequence.computed - sequence.front_tokens)

    def _room(self, draft: StepDraft) -> int | None:
        """The tokens that the step can still take; None if the shares are the bound. An indivisible picture may exceed
        a share, so shares alone do not keep a step within its planned memory. The first row of a step has no bound,
        because otherwise a picture larger than a step could never be computed."""
        if self._pictures is None or not self._pictures.is_whole or not draft.rows:
            return None
        return self.limits.step_tokens - draft.num_tokens

    def _has_room(self, sequence: Sequence, start: int, draft: StepDraft, shares: StepShares) -> bool:
        """Whether the step has room for the first chunk of a waiting sequence, without which it is not admitted."""
        room = self._room(draft)
        if room is None:
            return True
        remaining = len(sequence.tokens) - start
        end = start + min(room, shares.tokens(_flow(sequence), start, remaining))
        return room > 0 and sequence.pictures.cut(start, end) - start <= room

    def _prefill(self, sequence: Sequence, draft: StepDraft, budget: int) -> int:
        """Adds the next chunk of `sequence` to the draft; returns its number of tokens (0 if there is no page, or no
        room in the step)."""
        start, room = sequence.scheduled, self._room(draft)
        if room is not None:
            if room <= 0:
                return 0
            budget = min(budget, room)
        end = start + min(budget, sequence.remaining)
        end = self._states.prefill_end(sequence, end)
        end = max(start + 1, self.pages.reach(sequence.pages, end, takes_pages=True))
        end = sequence.pictures.cut(start, end)
        if room is not None and end - start > room:
            return 0  # a later step has it, with fewer other rows
        if not self._make_room(sequence, end, draft):
            if sequence.row == NO_ROW:
                return 0
            # The oldest: those that it would preempt have their rows already, so it takes only free pages.
            end = self.pages.reach(sequence.pages, end, takes_pages=False)
            if end <= start or sequence.pictures.cut(start, end) != end or not self._make_room(sequence, end, draft):
                return 0
        self._add_row(sequence, end, draft)
        self._states.prefill(sequence, draft)
        self._tails.commit(sequence, draft)
        return end - start

    def _add_row(self, sequence: Sequence, end: int, draft: StepDraft, drafted: tuple[int, ...] = ()) -> None:
        """Adds the next positions of `sequence`, up to `end`, to the draft."""
        first_new = sequence.committed
        row = sequence.next_row(end, drafted, writes=sequence.scheduled >= first_new * self.pages.page_tokens)
        draft.add(row)
        draws = row.outputs.draws
        sequence.planned += row.inputs.count
        sequence.in_flight += draws
        sequence.drew_in_row |= draws > 0
        sequence.is_token_on_device = draws == 1
        self._commit(sequence)
        if sequence.committed > first_new:
            draft.being_computed.update(sequence.digests[first_new : sequence.committed])

    def _commit(self, sequence: Sequence) -> None:
        """Registers the pages that the launched steps fill with known tokens."""
        full = sequence.scheduled // self.pages.page_tokens
        if full <= sequence.committed:
            return
        digests = sequence.digests_of_full_pages(self.pages.page_tokens)
        full = min(len(digests), full)
        for index in range(sequence.committed, full):
            self.pages.commit(sequence.pages, index, digests[index])
        sequence.committed = max(sequence.committed, full)

    def _make_room(self, sequence: Sequence, length: int, draft: StepDraft) -> bool:
        """Extends the sequence's pages to hold `length` positions, preempting those after it if necessary."""
        if length <= sequence.pages[0].end * self.pages.page_tokens:
            return True
        while (added := self.pages.extend(sequence.pages, length)) is None:
            victim = self._youngest_after(sequence, draft)
            if victim is None:
                if self.running[0] is not sequence:
                    self._preempt(sequence)
                return False
            self._preempt(victim)
        draft.new_pages += [(sequence.row, *pages) for pages in added]
        return True

    def _youngest_after(self, sequence: Sequence, draft: StepDraft) -> Sequence | None:
        """The last running sequence that comes after `sequence` and is not computed by this step."""
        planned = {row.row for row in draft.rows}
        for candidate in reversed(self.running):
            if candidate is sequence:
                return None
            if candidate.row not in planned:
                return candidate
        return None

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.preemptions += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Takes the row of a running sequence, which becomes the first waiting one of its class."""
        self.running.remove(sequence)
        self._release(sequence)
        place = 0
        while place < len(self.waiting) and self.waiting[place].level > sequence.level:
            place += 1
        self.waiting.insert(place, sequence)

    # -- results ---------------------------------------------------------------------------------------------------

    def row_read(self, sequence: Sequence, row: RowPlan, num_accepted: int) -> None:
        """Records a launched row once the host has read its results and appended the accepted tokens to the
        sequence."""
        sequence.planned -= row.inputs.count
        sequence.in_flight -= row.outputs.draws
        if sequence.row != NO_ROW:  # else it was preempted: its pages are gone
            if num_accepted == row.outputs.draws or not self._states.rejected(sequence):
                sequence.computed += row.num_computed(num_accepted)
            if num_accepted:
                self._commit(sequence)

    def check_integrity(self, incoming: Ordered[IncomingPages] = (), incoming_states: Ordered[int] = ()) -> None:
        """Raises AssertionError unless rows and pages are accounted for exactly once. `incoming`, `incoming_states`:
        the pages and the slots that are fetched."""
        self.pages.check_integrity([sequence.pages for sequence in self.running], incoming)
        rows = [sequence.row for sequence in self.running] + self._free_rows
        assert sorted(rows) == list(range(self.limits.max_rows)), "a row is lost or used twice"
        for sequence in self.running:
            held = sequence.pages[0].end * self.pages.page_tokens
            assert sequence.scheduled <= held, "a sequence has computed past its pages"
        assert all(not sequence.pages and sequence.row == NO_ROW for sequence in self.waiting), "a waiter holds memory"
        self._states.check_integrity((*self.running, *self.waiting), incoming_states)


def _flow(sequence: Sequence) -> Flow:
    return Flow(sequence.request.principal, sequence.level)
