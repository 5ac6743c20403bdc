"""Parsed TOML to typed values.

The conversion walks data and types together, so that every error has its key path and its expected type as values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import msgspec.inspect as inspect

from . import schema
from .positions import Path, line_of
from .section import SettingsError

MAX_SHOWN = 60
"""Characters of an invalid value that an error repeats."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where each part of the data came from: a line of a file, or an environment variable."""

    file: FilePath | None
    lines: Mapping[Path, int]
    variables: dict[Path, str] = field(default_factory=dict)

    def location(self, path: Path) -> str:
        """` in cortex.toml line 3`, or ` in environment variable CORTEX_X`; empty for text without a file name."""
        for length in range(len(path), 0, -1):
            if variable := self.variables.get(path[:length]):
                return f" in environment variable {variable}"
        inside = (variable for key, variable in self.variables.items() if key[: len(path)] == path)
        if path not in self.lines and (variable := next(inside, None)):
            return f" in environment variable {variable}"
        line = line_of(path, self.lines)
        return ("" if self.file is None else f" in {self.file}") + ("" if line is None else f" line {line}")

    def error(self, what: str, path: Path, advice: str) -> SettingsError:
        return SettingsError(f"{what}{self.location(path)}: {advice}")


def dotted(path: Path) -> str:
    """`neurons[1].endpoint`"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def convert(expected: inspect.Type, value: Any, source: Source, path: Path = ()) -> Any:
    """Convert `value`, found at `path`, to the type that `expected` describes. Raises `SettingsError`."""
    member = schema.alternative_for(expected, value)
    try:
        match member:
            case inspect.StructType():
                return _section(member, value, source, path)
            case inspect.DictType():
                return {key: convert(member.value_type, inner, source, (*path, key)) for key, inner in value.items()}
            case inspect.ListType() | inspect.VarTupleType():
                items = [convert(member.item_type, inner, source, (*path, i)) for i, inner in enumerate(value)]
                return items if isinstance(member, inspect.ListType) else tuple(items)
            case inspect.CustomType():
                return FilePath(value).expanduser() if member.cls is FilePath else member.cls(value)
            case inspect.LiteralType() if value not in member.values:
                raise ValueError(f"got `{_shorten(value)}`, {_suggestion(value, member.values, 'expected one of')}")
        if member is None or not schema.satisfies(member, value):
            raise ValueError(f"expected {schema.describe(expected)}, got {_shorten(schema.toml(value))}")
        return float(value) if isinstance(member, inspect.FloatType) else value
    except (ValueError, OverflowError, RuntimeError) as error:  # of our own types, of huge integers, of `expanduser`
        what = f"invalid value for {dotted(path)}" if path else "invalid configuration"
        raise source.error(what, path, str(error)) from error


def _section(table: inspect.StructType, data: dict[str, Any], source: Source, path: Path) -> Any:
    fields = {field.name: field for field in table.fields}
    values: dict[str, Any] = {}
    for key, value in data.items():
        here, name = (*path, key), schema.field_name(table, key)
        if name not in fields:
            advice = _suggestion(key, fields, "known here are")
            raise source.error(f"unknown key {dotted(here)}", here, advice)
        if name in values:
            other = next(each for each in data if schema.field_name(table, each) == name)
            raise source.error(f"{dotted(here)} is given twice", here, f"it is the same as `{other}`")
        values[name] = convert(fields[name].type, value, source, here)
    for name, info in fields.items():
        if info.required and name not in values:
            here = (*path, name)
            raise source.error(f"missing key {dotted(here)}", here, f"expected {schema.describe(info.type)}")
    return table.cls(**values)


def _suggestion(given: str, known: Iterable[object], otherwise: str) -> str:
    """The known name that is nearest; else all known names."""
    names = [str(name) for name in known]
    if near := difflib.get_close_matches(given.lower(), names, n=1):
        return f"did you mean `{near[0]}`?"
    return f"{otherwise} {', '.join(f'`{name}`' for name in names)}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
