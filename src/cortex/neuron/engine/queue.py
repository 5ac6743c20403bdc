"""The waiting line: first come first served within a principal, fair between principals."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping

from cortex.neuron.engine.sequence import Sequence


class FairQueue:
    """Sequences that wait for a row. Preempted ones stand in front of their principal's line."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Sequence]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for line in self._lines.values():
            yield from line

    def push(self, sequence: Sequence) -> None:
        self._lines.setdefault(sequence.request.principal, deque()).append(sequence)

    def push_front(self, sequence: Sequence) -> None:
        self._lines.setdefault(sequence.request.principal, deque()).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that is in line."""
        principal = sequence.request.principal
        self._lines[principal].remove(sequence)
        if not self._lines[principal]:
            del self._lines[principal]

    def heads(self, running: Mapping[str, int]) -> list[Sequence]:
        """The first of every line, the principal with the fewest running sequences first.

        The anonymous principal takes what is left: it comes last among equals and counts one more than it runs.
        """

        def share(principal: str) -> tuple[int, bool]:
            is_anonymous = principal == ""
            return running.get(principal, 0) + is_anonymous, is_anonymous

        return [self._lines[principal][0] for principal in sorted(self._lines, key=share)]
