"""A tool call as it is read from text, before it has an id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class NotACall(Exception):
    """What looked like a tool call is not one; the scanner gives it on as text."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_json(self) -> str:
        """Always a valid JSON object, whatever small liberties the model took."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class CallProgress:
    """What a piece of text added to a call."""

    name: str | None = None
    """Whom it calls, told once: from then on it is a call and cannot become text again."""
    arguments: str = ""
    """The next piece of the arguments' JSON text; only after or together with the name."""
    rest: str | None = None
    """The text that came after the call, once it is complete."""


NOTHING_YET = CallProgress()


class CallReader(Protocol):
    """Reads one call from just after its opening. What it tells, arguments joined, does not depend on the split."""

    def feed(self, text: str) -> CallProgress:
        """Fed until it gives a rest. Raises NotACall as soon as that is clear, and never after it gave a name."""

    def finish(self) -> CallProgress:
        """No more text comes. Without a rest, a call that was begun has been cut off. Raises NotACall as `feed`."""


class CallSyntax(Protocol):
    """How a model writes tool calls."""

    openings: tuple[str, ...]
    """What begins a call anywhere in the text."""
    bare_openings: tuple[str, ...]
    """What begins a call only at the start of the answer, or right after another call."""
    separators: str
    """Characters that may stand between two calls."""

    def reader(self, opening: str) -> CallReader: ...


def call_from_json(text: str) -> Call:
    """`{"name": …, "arguments": …}` and its variants; raises NotACall."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotACall from error
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise NotACall
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name:
        raise NotACall
    return Call(name, _object(value.get("arguments", value.get("parameters"))))


def _object(arguments: Any) -> dict[str, Any]:
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError) as error:
            raise NotACall from error
    if not isinstance(arguments, dict):
        raise NotACall
    return arguments
