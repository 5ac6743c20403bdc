"""One request's outputs, delivered to a follower as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cortex.neuron.engine.request import StepOutput
from cortex.wire.errors import CortexError

Receive = Callable[[Sequence[StepOutput]], None]
"""Takes the next outputs, in order. Must not raise."""
Fail = Callable[[CortexError], None]
"""Takes the error that ended the sequence, after its outputs. Must not raise."""


class Generation:
    """Delivers outputs at once, on the loop's thread and without a task: an event of a stream costs no switch.

    Outputs are kept before `follow` and between `pause` and `resume`; `max_tokens` bounds their number. The last one
    has a `finish`, unless the request failed.
    """

    __slots__ = (
        "_ended",
        "_error",
        "_fail",
        "_is_paused",
        "_on_cancel",
        "_receive",
        "_unread",
        "energy_j",
        "queued_s",
        "request_id",
    )

    def __init__(self, request_id: str, on_cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.energy_j = 0.0
        """Its energy, once it has ended."""
        self.queued_s = 0.0
        """How long it waited for its slot."""
        self._on_cancel = on_cancel
        self._receive: Receive | None = None
        self._fail: Fail | None = None
        self._is_paused = False
        self._unread: list[StepOutput] = []
        self._error: CortexError | None = None
        self._ended = False

    def follow(self, receive: Receive, fail: Fail) -> None:
        """Call `receive` with kept and future outputs, and `fail` if the request fails."""
        self._receive, self._fail = receive, fail
        self._deliver()

    def pause(self) -> None:
        """Hold outputs until `resume`, which delivers them as one batch."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._deliver()

    def cancel(self) -> None:
        """Ends the request in any phase. May be called at any time and repeatedly."""
        if not self._ended:
            self._on_cancel()

    # For the instance

    def push(self, output: StepOutput) -> None:
        if self._ended:
            return
        self._ended = output.finish is not None
        if self._receive is None or self._is_paused:
            self._unread.append(output)
        else:
            try:
                self._receive((output,))
            except Exception:
                self._ended = False  # it can still fail
                raise

    def fail(self, error: CortexError) -> None:
        """Ends the generation: the follower gets the unread outputs, then `error`."""
        if self._ended:
            return
        self._error, self._ended = error, True
        self._deliver()

    def _deliver(self) -> None:
        if self._receive is None or self._is_paused:
            return
        if self._unread:
            batch, self._unread = self._unread, []
            self._receive(batch)
        if self._error is not None and self._fail is not None and not self._is_paused:
            error, self._error = self._error, None
            self._fail(error)
