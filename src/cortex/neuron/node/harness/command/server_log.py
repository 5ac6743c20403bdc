"""The latest lines that the servers of one model wrote. They outlive the server, and are kept over several loads."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from itertools import groupby

from cortex.wire.node.model_log import ModelLog

_LINE_END = re.compile(rb"[\r\n]+")  # progress bars return to the begin of their line
_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])")
_KEPT_LINES = 500
_LINE_BYTES = 2000
_ERROR_LINES = 12


def _plain(line: bytes) -> str:
    """Without colours, and safe to show on a terminal."""
    text = _ESCAPE.sub(b"", line).decode("utf-8", "replace")
    return "".join(character if character.isprintable() else " " for character in text).strip()


def _folded(lines: Sequence[str]) -> list[str]:
    """The last `_ERROR_LINES`, where equal lines in a row are one with their number."""
    runs = [(line, sum(1 for _ in equal)) for line, equal in groupby(lines)]
    return [line if num == 1 else f"{line} ({num} times)" for line, num in runs[-_ERROR_LINES:]]


class ServerLog:
    """Bounded. Owned by the loop."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._num_lines = 0
        self._began = 0
        self._last_lines: str | None = None
        """The last lines of a server that has ended; None: it runs."""
        self._rest = b""

    def begin(self, title: str) -> None:
        """A server is about to start; lines before this are of earlier ones."""
        self._rest, self._last_lines = b"", None
        self._append(title)
        self._began = self._num_lines

    def feed(self, data: bytes) -> list[str]:
        """Takes output of the server, with the end of it as empty bytes; returns the lines that are complete."""
        *lines, rest = _LINE_END.split(self._rest + data) if data else (self._rest, b"")
        self._rest = rest[-_LINE_BYTES:]
        texts = [text for line in lines if (text := _plain(line[:_LINE_BYTES]))]
        for text in texts:
            self._append(text)
        return texts

    def end(self, title: str) -> None:
        """The server has ended, and all its output was fed. `last_lines` stay without this title."""
        self._last_lines = self.last_lines
        self._append(title)

    @property
    def last_lines(self) -> str:
        """The end of the output of the current server, for an error. Equal lines in a row, such as those of health
        checks, count as one."""
        if self._last_lines is not None:
            return self._last_lines
        num_own = min(self._num_lines - self._began, len(self._lines))
        lines = _folded(list(self._lines)[-num_own:]) if num_own else []
        return f"; the end of its log: {' | '.join(lines)}" if lines else "; it wrote nothing"

    def since(self, after: int) -> ModelLog:
        """The lines that followed the first `after` ones, as far as they are kept. A number from the future, of a node
        that was restarted since, counts as none."""
        num_new = self._num_lines - after if after <= self._num_lines else self._num_lines
        num_shown = min(num_new, len(self._lines))
        return ModelLog(lines=tuple(self._lines)[-num_shown:] if num_shown else (), next=self._num_lines)

    def _append(self, text: str) -> None:
        self._lines.append(text)
        self._num_lines += 1
