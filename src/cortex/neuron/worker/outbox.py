"""What a worker has to say, gathered until its writer thread sends it. Any thread may put, one takes."""

from __future__ import annotations

import threading

from cortex.neuron.worker.protocol import Event


class Outbox:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._changed = threading.Condition()

    def put(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify()

    def take(self, timeout_s: float) -> list[Event]:
        """Everything gathered so far; waits up to `timeout_s` for the first event, then gives an empty list."""
        with self._changed:
            if not self._events:
                self._changed.wait(timeout_s)
            events, self._events = self._events, []
            return events
