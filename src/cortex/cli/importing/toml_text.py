"""Writes the tables of our files as TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def table(header: str, values: Mapping[str, Any]) -> str:
    """A table, or an entry of an array of tables, such as `[[models]]`."""
    return "\n".join([header, *(f"{_key(name)} = {_value(value)}" for name, value in values.items())]) + "\n"


def comment(text: str) -> str:
    return "".join(f"# {line}\n" if line else "#\n" for line in text.splitlines())


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case int() | float():
            return str(value)
        case date():  # which YAML reads where JSON has a text
            return _text(value.isoformat())
        case Mapping():
            inner = ", ".join(f"{_key(str(name))} = {_value(each)}" for name, each in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case Sequence():
            return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
