"""Puts the events of a stream together that the relay passes on in pieces, because they are long."""

from __future__ import annotations

from cortex.http.event_boundary import BLANK_LINES

_LONGEST_BLANK_LINE = max(map(len, BLANK_LINES))


class WholeEvents:
    """Keeps an unfinished event until its end arrives. Longer ones than `max_bytes` are dropped and counted."""

    __slots__ = ("_is_dropping", "_max_bytes", "_unfinished", "num_dropped")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unfinished = bytearray()
        self._is_dropping = False
        """The end of the unfinished event belongs to one that is dropped."""
        self.num_dropped = 0

    def push(self, data: bytes) -> bytes:
        """The events that are whole now, with line feeds as line ends; may be empty."""
        if not self._unfinished and data.endswith(b"\n\n"):  # as nearly always
            return data
        unfinished = self._unfinished
        searched_from = max(0, len(unfinished) - _LONGEST_BLANK_LINE)
        unfinished += data
        ends = [(unfinished.rfind(blank, searched_from), len(blank)) for blank in BLANK_LINES]
        end = max(at + length if at >= 0 else 0 for at, length in ends)
        whole = bytes(unfinished[:end]).replace(b"\r\n", b"\n")
        del unfinished[:end]
        if whole and self._is_dropping:
            self._is_dropping = False
            whole = whole.partition(b"\n\n")[2]
        if len(unfinished) > self._max_bytes:
            self.num_dropped += not self._is_dropping
            self._is_dropping = True
            del unfinished[:-_LONGEST_BLANK_LINE]  # it may be the beginning of a blank line
        return whole
