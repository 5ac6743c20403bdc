"""A tool call as it is read from text, before it has an id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

_AFTER_NAME: Final = re.compile(r"[<\[]")


class NotACall(Exception):
    """Text that looked like a tool call is not one; the scanner emits it as text."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_json(self) -> str:
        """Always a valid JSON object, even if the model's own text is not. Raises NotACall for an infinite number."""
        try:
            return json_text(self.arguments)
        except (ValueError, RecursionError) as error:
            raise NotACall from error


@dataclass(frozen=True, slots=True)
class CallProgress:
    """The progress of a call with a piece of text."""

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
        """Call it after the last text. Without a rest, the call was cut off: the part that was read is markup, not
        text. Raises NotACall like `feed`."""


class CallSyntax(Protocol):
    """The syntax in which a model writes tool calls."""

    openings: tuple[str, ...]
    """Markers that begin a call anywhere in the text."""
    bare_openings: tuple[str, ...]
    """Markers that begin a call only at the start of the response, or right after another call."""
    next_openings: tuple[str, ...]
    """Markers that begin a call only right after another call: the next item of a list."""
    separators: str
    """Characters that may separate two calls."""
    markers: tuple[str, ...]
    """Every marker that the syntax reads and that may be a token of its own."""
    never_text: tuple[str, ...]
    """Control tokens among the markers: outside of calls they are dropped."""

    def reader(self, opening: str) -> CallReader: ...


def tool_name(text: str) -> str:
    """The name of a tool, from what a model wrote as one: without quotes and without a marker after it. Raises
    NotACall."""
    name = well_formed(_AFTER_NAME.split(text, maxsplit=1)[0]).strip().strip("\"'")
    if not name:
        raise NotACall
    return name


def json_text(value: Any) -> str:
    """The JSON text of a value. Half of a surrogate pair, which cannot be encoded, stays an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text == well_formed(text) else json.dumps(value)


def well_formed(text: str) -> str:
    """`text` with its surrogate pairs joined, and U+FFFD for half of one."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
    name = value.get("name", value.get("tool_name", value.get("function")))
    if not isinstance(name, str):
        raise NotACall
    return Call(tool_name(name), _object(value.get("arguments", value.get("parameters"))))


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
