"""Decides whether waiting sequences fit: the pages and states that each needs before it runs. Pure: no tensors, no
clock, no I/O.

A sequence reuses the known pages of its prefix, including those in host memory; a model with recurrent layers also
needs a saved state at their end. The pages that it lacks must be free in addition to what running sequences may need.
Everything here belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import Protocol

from cortex.neuron.engine.kv.page_groups import KVPages, TailPages
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.kv.recurrent_checkpoints import RecurrentCheckpoints
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.sequence_states import SequenceStates
from cortex.neuron.engine.scheduling.step_plan import StepDraft

HasPage = Callable[[int, Digest], bool]
"""Whether the page of a KV group that ends this prefix is available."""
HasState = Callable[[Digest], bool]
"""Whether the recurrent state after this prefix is available."""


class OffloadedPages(Protocol):
    """The scheduler's interface to pages and states that left the device. No call waits for a copy."""

    def may_have(self, request_id: str, num_pages: int) -> bool:
        """Whether it is worth looking for this many further pages of a request. False once they were looked for."""
        ...

    def fetch(
        self,
        request_id: str,
        digests: Ordered[Digest],
        cached: int,
        last: int,
        usable: Callable[[HasPage, HasState], int],
    ) -> int | None:
        """Starts to copy the prefix of a request to the device, up to a point where it can continue. `cached`: its
        pages on the device; `last`: its last position, which is always computed; `usable`: the page counts after which
        it could continue. Returns None if it does not wait. Otherwise it waits until they have arrived (`is_fetching`),
        and meanwhile computes its pages up to the returned number, if that exceeds `cached` (never with windows)."""
        ...

    def is_fetching(self, request_id: str) -> bool: ...

    def is_receiving(self, request: EngineRequest) -> bool:
        """Whether blocks of its prompt are being fetched, or arrive from another node."""
        ...

    def shortened_front(self, request_id: str, digests: Ordered[Digest], num_computed: int, front: int) -> int:
        """The page up to which a request computes now, after its first `num_computed` pages; `front` was planned, 0 for
        all of the prompt. Less if the fetched pages have already arrived, because further pages are then fetched."""
        ...

    def ended(self, request_id: str) -> None:
        """The request needs nothing more."""
        ...

    def forget(self, digests: Ordered[Digest]) -> None:
        """The contents of these blocks cannot be trusted."""
        ...


class Reservations:
    """The pages that running sequences may still need: a sequence is admitted only if they stay free.

    Looks at each running sequence once per step, because a burst of requests is admitted in one step and would
    otherwise take quadratic time."""

    def __init__(self, pages: KVPages, reserved_tokens: int) -> None:
        """`reserved_tokens`: see `SchedulerLimits`."""
        self._pages = pages
        self._reserved_tokens = reserved_tokens
        self._lacking = [0] * len(pages.groups)
        self._num_counted = 0
        """How many running sequences, from the first, are in the sum."""

    def forget(self) -> None:
        """The pages or the lengths of running sequences change from now on, or one of them ends."""
        self._lacking = [0] * len(self._pages.groups)
        self._num_counted = 0

    def admit(self, sequence: Sequence, cached: int, start: int, running: Ordered[Sequence]) -> bool:
        """Whether a waiting sequence that continues after `cached` known pages, with the token at `start`, has pages in
        addition to what the running ones may still need. Since the last `forget` those may only have been appended
        to."""
        for other in running[self._num_counted :]:
            lacking = self._pages.lacking(other.pages, self._length_ahead(other))
            self._lacking = [sum(pair) for pair in zip(self._lacking, lacking, strict=True)]
        self._num_counted = len(running)
        return self._pages.fits(sequence.digests, cached, start, self._length_ahead(sequence), self._lacking)

    def _length_ahead(self, sequence: Sequence) -> int:
        """The positions that are counted for a sequence: its tokens and the reserved part of its response, or what it
        computes before it waits for others."""
        if sequence.leaves_row_at:
            return sequence.leaves_row_at
        allowed = sequence.request.max_tokens - sequence.num_drawn
        return sequence.length + max(1, min(self._reserved_tokens, allowed))


