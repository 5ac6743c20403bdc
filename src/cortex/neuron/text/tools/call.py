"""A tool call as it is read from text, before it has an id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class NotACall(Exception):
    """What looked like a tool call is not one; the scanner emits it as text."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_json(self) -> str:
        """Always a valid JSON object, even if the model's own text is not."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class CallProgress:
    """What a piece of text added to a call."""

    name: str | None = None
    """The called tool, set once: from then on it is a call and cannot become text again."""
    arguments: str = ""
    """The next piece of the arguments' JSON text; only after or together with the name."""
    rest: str | None = None
    """The text after the call, once the call is complete."""


NOTHING_YET = CallProgress()


class CallReader(Protocol):
    """Reads one call, from the text after its opening. The joined arguments do not depend on the split."""

    def feed(self, text: str) -> CallProgress:
        """Call it until it returns a rest. Raises NotACall as soon as that is certain, and never after a name."""

    def finish(self) -> CallProgress:
        """After the last text. Without a rest, the call was cut off. Raises NotACall like `feed`."""


class CallSyntax(Protocol):
    """The syntax in which a model writes tool calls."""

    openings: tuple[str, ...]
    """What begins a call anywhere in the text."""
    bare_openings: tuple[str, ...]
    """What begins a call only at the start of the response, or right after another call."""
    separators: str
    """Characters that may separate two calls."""

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
