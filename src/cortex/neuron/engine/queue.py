"""The queue of waiting sequences: first come first served within a principal, fair between principals."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping

from cortex.neuron.engine.sequence import Sequence


class FairQueue:
    """Sequences that wait for a row. Preempted ones go to the front of their principal's queue."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Sequence]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def push(self, sequence: Sequence) -> None:
        self._queues.setdefault(sequence.request.principal, deque()).append(sequence)

    def push_front(self, sequence: Sequence) -> None:
        self._queues.setdefault(sequence.request.principal, deque()).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a queued sequence."""
        principal = sequence.request.principal
        self._queues[principal].remove(sequence)
        if not self._queues[principal]:
            del self._queues[principal]

    def heads(self, running: Mapping[str, int]) -> list[Sequence]:
        """The first sequence of every principal, the principal with the fewest running sequences first.

        The anonymous principal has the lowest priority: it comes last among equals, and counts as running one more.
        """

        def share(principal: str) -> tuple[int, bool]:
            is_anonymous = principal == ""
            return running.get(principal, 0) + is_anonymous, is_anonymous

        return [self._queues[principal][0] for principal in sorted(self._queues, key=share)]
