"""Finds the end of a JSON object in a stream, without parsing it twice."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

_STRUCTURE: Final = re.compile(r'[{}"]')
_STRING_EVENT: Final = re.compile(r'["\\\x00-\x1f]')


class Scanned(NamedTuple):
    """The part of an object in a piece of text."""

    text: str
    """The text of the object. Raw line breaks in strings, which models do write, are escaped."""
    end: int | None
    """Number of characters of the piece that belong to the object; None while the object continues."""


class ObjectScanner:
    """Scans an object from its opening brace on. Constant state, linear time."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, *, depth: int = 0) -> Scanned:
        """Scans until only `depth` objects are open: 0 is the end of the outermost."""
        kept: list[str] = []
        taken = position = 0
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = (_STRING_EVENT if self._in_string else _STRUCTURE).search(text, position)
            if found is None:
                break
            position = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = True
                case "{":
                    self._depth += 1
                case "}":
                    self._depth -= 1
                    if self._depth == depth:
                        return Scanned("".join([*kept, text[taken:position]]), position)
                case control:
                    kept += [text[taken : found.start()], json.dumps(control)[1:-1]]
                    taken = position
        return Scanned("".join([*kept, text[taken:]]), None)
