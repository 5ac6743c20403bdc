"""Environment variables as overrides: `CORTEX_GATEWAY__LISTEN=0.0.0.0:31313` is `gateway.listen`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec.inspect as inspect

from . import shape
from .positions import Path


@dataclass(frozen=True, slots=True)
class Override:
    path: Path
    value: Any
    variable: str


def overrides(expected: inspect.Type, prefix: str, env: Mapping[str, str]) -> list[Override]:
    """What `env` sets, whole tables before the keys inside them. `CORTEX_NEURONS__0__NAME` reaches into a list.

    A variable without `__` that names no top-level key is somebody else's and left alone.
    """
    prefix = prefix.rstrip("_") + "_"
    found = []
    for variable in sorted(env):
        if not variable.startswith(prefix) or variable == prefix:
            continue
        path = _path(expected, variable.removeprefix(prefix))
        wanted = shape.at(expected, path)
        if wanted is None and len(path) == 1:
            continue
        found.append(Override(path, _value(env[variable], wanted), variable))
    return sorted(found, key=lambda override: len(override.path))


def _path(expected: inspect.Type, name: str) -> Path:
    path: Path = ()
    for part in name.lower().split("__"):
        here = shape.at(expected, path)
        is_index = part.isdigit() and here is not None and shape.child(here, 0) is not None
        path = (*path, int(part) if is_index else part)
    return path


def _value(text: str, wanted: inspect.Type | None) -> Any:
    """`text` as a TOML value where it is one, else as it stands; a key that wants text gets text."""
    try:
        value = tomllib.loads(f"value = {text}\n")["value"]
    except tomllib.TOMLDecodeError:
        return text
    if wanted is not None and not isinstance(value, str) and shape.takes_text(wanted):
        return value if shape.takes(wanted, value) else text
    return value
