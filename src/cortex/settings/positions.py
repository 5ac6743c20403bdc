"""Line numbers of the keys in a TOML text, for error messages. `tomllib` does not keep them.

The scan relies on `tomllib` having accepted the text: it only steps over values and does not check them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY_PART = re.compile(r"""[ \t]*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)[ \t]*""")
_STRING = re.compile(r'''"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*\'''', re.DOTALL)


def positions(text: str) -> dict[Path, int]:
    """Line number (from 1) of every table header and every key written as a statement.

    Keys inside inline tables and arrays are not listed: `line_of` falls back to what contains them.
    """
    return _Scan(text).run()


def line_of(path: Path, known: Mapping[Path, int]) -> int | None:
    """The line of `path`, or of the nearest enclosing table or statement that has one."""
    while path:
        if path in known:
            return known[path]
        path = path[:-1]
    return None


class _Scan:
    def __init__(self, text: str) -> None:
        self.text = text
        self.offset = 0
        self.lines: dict[Path, int] = {}
        self.lengths: dict[Path, int] = {}
        """Number of `[[headers]]` of each array of tables so far."""

    def run(self) -> dict[Path, int]:
        table: Path = ()
        while self._skip_blank() < len(self.text):
            line = self.text.count("\n", 0, self.offset) + 1
            if self.text.startswith("[[", self.offset):
                table = self._element(self._header(2))
            elif self.text.startswith("[", self.offset):
                table = self._resolve(self._header(1))
            else:
                key = (*table, *self._key())
                self.offset += 1  # "="
                self._skip_value()
                self._note(key, line)
                continue
            self._note(table, line)
        return self.lines

    def _note(self, path: Path, line: int) -> None:
        self.lines.setdefault(path, line)

    def _skip_blank(self) -> int:
        match = _BLANK.match(self.text, self.offset)
        assert match is not None  # the pattern matches the empty string
        self.offset = match.end()
        return self.offset

    def _header(self, brackets: int) -> Path:
        self.offset += brackets
        key = self._key()
        self.offset += brackets
        return key

    def _key(self) -> Path:
        parts: list[str] = []
        while match := _KEY_PART.match(self.text, self.offset):
            part = match.group(1)
            if part[0] in "\"'":
                part = tomllib.loads(f"x = {part}")["x"]
            parts.append(part)
            self.offset = match.end()
            if not self.text.startswith(".", self.offset):
                break
            self.offset += 1
        return tuple(parts)

    def _resolve(self, header: Path) -> Path:
        """`header` with the current index after every array of tables on the way."""
        resolved: Path = ()
        for part in header:
            resolved = (*resolved, part)
            if resolved in self.lengths:
                resolved = (*resolved, self.lengths[resolved] - 1)
        return resolved

    def _element(self, header: Path) -> Path:
        array = (*self._resolve(header[:-1]), header[-1])
        self.lengths[array] = self.lengths.get(array, 0) + 1
        return (*array, self.lengths[array] - 1)

    def _skip_value(self) -> None:
        depth = 0
        while self.offset < len(self.text):
            character = self.text[self.offset]
            if character in "\"'" and (match := _STRING.match(self.text, self.offset)):
                self.offset = match.end()
                continue
            if character == "#":
                self._skip_comment()
                continue
            if character == "\n" and depth == 0:
                return
            depth += (character in "[{") - (character in "]}")
            self.offset += 1

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.offset)
        self.offset = len(self.text) if end < 0 else end
