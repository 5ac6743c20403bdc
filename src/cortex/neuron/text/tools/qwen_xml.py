"""Qwen XML: `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

Values are raw text; the tool's schema says what they mean. Models forget `<tool_call>` around the function, so
`<function=` opens a call too, and `</function>` ends one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from cortex.neuron.text.detect import TOOL_CALL_CLOSE, TOOL_CALL_OPEN
from cortex.neuron.text.stops import held_suffix
from cortex.neuron.text.tools.call import Call, CallReader, NotACall, Reading

FUNCTION_OPEN: Final = "<function="
FUNCTION_CLOSE: Final = "</function>"
PARAMETER_OPEN: Final = "<parameter="
PARAMETER_CLOSE: Final = "</parameter>"

_NAME_END: Final = re.compile(r"[>\n<]")


class QwenXML:
    openings: tuple[str, ...] = (TOOL_CALL_OPEN, FUNCTION_OPEN)
    bare_openings: tuple[str, ...] = ()
    separators = ""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: each tool's parameters by its name."""
        self._schemas = schemas

    def reader(self, opening: str) -> CallReader:
        return _Reader(self._schemas, wrapped=opening == TOOL_CALL_OPEN)


class _Reader:
    """Takes the call apart from the front; what is not understood yet waits, and that is never much."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], *, wrapped: bool) -> None:
        self._schemas = schemas
        self._waiting = "" if wrapped else FUNCTION_OPEN
        self._name: str | None = None
        self._parameter: str | None = None
        self._value: list[str] = []
        """The present parameter's value so far."""
        self._arguments: dict[str, Any] = {}
        self._closed = False

    def feed(self, text: str) -> Reading | None:
        self._waiting += text
        while not self._closed:
            if not self._advance():
                return None
        try:
            end = _marker(self._waiting, TOOL_CALL_CLOSE)
        except NotACall:  # the function is complete; models forget this marker too
            return Reading(self._call, self._waiting)
        return None if end is None else Reading(self._call, end.rest)

    def finish(self) -> Reading | None:
        """A closed function whose closing marker was cut off is still a call."""
        return Reading(self._call, "") if self._closed else None

    @property
    def _call(self) -> Call:
        assert self._name is not None
        return Call(self._name, self._arguments)

    def _advance(self) -> bool:
        """Read the next element; False if it is not all there."""
        if self._parameter is not None:
            return self._read_value(self._parameter)
        found = _marker(self._waiting, *((FUNCTION_OPEN,) if self._name is None else (PARAMETER_OPEN, FUNCTION_CLOSE)))
        if found is None:
            return False
        if found.text == FUNCTION_CLOSE:
            self._closed = True
            self._waiting = found.rest
            return True
        name = _name(found.rest)
        if name is None:
            return False
        if self._name is None:
            self._name = name.text
        else:
            self._parameter = name.text
        self._waiting = name.rest
        return True

    def _read_value(self, parameter: str) -> bool:
        """Up to the first closing marker after which the call goes on as a call: a value may contain the marker."""
        value, close, rest = self._waiting.partition(PARAMETER_CLOSE)
        if not close:
            clear = len(value) - held_suffix(value, PARAMETER_CLOSE)
            self._value.append(value[:clear])
            self._waiting = value[clear:]
            return False
        try:
            follows = _marker(rest, PARAMETER_OPEN, FUNCTION_CLOSE)
        except NotACall:
            self._value += [value, close]
            self._waiting = rest
            return True
        if follows is None:
            return False
        text = "".join([*self._value, value]).removeprefix("\n").removesuffix("\n")
        self._arguments[parameter] = typed(text, _schema_of(self._schemas.get(self._name or ""), parameter))
        self._parameter = None
        self._value = []
        self._waiting = rest
        return True


class _Found(NamedTuple):
    text: str
    rest: str


def _marker(text: str, *markers: str) -> _Found | None:
    """One of `markers` after white space; None if the text ends before it is clear; raises NotACall."""
    text = text.lstrip()
    for marker in markers:
        if text.startswith(marker):
            return _Found(marker, text[len(marker) :])
    if any(marker.startswith(text) for marker in markers):
        return None
    raise NotACall


def _name(text: str) -> _Found | None:
    """A name up to `>`; None if the text ends before it; raises NotACall."""
    found = _NAME_END.search(text)
    if found is None:
        return None
    name = text[: found.start()].strip()
    if found.group() != ">" or not name:
        raise NotACall
    return _Found(name, text[found.end() :])


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """What `text` means for a parameter of this schema; text that does not fit stays text, for the tool to refuse."""
    kinds = _kinds(schema)
    if not kinds or kinds == {"string"}:
        return text
    stripped = text.strip()
    if "boolean" in kinds and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if "null" in kinds and stripped.lower() in ("null", "none"):
        return None
    try:
        value = json.loads(stripped, strict=False)
    except (ValueError, RecursionError):
        return text
    return value if _kind_of(value) & kinds else text


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema admits; empty when it does not say."""
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


def _schema_of(parameters: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    properties = (parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}
