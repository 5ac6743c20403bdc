"""The latest output lines of one model's servers, kept after a server ends and over several loads."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from itertools import groupby

from cortex.wire.node.orders import ModelLog

_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])")
_KEPT_LINES = 500
_KEPT_BYTES = 1 << 19
_LINE_BYTES = 2000
_ERROR_LINES = 12


def plain_lines(output: bytes) -> list[str]:
    """The lines of a server's output that are not blank."""
    return [text for line in output.replace(b"\r", b"\n").split(b"\n") if (text := _plain(line[:_LINE_BYTES]))]


def _plain(line: bytes) -> str:
    """The line without colours, safe to print on a terminal."""
    text = _ESCAPE.sub(b"", line).decode("utf-8", "replace")
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    return text.strip()


def _folded(lines: Sequence[str]) -> list[str]:
    """The last `_ERROR_LINES`, with repeated lines merged and counted."""
    runs = [(line, sum(1 for _ in equal)) for line, equal in groupby(lines)]
    return [line if num == 1 else f"{line} ({num} times)" for line, num in runs[-_ERROR_LINES:]]


class ServerLog:
    """Bounded. A thread feeds it blocks of a server's output; any thread may read. Lines of a block are counted at once
    but split only on reading."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: deque[bytes] = deque()
        self._num_bytes = 0
        """In `_blocks`."""
        self._num_lines = 0
        """Complete lines, including empty ones."""
        self._began = 0
        self._last_lines: str | None = None
        """The last lines of an ended server; None while it runs."""
        self._is_cut = False
        """Whether the kept output begins in the middle of a line."""

    def begin(self, title: str) -> None:
        """A server is about to start; earlier lines belong to earlier servers."""
        with self._lock:
            self._last_lines = None
            self._append(f"{title}\n".encode())
            self._began = self._num_lines

    def feed(self, data: bytes) -> None:
        """Adds output of the server; empty bytes mark its end."""
        with self._lock:
            if data:
                self._append(data.replace(b"\r", b"\n"))  # progress bars return to the start of their line
            elif self._blocks and not self._blocks[-1].endswith(b"\n"):
                self._append(b"\n")

    def end(self, title: str) -> None:
        """The server has ended, and all its output was fed. `last_lines` do not include this title."""
        last_lines = self.last_lines
        with self._lock:
            self._last_lines = last_lines
            self._append(f"{title}\n".encode())

    @property
    def last_lines(self) -> str:
        """The end of the current server's output, for an error. Repeated lines, such as those of health checks, count
        as one."""
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
        """The kept lines after the first `after` ones. A number beyond the end, from before a restart of the node,
        counts as 0."""
        with self._lock:
            following, new = self._num_lines, self._following(after if after <= self._num_lines else 0)
        return ModelLog(lines=tuple(plain_lines(new)[-_KEPT_LINES:]), next=following)

    def _following(self, after: int) -> bytes:
        """The kept complete lines, without the first `after` ones."""
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
