"""The latest lines that the servers of one model wrote. They outlive the server, and are kept over several loads."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from itertools import groupby

from cortex.wire.node.model_log import ModelLog

_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])")
_KEPT_LINES = 500
_KEPT_BYTES = 1 << 19
_LINE_BYTES = 2000
_ERROR_LINES = 12


def plain_lines(output: bytes) -> list[str]:
    """The lines of a server's output that show something."""
    return [text for line in output.replace(b"\r", b"\n").split(b"\n") if (text := _plain(line[:_LINE_BYTES]))]


def _plain(line: bytes) -> str:
    """Without colours, and safe to show on a terminal."""
    text = _ESCAPE.sub(b"", line).decode("utf-8", "replace")
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    return text.strip()


def _folded(lines: Sequence[str]) -> list[str]:
    """The last `_ERROR_LINES`, where equal lines in a row are one with their number."""
    runs = [(line, sum(1 for _ in equal)) for line, equal in groupby(lines)]
    return [line if num == 1 else f"{line} ({num} times)" for line, num in runs[-_ERROR_LINES:]]


class ServerLog:
    """Bounded. A thread feeds it the output of a server, in blocks as large as they come; every thread may read it. It
    counts the lines of a block and keeps it as it is: lines are made of it when somebody reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: deque[bytes] = deque()
        self._num_bytes = 0
        """In `_blocks`."""
        self._num_lines = 0
        """That have ended, empty ones too."""
        self._began = 0
        self._last_lines: str | None = None
        """The last lines of a server that has ended; None: it runs."""
        self._is_cut = False
        """What is kept begins in the middle of a line."""

    def begin(self, title: str) -> None:
        """A server is about to start; lines before this are of earlier ones."""
        with self._lock:
            self._last_lines = None
            self._append(f"{title}\n".encode())
            self._began = self._num_lines

    def feed(self, data: bytes) -> None:
        """Takes output of the server, with the end of it as empty bytes."""
        with self._lock:
            if data:
                self._append(data.replace(b"\r", b"\n"))  # progress bars return to the begin of their line
            elif self._blocks and not self._blocks[-1].endswith(b"\n"):
                self._append(b"\n")

    def end(self, title: str) -> None:
        """The server has ended, and all its output was fed. `last_lines` stay without this title."""
        last_lines = self.last_lines
        with self._lock:
            self._last_lines = last_lines
            self._append(f"{title}\n".encode())

    @property
    def last_lines(self) -> str:
        """The end of the output of the current server, for an error. Equal lines in a row, such as those of health
        checks, count as one."""
        with self._lock:
            if self._last_lines is not None:
                return self._last_lines
            own = self._following(self._began)
        lines = _folded(plain_lines(own))
        return f"; the end of its log: {' | '.join(lines)}" if lines else "; it wrote nothing"

    def has(self, pattern: re.Pattern[bytes]) -> bool:
        """Whether it occurs in what is kept of the current server's output: several processes of a server may write
        pages of tracebacks after the reason of its end."""
        with self._lock:
            return pattern.search(self._following(self._began)) is not None

    def since(self, after: int) -> ModelLog:
        """The lines that followed the first `after` ones, as far as they are kept. A number from the future, of a node
        that was restarted since, counts as none."""
        with self._lock:
            following, new = self._num_lines, self._following(after if after <= self._num_lines else 0)
        return ModelLog(lines=tuple(plain_lines(new)[-_KEPT_LINES:]), next=following)

    def _following(self, after: int) -> bytes:
        """What is kept of the lines that have ended, without the first `after` ones."""
        kept = b"".join(self._blocks)
        kept = kept[kept.find(b"\n") + 1 if self._is_cut else 0 : kept.rfind(b"\n") + 1]
        if (num_new := self._num_lines - after) <= 0:
            return b""
        lines = kept.split(b"\n")  # the last one is empty
        return b"\n".join(lines[-num_new - 1 :])

    def _append(self, data: bytes) -> None:
        self._num_lines += data.count(b"\n")
        if len(data) > _KEPT_BYTES:
            data = data[-_KEPT_BYTES:]
            self._blocks.clear()
            self._num_bytes, self._is_cut = 0, True
        self._blocks.append(data)
        self._num_bytes += len(data)
        while self._num_bytes - len(self._blocks[0]) >= _KEPT_BYTES:
            self._num_bytes -= len(self._blocks.popleft())
            self._is_cut = True
