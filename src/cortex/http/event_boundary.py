"""Where one event of a stream ends and the next begins, without reading the events."""

from __future__ import annotations

import re

BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
"""What ends an event."""
_COMMENTS = re.compile(rb"(?::[^\r\n]*[\r\n]+)+")
_MAX_HELD_BYTES = 256 * 1024


def after_keepalives(events: bytes, keepalive: bytes) -> bytes:
    """Whole `events` without what only says, at their beginning, that somebody is there: `keepalive` and comments."""
    while events.startswith((keepalive, b":")):
        comments = _COMMENTS.match(events)
        events = events[comments.end() if comments else len(keepalive) :]
    return events


class EventBoundary:
    """Passes whole events and holds back the beginning of an incomplete one.

    Servers write an event in one piece, so in practice nothing is held; but when a node dies or pauses inside an event,
    what we say next must not be glued to half a line. An event too long to hold is passed on in pieces.
    """

    __slots__ = ("_held", "inside")

    def __init__(self) -> None:
        self._held = b""
        self.inside = False
        """The last bytes passed on ended within an event: nothing else may be said now."""

    @property
    def is_between_events(self) -> bool:
        """All that was pushed has been passed on, and it was whole."""
        return not self.inside and not self._held

    def push(self, data: bytes) -> bytes:
        """The bytes that may go on, up to the end of the last whole event."""
        if self._held:
            data = self._held + data
            self._held = b""
        if data.endswith(BLANK_LINES):
            self.inside = False
            return data
        end = max(data.rfind(blank) + len(blank) if blank in data else 0 for blank in BLANK_LINES)
        if len(data) - end > _MAX_HELD_BYTES:
            self.inside = True
            return data
        if end:
            self.inside = False
        if self.inside:
            return data
        self._held = data[end:]
        return data[:end]

    def flush(self) -> bytes:
        """What is still held, when the stream ended as it should."""
        held, self._held = self._held, b""
        return held

    def escape(self) -> bytes:
        """Bytes that end the event we are inside of, if any, so that another can follow."""
        return b"\n\n" if self.inside else b""
