"""Finds where the events of a stream end, without parsing them."""

from __future__ import annotations

import re

BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
"""What ends an event."""
_COMMENTS = re.compile(rb"(?::[^\r\n]*[\r\n]+)+")
_CARRIAGE_RETURN = 0x0D
_MAX_HELD_BYTES = 256 * 1024


def after_keepalives(events: bytes, keepalive: bytes) -> bytes:
    """Whole `events` without the keepalives (`keepalive` itself, and comments) that they begin with."""
    while events.startswith((keepalive, b":")):
        comments = _COMMENTS.match(events)
        events = events[comments.end() if comments else len(keepalive) :]
    return events


class EventBoundary:
    """Passes on whole events and holds back the beginning of an incomplete one.

    Servers write an event in one piece, so in practice nothing is held back. But when a node fails or pauses inside an
    event, a keepalive or an error must not follow half a line. An event too long to hold is passed on in pieces.
    """

    __slots__ = ("_held", "inside")

    def __init__(self) -> None:
        self._held = b""
        self.inside = False
        """The last bytes passed on ended inside an event: nothing else may be sent now."""

    @property
    def is_between_events(self) -> bool:
        """Everything pushed has been passed on, and it ended with a whole event."""
        return not self.inside and not self._held

    def push(self, data: bytes) -> bytes:
        """The bytes to pass on: up to the end of the last whole event."""
        if self._held:
            data = self._held + data
            self._held = b""
        if data.endswith(BLANK_LINES):
            self.inside = False
            return data
        end = data.rfind(b"\n\n") + 2
        rest = data[end:]
        if end > 1 and len(rest) <= _MAX_HELD_BYTES and _CARRIAGE_RETURN not in rest:  # as in nearly every stream
            self.inside = False
            self._held = rest
            return data[:end]
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
        """What is still held back when the stream has ended; comments that no blank line ended were for the relay."""
        held, self._held = self._held, b""
        if not held.startswith(b":"):
            return held
        is_one_line = held.find(b"\n") == len(held) - 1
        return b"" if is_one_line or _COMMENTS.fullmatch(held) else held

    def escape(self) -> bytes:
        """Bytes that end an event that was passed on in part, if there is one, so that another can follow."""
        return b"\n\n" if self.inside else b""


class LineBoundary:
    """The same for streams whose events are lines of JSON. A line that begins with a colon, and all that follows it, is
    for the relay; spaces before a line are keepalives."""

    __slots__ = ("_held", "inside")

    def __init__(self) -> None:
        self._held = b""
        self.inside = False
        """As in `EventBoundary`."""

    @property
    def is_between_events(self) -> bool:
        return not self.inside and not self._held

    def push(self, data: bytes) -> bytes:
        data, self._held = self._held + data, b""
        comment = 0 if data.startswith(b":") and not self.inside else data.find(b"\n:") + 1 or None
        if comment is not None:
            self.inside = False
            self._held = b":"  # the rest is not needed here
            return data[:comment]
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        if len(rest) > _MAX_HELD_BYTES or (self.inside and not end):
            self.inside = True
            return data
        self.inside = False
        self._held = rest.lstrip(b" ")
        return data[:end]

    def flush(self) -> bytes:
        """An unfinished line; nothing where what is held back is for the relay."""
        held, self._held = self._held, b""
        return b"" if held.startswith(b":") else held

    def escape(self) -> bytes:
        return b"\n" if self.inside else b""
