"""Qwen XML: `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

Values are raw text; the tool's schema says what they mean. Models forget `<tool_call>` around the function, so
`<function=` opens a call too, and `</function>` ends one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.text.detect import TOOL_CALL_CLOSE, TOOL_CALL_OPEN
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
    """A cursor over what came so far; each stage either moves on, waits for more text, or raises NotACall."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], *, wrapped: bool) -> None:
        self._schemas = schemas
        self._text = "" if wrapped else FUNCTION_OPEN
        self._position = 0
        self._searched = 0
        """No closing marker of the present value begins before this."""
        self._name: str | None = None
        self._parameter: str | None = None
        self._arguments: dict[str, Any] = {}
        self._closed = False

    def feed(self, text: str) -> Reading | None:
        self._text += text
        while not self._closed:
            moved = self._read_name() if self._name is None else self._read_parameter()
            if not moved:
                return None
        return self._read_end()

    def finish(self) -> Reading | None:
        """A closed function whose closing marker was cut off is still a call."""
        return Reading(self._call, "") if self._closed else None

    @property
    def _call(self) -> Call:
        assert self._name is not None
        return Call(self._name, self._arguments)

    def _expect(self, *options: str) -> str | None:
        """Skip white space and one of `options`; None if the text ends before it is clear which."""
        start = self._position
        while start < len(self._text) and self._text[start].isspace():
            start += 1
        for option in options:
            if self._text.startswith(option, start):
                self._position = start + len(option)
                return option
        if any(option.startswith(self._text[start:]) for option in options):
            return None
        raise NotACall

    def _read_to_bracket(self) -> str | None:
        """A name up to `>`."""
        found = _NAME_END.search(self._text, self._position)
        if found is None:
            return None
        name = self._text[self._position : found.start()].strip()
        if found.group() != ">" or not name:
            raise NotACall
        self._position = found.end()
        return name

    def _read_name(self) -> bool:
        start = self._position
        if self._expect(FUNCTION_OPEN) is None:
            return False
        self._name = self._read_to_bracket()
        if self._name is None:
            self._position = start
        return self._name is not None

    def _read_parameter(self) -> bool:
        if self._parameter is not None:
            return self._read_value()
        start = self._position
        marker = self._expect(PARAMETER_OPEN, FUNCTION_CLOSE)
        if marker is None:
            return False
        if marker == FUNCTION_CLOSE:
            self._closed = True
            return True
        self._parameter = self._read_to_bracket()
        if self._parameter is None:
            self._position = start
            return False
        self._searched = self._position
        return True

    def _read_value(self) -> bool:
        """Up to the first closing marker after which the call goes on as a call: a value may contain the marker."""
        assert self._name is not None
        assert self._parameter is not None
        start = self._position
        while True:
            close = self._text.find(PARAMETER_CLOSE, self._searched)
            if close < 0:
                self._searched = max(start, len(self._text) - len(PARAMETER_CLOSE) + 1)
                return False
            self._position = close + len(PARAMETER_CLOSE)
            after = self._position
            try:
                follows = self._expect(PARAMETER_OPEN, FUNCTION_CLOSE)
            except NotACall:
                self._searched = after
                continue
            finally:
                self._position = start
            if follows is None:
                self._searched = close
                return False
            value = self._text[start:close].removeprefix("\n").removesuffix("\n")
            self._arguments[self._parameter] = typed(value, _schema_of(self._schemas.get(self._name), self._parameter))
            self._parameter = None
            self._position = after
            return True

    def _read_end(self) -> Reading | None:
        start = self._position
        try:
            closed = self._expect(TOOL_CALL_CLOSE)
        except NotACall:  # the function is complete; models forget this marker too
            return Reading(self._call, self._text[start:])
        return None if closed is None else Reading(self._call, self._text[self._position :])


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