class PromptTails:
    """Repeated prompts, which reuse all tokens but the last, even though these end inside a page.

    The page in which a prompt ended is named by the tail of the prompt: the prefix up to, and without, its last token.
    The same prompt gets a copy of that page and computes its last token alone. The page need not be kept unchanged: its
    sequence appends to it, and its first positions stay valid until the page is reused.

    Prompts that have no full page before that, or end with a picture, have no tail.

    A model with recurrent layers also needs the state before the last token. It is saved when a prompt continues from
    its last page end, with what a step computes anyway, because most prompts never come again.
    """

    def __init__(self, pages: KVPages, checkpoints: RecurrentCheckpoints | None) -> None:
        self._pages = pages
        self._checkpoints = checkpoints
        self._copied: list[TailPages] = []
        """Pages that the step being planned copies, reserved until then."""

    def resume(self, sequence: Sequence, draft: StepDraft) -> bool:
        """Whether a sequence, which has just got its row and its cached pages, continues with the last token of its
        prompt, because its tail is known. Then the step copies a page for it, and the caller restores the state of its
        tail."""
        last = len(sequence.request.prompt) - 1
        is_next = sequence.committed == last // self._pages.page_tokens and len(sequence.tokens) == last + 1
        if sequence.tail is None or not is_next or sequence.scores_prompt or sequence.tail in draft.being_computed:
            return False
        if self._checkpoints is not None and not self._checkpoints.knows(sequence.tail):
            return False
        sources = self._pages.hold_tail(sequence.tail)
        if sources is None:
            return False
        added = self._pages.extend(sequence.pages, last + 1)
        if added is None:
            self._pages.release_tail(sources)
            return False
        self._copied.append(sources)
        draft.new_pages += [(sequence.row, *pages) for pages in added]
        draft.page_copies += [(group, sources[group], pages[0]) for group, _, pages in added]
        return True

    def commit(self, sequence: Sequence, draft: StepDraft) -> None:
        """Names the page in which the prompt ends, once the positions before its last token are computed. To be called
        after each chunk of the prompt, the last row of the draft, when its states have their slots."""
        last, page_tokens = len(sequence.request.prompt) - 1, self._pages.page_tokens
        if sequence.tail is None or not draft.rows[-1].start < last <= sequence.scheduled:
            return
        if self._checkpoints is None:
            is_needed = (last + 1) % page_tokens > 0  # else the prompt ends with a page, which needs no other name
        else:
            is_needed = self._checkpoints.knows(sequence.tail)
        if is_needed:
            self._pages.commit_tail(sequence.pages, last // page_tokens, sequence.tail)
            draft.being_computed.add(sequence.tail)

    def end_step(self) -> bool:
        """The step is planned. The device runs steps in order, so that the copied pages can be used again. True: there
        are such pages."""
        released, self._copied = self._copied, []
        for pages in released:
            self._pages.release_tail(pages)
        return bool(released)


class SequenceAdmission:
    """Looks at one waiting sequence at a time; the scheduler decides on their order."""

    def __init__(
        self,
        pages: KVPages,
        states: SequenceStates,
        running: Ordered[Sequence],
        reserved_tokens: int,
    ) -> None:
        """`running`: those of the scheduler, in order of admission. `reserved_tokens`: see `SchedulerLimits`."""
        self._pages = pages
        self._states = states
        self._running = running
        self._reservations = Reservations(pages, reserved_tokens)

    def running_change(self) -> None:
        """The pages or the lengths of running sequences change from now on, or one of them ends."""
        self._reservations.forget()

    def cached_pages(self, sequence: Sequence, draft: StepDraft) -> int | None:
        """The number of computed pages of its prefix; None if the sequence must wait for the next step."""
        if sequence.planned:
            return None  # preempted while a step was in flight: its drawn tokens are not known yet
        digests = sequence.digests_of_full_pages(self._pages.page_tokens)  # also names saved states
        sequence.name_tail(self._pages.page_tokens)
        if sequence.scores_prompt:
            return 0
        counts = self._pages.match(digests)
        if draft.being_computed and not draft.being_computed.isdisjoint(digests[: counts[-1]]):
            return None  # rows of one step must not depend on each other's writes
        return self._states.usable(sequence, counts)

    def start(self, sequence: Sequence, cached: int) -> int:
        """The first position that a waiting sequence computes if `cached` pages are. The last token is computed even if
        it is cached: the next token is drawn from its logits."""
        return min(cached * self._pages.page_tokens, len(sequence.tokens) - 1)

    def fits(self, sequence: Sequence, cached: int) -> bool:
        """Whether enough pages are free for the sequence, beyond those that running ones may still need."""
        return self._reservations.admit(sequence, cached, self.start(sequence, cached), self._running)

    def fetch(self, sequence: Sequence, cached: int, offloaded: OffloadedPages) -> int | None:
        """Looks for further pages of the sequence's prefix, once, when it has room. Returns the result of
        `OffloadedPages.fetch`."""
        digests, request_id = sequence.digests, sequence.request.id
        if sequence.scores_prompt or not offloaded.may_have(request_id, len(digests) - cached):
            return None
        if not self.fits(sequence, cached):
            return None

        def usable(has_page: HasPage, has_state: HasState) -> int:
            return self._states.usable(sequence, self._pages.match(digests, has_page), has_state)

        return offloaded.fetch(request_id, digests, cached, len(sequence.tokens) - 1, usable)
