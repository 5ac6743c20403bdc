"""Finds where a JSON object in a stream ends, without parsing it twice."""

from __future__ import annotations

import re
from typing import Final

_STRUCTURE: Final = re.compile(r'[{}"]')
_STRING_END: Final = re.compile(r'["\\]')


class ObjectScanner:
    """Fed an object from its opening brace on; constant state, linear time."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """How many characters of `text` belong to the object once it is complete, else None."""
        position = 0
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = (_STRING_END if self._in_string else _STRUCTURE).search(text, position)
            if found is None:
                return None
            position = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = True
                case "{":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        return position
        return None
