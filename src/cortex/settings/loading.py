"""A TOML file plus environment overrides to a typed value, or to one line that says what is wrong and where."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec.inspect as inspect

from .conversion import Source, convert
from .environment import check_unknown, overrides
from .positions import positions
from .section import Section, SettingsError

T = TypeVar("T", bound=Section)


def load(
    cls: type[T],
    path: Path | None,
    *,
    env_prefix: str,
    env: Mapping[str, str],
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> T:
    """Read `path` (or nothing), apply the overrides of `env`, and return a `cls`.

    `CORTEX_GATEWAY__LISTEN` overrides `gateway.listen` when `env_prefix` is `CORTEX_`. A variable with `__` in its name
    must be a known key; one without must be a top-level key or one of the value's `other_variables`. `defaults`, by
    section and key, replace the type's own defaults. Raises `SettingsError`.
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
    """Like `load`, for TOML text. Errors name `file`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file or 'configuration'} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{file or 'configuration'} is nested too deeply: remove the brackets") from error
    expected = _type_info(cls)
    source = Source(file, positions(text))
    for override in overrides(expected, env_prefix, env or {}):
        override.apply(data)
        source.variables[override.path] = override.variable
    for section, values in (defaults or {}).items():
        if isinstance(given := data.setdefault(section, {}), dict):  # `convert` rejects anything else
            data[section] = {**values, **given}
    value: T = convert(expected, data, source)
    if env and isinstance(expected, inspect.StructType):
        check_unknown(expected, env_prefix, env, value.other_variables)
    return value


@cache
def _type_info(cls: type[Section]) -> inspect.Type:
    """It takes longer than to read most files, and a program reads files of few types many times."""
    return inspect.type_info(cls)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise SettingsError(f"no config file at {path}: create it, or name another one") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise SettingsError(f"{path} line {line} is not UTF-8 text: save the file as UTF-8") from error
    except OSError as error:
        raise SettingsError(f"cannot read config file {path}: {error.strerror}") from error


Stamp = tuple[int, ...]


def stamp(file: Path) -> Stamp:
    """A value that changes when the file does; empty for a file that cannot be read."""
    try:
        status = file.stat()
    except (OSError, ValueError):  # missing, not accessible, or no valid name: the same until it can be read
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_ino)
