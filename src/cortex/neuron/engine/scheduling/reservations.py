"""The pages that running sequences may still need: a sequence is admitted only if they stay free."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from cortex.neuron.engine.kv.page_groups import KVPages
from cortex.neuron.engine.scheduling.sequence import Sequence


class Reservations:
    """Looks at each running sequence once in a step: a burst of requests is admitted in one step, and would otherwise
    take a time that grows with the square of their number. Belongs to the engine thread."""

    def __init__(self, pages: KVPages, reserved_tokens: int) -> None:
        """`reserved_tokens`: see `SchedulerLimits`."""
        self._pages = pages
        self._reserved_tokens = reserved_tokens
        self._lacking = [0] * len(pages.groups)
        self._num_counted = 0
        """How many of the running sequences, from the first, are in the sum."""

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
        """The positions that are counted for a sequence: its tokens and the reserved part of its response."""
        allowed = sequence.request.max_tokens - sequence.num_drawn
        return sequence.length + max(1, min(self._reserved_tokens, allowed))
