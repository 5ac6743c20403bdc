"""Calls whose parameters are between tags, in forms such as
`<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

Values are raw text; the tool's schema has their types. Models forget the marker around the function, so `<function=`
also opens a call, and `</function>` ends one. The arguments are streamed as JSON: text as it is written, other values
once they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from cortex.neuron.families.tool_calls import TagForm
from cortex.neuron.text.stops import held_suffix
from cortex.neuron.text.tools.call import NOTHING_YET, CallProgress, CallReader, NotACall, json_text, tool_name

_NAME_END: Final = re.compile(r"[>\n<]")
_QUOTED: Final = re.compile(r"""(["'])([^"']+)\1\s*(.*)""", re.DOTALL)
_STATED: Final[Mapping[str, Mapping[str, Any]]] = {
    'string="true"': {"type": "string"},
    'string="false"': {"type": ["object", "array", "number", "boolean", "null", "string"]},
}
"""The schema that the attribute of a parameter states."""
_FIRST_WORD: Final = re.compile(r"\s*([^\s<]+)(?=[\s<])")


class TagSyntax:
    bare_openings: tuple[str, ...] = ()
    next_openings: tuple[str, ...] = ()
    separators = ""

    def __init__(self, form: TagForm, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: each tool's parameters by its name."""
        self._form = form
        self._schemas = schemas
        self.openings = tuple(filter(None, (form.frame.opening, form.function_open)))
        self.markers = (
            *form.frame.markers,
            *(form.function_open, form.function_close, form.parameter_open, form.parameter_close),
            *form.parameter_name_close,
            *filter(None, (form.token,)),
        )
        self.never_text = tuple(filter(None, (form.token,)))

    def reader(self, opening: str) -> CallReader:
        return _Reader(self._form, self._schemas, is_wrapped=opening == self._form.frame.opening)


class _Reader:
    """Reads the call from the front; holds back only a short part that is not decided yet.

    It is a call once the function's name is followed by a parameter or by its end. A parameter then ends only where a
    next element follows, so that later text cannot make it invalid.
    """

    def __init__(self, form: TagForm, schemas: Mapping[str, Mapping[str, Any]], *, is_wrapped: bool) -> None:
        self._form = form
        self._schemas = schemas
        self._waiting = "" if is_wrapped else form.function_open
        self._name: str | None = None
        self._value: _TextValue | _WholeValue | None = None
        """The value of the parameter that is being read."""
        self._ready: list[str] = []
        """Argument text for the next progress."""
        self._begun = False
        """Whether the arguments, and with them the name, have been reported."""
        self._closed = False

    def feed(self, text: str) -> CallProgress:
        self._waiting += text
        had_begun = self._begun
        while not self._closed and self._advance():
            pass
        arguments, self._ready = "".join(self._ready), []
        name = self._name if self._begun and not had_begun else None
        return CallProgress(name, arguments, self._rest() if self._closed else None)

    def finish(self) -> CallProgress:
        """A complete function whose closing marker was cut off is still a call."""
        return CallProgress(rest="") if self._closed else NOTHING_YET

    def _rest(self) -> str | None:
        """The text after the call; None until it is certain whether a closing marker follows."""
        if not self._form.closing:
            return self._waiting
        try:
            end = _marker(self._waiting, self._form.closing)
        except NotACall:  # the function is complete; models also forget this marker
            return self._waiting
        return None if end is None else end.rest

    def _advance(self) -> bool:
        """Reads the next element; false if it is incomplete."""
        if self._value is not None:
            return self._read_value(self._value)
        if self._name is None:
            function = self._function(self._waiting)
            if function is None:
                return False
            self._name, self._waiting = tool_name(function.text), function.rest
            return True
        element = self._next_element(self._waiting)
        if element is None:
            return False
        (parameter, attributes), self._waiting = _attributes(element.text), element.rest
        if not parameter:
            self._ready.append("}" if self._begun else "{}")
            self._begun = self._closed = True
            return True
        schema = _STATED.get(attributes) or schema_of(self._schemas.get(self._name), parameter)
        layout = self._form.value_break
        self._value = _TextValue(layout) if is_text(schema) else _WholeValue(layout, schema)
        key = json_text(parameter)
        self._ready.append(f"{', ' if self._begun else '{'}{key}: {self._value.opening}")
        self._begun = True
        return True

    def _read_value(self, value: _TextValue | _WholeValue) -> bool:
        """Reads up to the first closing marker that a next element follows: a value may contain the marker."""
        marker = self._form.parameter_close
        text, close, rest = self._waiting.partition(marker)
        clear = len(text) if close else len(text) - held_suffix(text, marker)
        self._ready.append(value.take(text[:clear]))
        self._waiting = self._waiting[clear:]
        if not close:
            return False
        try:
            if self._next_element(rest) is None:
                return False
        except NotACall:
            self._ready.append(value.take(close))
        else:
            self._ready.append(value.end())
            self._value = None
        self._waiting = rest
        return True

    def _function(self, text: str) -> _Found | None:
        """The function's name; None while it is incomplete."""
        if not self._form.function_open:
            word = _FIRST_WORD.match(text)
            if word is None and text.lstrip().startswith("<"):
                raise NotACall
            return None if word is None else _Found(word.group(1), text[word.end() :])
        marker = _marker(text, self._form.function_open)
        return marker and _name(marker.rest, self._form.function_name_close)

    def _next_element(self, text: str) -> _Found | None:
        """The name of the next parameter, or "" for the function's end; None while it is incomplete."""
        marker = _marker(text, self._form.parameter_open, self._form.function_close)
        if marker is None:
            return None
        if marker.text == self._form.function_close:
            return _Found("", marker.rest)
        return _name(marker.rest, *self._form.parameter_name_close)


class _TextValue:
    """A string, streamed."""

    opening = '"'

    def __init__(self, layout: str) -> None:
        self._layout = layout
        self._is_empty = True
        self._held_break = ""

    def take(self, text: str) -> str:
        if text and self._is_empty:
            self._is_empty = False
            text = text.removeprefix(self._layout)
        text = self._held_break + text
        clear = text.removesuffix(self._layout)
        self._held_break = text[len(clear) :]
        return json_text(clear)[1:-1]

    def end(self) -> str:
        return '"'


class _WholeValue:
    """Any other value: its type is known once it is complete."""

    opening = ""

    def __init__(self, layout: str, schema: Mapping[str, Any]) -> None:
        self._layout = layout
        self._schema = schema
        self._pieces: list[str] = []

    def take(self, text: str) -> str:
        self._pieces.append(text)
        return ""

    def end(self) -> str:
        text = "".join(self._pieces).removeprefix(self._layout).removesuffix(self._layout)
        return json_text(typed(text, self._schema))


class _Found(NamedTuple):
    text: str
    rest: str


def _attributes(name: str) -> tuple[str, str]:
    """The name of a parameter, and the attributes after it where the name is quoted."""
    if quoted := _QUOTED.fullmatch(name):
        return quoted.group(2), quoted.group(3)
    return name.strip("\"'"), ""


def _marker(text: str, *markers: str) -> _Found | None:
    """One of `markers` after white space; None while it is incomplete; raises NotACall."""
    text = text.lstrip()
    for marker in markers:
        if text.startswith(marker):
            return _Found(marker, text[len(marker) :])
    if any(marker.startswith(text) for marker in markers):
        return None
    raise NotACall


def _name(text: str, *closings: str) -> _Found | None:
    """A name and the markers after it; None if the text ends before them; raises NotACall."""
    found = _NAME_END.search(text)
    if found is None:
        return None
    name, rest = text[: found.start()].strip(), text[found.start() :]
    if not name.strip("\"'"):
        raise NotACall
    for closing in closings:
        marker = _marker(rest, closing)
        if marker is None:
            return None
        rest = marker.rest
    return _Found(name, rest)


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a parameter of this schema is always text, so that it can be streamed."""
    kinds = _kinds(schema)
    return not kinds or kinds == {"string"}


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value of `text` for a parameter of this schema; text that does not fit stays text, for the tool to reject."""
    if is_text(schema):
        return text
    kinds = _kinds(schema)
    stripped = text.strip()
    if "boolean" in kinds and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if "null" in kinds and stripped.lower() in ("null", "none"):
        return None
    try:
        value = json.loads(stripped, strict=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value if _kind_of(value) & kinds else text


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty if it has none."""
    stated = schema.get("type")
    kinds = {stated} if isinstance(stated, str) else {kind for kind in stated or () if isinstance(kind, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(key) or ():
            if isinstance(option, Mapping):
                kinds |= _kinds(option)
    if not kinds:
        for value in schema.get("enum") or ():
            kinds |= _kind_of(value)
    if not kinds and "$ref" in schema:
        kinds = {"object", "array", "number", "integer", "boolean", "null", "string"}
    return kinds


def _kind_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def schema_of(parameters: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    properties = (parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}
