"""Adds the usage report for the gateway to a stream in any dialect."""

from __future__ import annotations

from collections.abc import Callable

from cortex.wire import usage_report
from cortex.wire.dialects import EventEncoder
from cortex.wire.events import AnyEvent, Failure, Finish, Usage


class MeteredEncoder:
    """A dialect's encoder that appends the usage report to the last event. One per response.

    `usage` is read when the last choice has finished, or when the stream fails.
    """

    def __init__(self, encoder: EventEncoder, usage: Callable[[], Usage], *, num_choices: int) -> None:
        self._encoder = encoder
        self._usage = usage
        self._num_unfinished = num_choices

    def encode(self, event: AnyEvent) -> bytes:
        data = self._encoder.encode(event)
        if isinstance(event, Finish):
            self._num_unfinished -= 1
            is_last = self._num_unfinished == 0
        else:
            is_last = isinstance(event, Failure)
        return data + usage_report.comment(self._usage()) if is_last else data
