"""Types raw values of a call: text, unless the tool's schema says otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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
