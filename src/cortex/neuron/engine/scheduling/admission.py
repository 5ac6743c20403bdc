"""What a waiting sequence needs before it runs, and how it gets it. Pure: no tensors, no clock, no I/O.

It reuses the pages of its prefix that are known, and those that host memory has; a model with recurrent layers also
needs a saved state at their end. The pages that it lacks must be free in addition to what running sequences may need.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING

from cortex.neuron.engine.kv.page_groups import KVPages
from cortex.neuron.engine.scheduling.prompt_tails import PromptTails
from cortex.neuron.engine.scheduling.reservations import Reservations
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.sequence_states import SequenceStates
from cortex.neuron.engine.scheduling.step_plan import StepDraft

if TYPE_CHECKING:
    from cortex.neuron.engine.host_pages.tier import HostTier  # imports torch


class SequenceAdmission:
    """Looks at one waiting sequence at a time; the scheduler decides on their order. Belongs to the engine thread."""

    def __init__(
        self,
        pages: KVPages,
        states: SequenceStates,
        tails: PromptTails,
        running: Ordered[Sequence],
        reserved_tokens: int,
    ) -> None:
        """`running`: those of the scheduler, in order of admission. `reserved_tokens`: see `SchedulerLimits`."""
        self._pages = pages
        self._states = states
        self._tails = tails
        self._running = running
        self._reservations = Reservations(pages, reserved_tokens)

    def running_change(self) -> None:
        """The pages or the lengths of running sequences change from now on, or one of them ends."""
        self._reservations.forget()

    def cached_pages(self, sequence: Sequence, draft: StepDraft) -> int | None:
        """How many pages of its prefix are already computed; None if the sequence must wait for the next step."""
        if sequence.planned:
            return None  # preempted while a step was in flight: what it drew is not known yet
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
        """Whether the pages that the sequence lacks are free, and are not those that running ones may still need."""
        return self._reservations.admit(sequence, cached, self.start(sequence, cached), self._running)

    def fetch(self, sequence: Sequence, cached: int, host: HostTier) -> bool:
        """Whether the sequence waits for pages from host memory, on which it can continue further. It is looked for
        once, when the sequence has room."""
        request_id = sequence.request.id
        if host.is_empty or sequence.scores_prompt or len(sequence.digests) - cached < host.min_pages:
            return False
        if host.was_asked(request_id) or not self.fits(sequence, cached):
            return False
        host.verify(sequence.digests)
        count = self._in_host(sequence, host)
        if host.agree(sequence.digests, cached, count):
            count = self._in_host(sequence, host)
        return host.fetch(request_id, sequence.digests, cached, count, self.start(sequence, count))

    def _in_host(self, sequence: Sequence, host: HostTier) -> int:
        """How many pages of its prefix it could continue after with what host memory has."""
        return self._states.usable(sequence, self._pages.match(sequence.digests, host.has_page), host.has_state)

    def admit(self, sequence: Sequence, cached: int, row: int, draft: StepDraft) -> None:
        """Gives a sequence that fits its row and what is known of its prefix: it continues after that with the step."""
        start = self.start(sequence, cached)
        sequence.pages = self._pages.hold(sequence.digests, cached, start)
        sequence.committed = cached
        sequence.computed = start
        sequence.row = row
        drawn = tuple(sequence.tokens[len(sequence.request.prompt) :])
        draft.new_rows.append((row, sequence.request, drawn))
        for group, held in enumerate(sequence.pages):
            if held.pages:
                draft.new_pages.append((row, group, held.first, tuple(held.pages)))
        resumes_tail = self._tails.resume(sequence, draft)
        self._states.admit(sequence, draft, resumes_tail=resumes_tail)
        if sequence.cached is None:
            sequence.cached = sequence.computed
