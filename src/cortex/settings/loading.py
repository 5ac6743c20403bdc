"""From file and environment to a typed value, or to one line that says what is wrong and where."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as inspect

from .complaints import Source, dotted, unknown, unknown_keys, wrong
from .environment import Override, overrides
from .errors import SettingsError
from .positions import positions

T = TypeVar("T", bound=msgspec.Struct)

_TOML_LINE = re.compile(r" \(at line (\d+), column (\d+)\)$")


def load(
    cls: type[T],
    path: Path | None,
    *,
    env_prefix: str,
    env: Mapping[str, str],
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> T:
    """Read `path` (or nothing), lay `env` over it, and return a `cls`.

    `CORTEX_GATEWAY__LISTEN` overrides `gateway.listen` when `env_prefix` is `CORTEX_`. A variable with `__`
    in its name must be a known key; one without is taken only when it names a top-level key, since other
    programs share the prefix. `defaults`, by section and key, hold where neither says anything, in place of the
    type's own. Raises `SettingsError`.
    """
    text = "" if path is None else _read(path)
    return loads(cls, text, file=path, env_prefix=env_prefix, env=env, defaults=defaults)


def loads(
    cls: type[T],
    text: str,
    *,
    file: Path | None = None,
    env_prefix: str = "",
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> T:
    """`load` for TOML text already in hand; `file` only names it in errors."""
    data = _parse(text, file)
    expected = inspect.type_info(cls)
    source = Source(file, positions(text))
    for override in overrides(expected, env_prefix, env or {}):
        _lay(data, override)
        source.variables[override.path] = override.variable
    for path, table in unknown_keys(expected, data):
        raise unknown(path, table, source)
    for section, values in (defaults or {}).items():
        if isinstance(said := data.setdefault(section, {}), dict):  # what is no table is complained about below
            data[section] = {**values, **said}

    def convert(raw: Any) -> T:
        return msgspec.convert(raw, cls, dec_hook=_from_text)

    try:
        return convert(data)
    except msgspec.ValidationError as error:
        raise wrong(expected, data, error, convert, source) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise SettingsError(f"no config file at {path}: create it, or name another one", file=path) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message = f"{path} line {line}: not UTF-8 text: save the file as UTF-8"
        raise SettingsError(message, file=path, line=line) from error
    except OSError as error:
        raise SettingsError(f"cannot read config file {path}: {error.strerror}", file=path) from error


def _parse(text: str, file: Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        name = "config" if file is None else str(file)
        reason = str(error)
        if match := _TOML_LINE.search(reason):
            line = int(match.group(1))
            reason = f"{reason[: match.start()]} (column {match.group(2)})"
        else:  # "(at end of document)"
            line = text.count("\n") + 1
        raise SettingsError(f"{name} line {line}: not valid TOML: {reason}", file=file, line=line) from error


def _lay(data: dict[str, Any], override: Override) -> None:
    """Put one override into `data`, making the tables and list elements on its way."""
    place: Any = data
    for part, following in zip(override.path, override.path[1:], strict=False):
        fresh: Any = [] if isinstance(following, int) else {}
        if isinstance(part, int):
            _grow(place, part, override, fresh)
            place = place[part]
        else:
            place = place.setdefault(part, fresh)
        if not isinstance(place, list if isinstance(following, int) else dict):
            raise _misplaced(override)
    last = override.path[-1]
    if isinstance(last, int):
        _grow(place, last, override, None)
    place[last] = override.value


def _grow(items: list[Any], index: int, override: Override, fresh: Any) -> None:
    if index > len(items):
        key = dotted(override.path)
        message = f"wrong index in environment variable {override.variable}: the list has {len(items)} elements so far"
        raise SettingsError(message, key=key, variable=override.variable)
    if index == len(items):
        items.append(fresh)


def _misplaced(override: Override) -> SettingsError:
    key = dotted(override.path)
    message = f"cannot set {key} by environment variable {override.variable}: another kind of value is there"
    return SettingsError(message, key=key, variable=override.variable)


def _from_text(wanted: type, value: Any) -> Any:
    """Types of our own, and `Path`, are made from the text of a TOML string."""
    if not isinstance(value, str):
        raise ValueError(f"expected a string, got `{type(value).__name__}`")
    if wanted is Path:
        return Path(value).expanduser()
    return wanted(value)
