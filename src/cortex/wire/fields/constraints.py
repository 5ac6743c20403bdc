"""The constraints of a request, and the parts of its schemas that the grammar library cannot express: patterns that
look around, unknown formats, a few keywords.

The rest of such a schema is enforced, and a header reports which parts are not. They are found by their syntax,
without the library: no code runs whose time depends on a client's pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from cortex.wire.errors import MAX_ECHO
from cortex.wire.requests import GenerateRequest

_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose values are schemas by name."""
_DATA: Final = frozenset({"const", "default", "enum", "examples", "required", "x-guidance"})
"""Keywords whose values are not schemas."""
_KEYWORDS: Final = frozenset(
    {
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""Keywords that the library does not know."""
_FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""Formats of strings that the library knows."""
_PARTS: Final = re.compile(
    r"(?P<inexpressible>\(\?(?:[=!]|<[=!]|P=)|\\[bBk1-9])|\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]", re.DOTALL
)
"""Constructs that look around or back; other escapes and character classes, which may contain their characters."""


def is_constrained(request: GenerateRequest) -> bool:
    mode = request.tool_choice.mode
    return request.output is not None or mode in ("required", "named") or _is_restricted(request) or _forbids(request)


def _is_restricted(request: GenerateRequest) -> bool:
    """Whether the model may call only some of the tools in its prompt."""
    return request.tool_choice.mode == "auto" and request.callable_tools != request.tools


def _forbids(request: GenerateRequest) -> bool:
    """Whether the prompt has tools that the model must not call."""
    return request.tool_choice.mode == "none" and bool(request.tools)


def unenforced_parts(request: GenerateRequest) -> tuple[str, ...]:
    """The paths of schema parts that the output is not constrained to although the request asks for it."""
    removed: list[str] = []
    if request.output is not None and request.output.schema is not None:
        removed += relaxed(request.output.schema).removed
    if is_constrained(request) and request.tool_choice.mode != "none":
        for tool in request.callable_tools:
            removed += relaxed(tool.parameters, f"tools.{tool.name}.parameters").removed
    return tuple(removed)


class Relaxed(NamedTuple):
    schema: Mapping[str, Any]
    """The enforceable part."""
    removed: tuple[str, ...]
    """The paths of the other parts, each cut to fit a header."""


def relaxed(schema: Mapping[str, Any], path: str = "schema") -> Relaxed:
    """The part of `schema` that can be enforced."""
    removed: list[str] = []
    try:
        kept = _schema(schema, path, removed)
    except RecursionError:
        return Relaxed(schema, ())  # it is rejected when the grammar is built
    return Relaxed(kept if removed else schema, tuple(removed))


def _schema(schema: Mapping[str, Any], path: str, removed: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        place = _below(path, f".{key}")
        if not _is_expressible(key, value, schema.get("type")):
            removed.append(place)
        elif key in _NAMED and isinstance(value, Mapping):
            names = {name for name in value if key != "patternProperties" or _is_regular(name)}
            removed += [_below(place, f".{name}") for name in value if name not in names]
            kept[key] = {
                name: _value(value[name], _below(place, f".{name}"), removed) for name in value if name in names
            }
        elif key in _DATA:
            kept[key] = value
        else:
            if key == "oneOf" and not _is_exclusive(schema, value):
                removed.append(place)  # it is enforced as anyOf
            kept[key] = _value(value, place, removed)
    return kept


def _value(value: Any, path: str, removed: list[str]) -> Any:
    if isinstance(value, Mapping):
        return _schema(value, path, removed)
    if isinstance(value, list):
        return [_value(member, _below(path, f"[{place}]"), removed) for place, member in enumerate(value)]
    return value


def _below(path: str, step: str) -> str:
    """The path of a part, cut so that many parts below a long name do not repeat it."""
    return (path + step)[:MAX_ECHO] if len(path) < MAX_ECHO else path


def _is_expressible(key: str, value: Any, kind: Any) -> bool:
    match key:
        case "pattern" if isinstance(value, str):
            return _is_regular(value)
        case "format" if isinstance(value, str):
            return value in _FORMATS or kind in ("integer", "number")  # such as int32, which helps little
        case "not":
            return bool(value == {})  # nothing conforms: it is rejected when the grammar is built
    return key not in _KEYWORDS


def _is_regular(pattern: str) -> bool:
    """Whether an automaton that reads the text once can match the pattern."""
    return not any(part["inexpressible"] for part in _PARTS.finditer(pattern))


def _is_exclusive(schema: Mapping[str, Any], options: Any) -> bool:
    """Whether no value conforms to two options, by their types or a discriminator."""
    if "discriminator" in schema or not isinstance(options, Sequence):
        return True
    types = [option.get("type") if isinstance(option, Mapping) else None for option in options]
    names = {name for name in types if isinstance(name, str)}
    return len(names) == len(types) and not {"integer", "number"} <= names
