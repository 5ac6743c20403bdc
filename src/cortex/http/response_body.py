"""The body of a node's response: which bytes may be passed on, and its end, where usage is reported."""

from __future__ import annotations

from collections.abc import Callable

from cortex.http.event_boundary import EventBoundary, LineBoundary
from cortex.http.observer import Translation
from cortex.http.passthrough import WHOLE_EVENTS, WHOLE_LINES, BodyTail, ChunkPassthrough
from cortex.http.server.exchange import Exchange


class ResponseBody:
    """The body of one response. Its events are passed on whole, or rewritten by a translation."""

    __slots__ = ("_boundary", "_passthrough", "_tail", "translation")

    def __init__(self, translation: Translation | None = None) -> None:
        self.translation = translation
        """Set before the first `push`."""
        self._tail = BodyTail()
        self._boundary: EventBoundary | LineBoundary | None = None
        self._passthrough: ChunkPassthrough | None = None

    @property
    def tail(self) -> BodyTail:
        """The end of the body so far, as the node sent it."""
        if self._passthrough is not None:
            self._passthrough.fold()
        return self._tail

    @property
    def is_inside_event(self) -> bool:
        """The last bytes that `push` returned ended inside an event: nothing else may be sent now."""
        return self._boundary is not None and self._boundary.inside

    def begin_events(self, *, has_lines: bool = False) -> None:
        """The body is an event stream; with `has_lines` each event is a line."""
        if self.translation is None:  # translations return whole events
            self._boundary = LineBoundary() if has_lines else EventBoundary()

    def push(self, data: bytes) -> bytes:
        """The bytes to pass on now; may be empty. Raises `UpstreamFault` when they cannot be translated."""
        if self._passthrough is not None:
            self._passthrough.fold()
        self._tail.push(data)
        if self._boundary is not None:
            return self._boundary.push(data)
        return data if self.translation is None else self.translation.push(data)

    def finish(self) -> bytes:
        """What is left to pass on at the end. Raises `UpstreamFault` when the response is not complete."""
        if self.translation is not None:
            return self.translation.finish()
        return self._boundary.flush() if self._boundary is not None else b""

    def escape(self) -> bytes:
        """Bytes that end an event that was passed on in part, if there is one, so that another can follow."""
        return self._boundary.escape() if self._boundary is not None else b""

    def chunk_receiver(
        self, exchange: Exchange, capture: Callable[[bytes], None] | None
    ) -> Callable[[bytes], bool] | None:
        """The fast path, between two events of a stream that the client gets in chunks; else None. `capture` gets what
        passes there."""
        if self._boundary is None or not self._boundary.is_between_events:
            return None
        if self._passthrough is None:
            write = exchange.chunk_writer()
            if write is None:
                return None
            ends = WHOLE_LINES if isinstance(self._boundary, LineBoundary) else WHOLE_EVENTS
            self._passthrough = ChunkPassthrough(write, self._tail, capture, ends)
        return self._passthrough.take

    def has_passed_chunks(self) -> bool:
        """Whether the fast path was used since the last call."""
        passthrough = self._passthrough
        if passthrough is None or not passthrough.is_active:
            return False
        passthrough.is_active = False
        return True
