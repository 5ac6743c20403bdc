"""What is wrong with a configuration, where, and what would be right: the text of every `SettingsError` about a key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import msgspec
import msgspec.inspect as inspect

from . import shape
from .errors import SettingsError
from .positions import Path, line_of

_WHERE = re.compile(r" - at `\$([^`]*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")


@dataclass(slots=True)
class Source:
    """Where each part of the data came from."""

    file: FilePath | None
    lines: Mapping[Path, int]
    variables: dict[Path, str] = field(default_factory=dict)

    def error(self, what: str, path: Path, advice: str) -> SettingsError:
        """One line: what, which key, where it stands, what to do."""
        key = dotted(path) or None
        variable = self._variable(path)
        line = line_of(path, self.lines)
        subject = f"{what} {key}" if key else what
        if variable is not None:
            message = f"{subject} in environment variable {variable}: {advice}"
            return SettingsError(message, key=key, variable=variable)
        where = "" if self.file is None else f" in {self.file}"
        where += "" if line is None else f" line {line}"
        return SettingsError(f"{subject}{where}: {advice}", key=key, file=self.file, line=line)

    def _variable(self, path: Path) -> str | None:
        while path:
            if path in self.variables:
                return self.variables[path]
            path = path[:-1]
        return None


def dotted(path: Path) -> str:
    """`neurons[1].endpoint`"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def unknown_keys(expected: inspect.Type, value: Any, path: Path = ()) -> Iterator[tuple[Path, inspect.StructType]]:
    """Every key that no type knows, with the table type that does not know it."""
    if isinstance(value, dict):
        table = shape.struct(expected)
        for key, inner in value.items():
            wanted = shape.child(expected, key)
            if wanted is not None:
                yield from unknown_keys(wanted, inner, (*path, key))
            elif table is not None and table.forbid_unknown_fields:
                yield (*path, key), table
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            wanted = shape.child(expected, index)
            if wanted is not None:
                yield from unknown_keys(wanted, inner, (*path, index))


def unknown(path: Path, table: inspect.StructType, source: Source) -> SettingsError:
    """The complaint about a key that `table` does not have."""
    known = [field.encode_name for field in table.fields]
    return source.error("unknown key", path, _suggestion(str(path[-1]), known, "known here are"))


def wrong(
    expected: inspect.Type,
    data: dict[str, Any],
    error: msgspec.ValidationError,
    convert: Callable[[Any], object],
    source: Source,
) -> SettingsError:
    """The complaint about a missing key or an unfit value. `convert` is what raised `error` on `data`."""
    reason = str(error)
    path: Path = ()
    if match := _WHERE.search(reason):
        reason = reason[: match.start()]
        path = _locate(match.group(1), data, convert)
    if missing := _MISSING.fullmatch(reason):
        path = (*path, missing.group(1))
        wanted = shape.at(expected, path)
        return source.error("missing key", path, f"expected {shape.describe(wanted)}" if wanted else "it is required")
    wanted = shape.at(expected, path)
    choices = [] if wanted is None else list(shape.choices(wanted))
    if choices and reason.startswith("Invalid enum value"):
        given = reason.removeprefix("Invalid enum value ").strip("'")
        reason = f"got `{given}`, {_suggestion(given, choices, 'expected one of')}"
    return source.error("wrong value for", path, reason[:1].lower() + reason[1:])


def _suggestion(given: str, known: list[str], otherwise: str) -> str:
    near = difflib.get_close_matches(given.lower(), known, n=1)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"{otherwise} {', '.join(f'`{name}`' for name in known)}"


def _locate(where: str, data: dict[str, Any], convert: Callable[[Any], object]) -> Path:
    """The path in a `msgspec` message, with the key that it hides behind `[...]` in a mapping found again."""
    path: Path = ()
    for step in _STEP.finditer(where):
        name, index = step.groups()
        if name is not None:
            path = (*path, name)
        elif index != "...":
            path = (*path, int(index))
        elif (key := _culprit(path, where[: step.end()], data, convert)) is not None:
            path = (*path, key)
        else:
            break
    return path


def _culprit(path: Path, where: str, data: dict[str, Any], convert: Callable[[Any], object]) -> str | None:
    """The first key that, alone in the mapping at `path`, still gives a complaint at `where`."""
    mapping: Any = data
    for part in path:
        mapping = mapping[part]
    if not isinstance(mapping, dict):
        return None
    whole = dict(mapping)
    try:
        for key, value in whole.items():
            mapping.clear()
            mapping[key] = value
            try:
                convert(data)
            except msgspec.ValidationError as error:
                match = _WHERE.search(str(error))
                if match and match.group(1).startswith(where):
                    return str(key)
        return None
    finally:
        mapping.clear()
        mapping.update(whole)
