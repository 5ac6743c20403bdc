"""Environment variables as overrides: `CORTEX_GATEWAY__LISTEN=0.0.0.0:31313` is `gateway.listen`."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec.inspect as inspect

from . import schema
from .conversion import dotted
from .positions import Path
from .section import Section, SettingsError


def is_one_key(text: str) -> bool:
    """Whether a header can carry `text` as one key: visible ASCII characters without spaces."""
    return text.isascii() and text.isprintable() and " " not in text


def check_key_variables(names: Iterable[str | None], env: Mapping[str, str]) -> None:
    """Raise SettingsError where one of the variables is set, but not to one key."""
    for name in names:
        if name is not None and not is_one_key(env.get(name, "").strip()):
            raise SettingsError(
                f"the environment variable {name} holds more than one key, or a character that no key has; "
                "set it to one key, on one line"
            )


@dataclass(frozen=True, slots=True)
class Override:
    """One value that the environment sets."""

    path: Path
    value: Any
    variable: str

    def apply(self, data: dict[str, Any]) -> None:
        """Set the value in `data`, creating tables and list elements on the way. Raises `SettingsError`."""
        place: Any = data
        for part, following in zip(self.path, self.path[1:], strict=False):
            place = self._slot(place, part, [] if isinstance(following, int) else {})
        self._slot(place, self.path[-1], None)
        place[self.path[-1]] = self.value

    def _slot(self, place: Any, part: str | int, new: Any) -> Any:
        """The value at `part` of `place`, which becomes `new` if there is none."""
        if isinstance(part, str) and isinstance(place, dict):
            return place.setdefault(part, new)
        if isinstance(part, str) or not isinstance(place, list):
            reason = "another kind of value is there"
            raise SettingsError(f"cannot set {dotted(self.path)} by environment variable {self.variable}: {reason}")
        if part > len(place):
            reason = f"the list has {len(place)} elements so far"
            raise SettingsError(f"wrong index in environment variable {self.variable}: {reason}")
        if part == len(place):
            place.append(new)
        return place[part]


def overrides(expected: inspect.Type, prefix: str, env: Mapping[str, str]) -> list[Override]:
    """What `env` sets, whole tables before the keys inside them. `CORTEX_NEURONS__0__NAME` reaches into a list.

    A variable without `__` that names no top-level key sets nothing: see `check_unknown`.
    """
    found = []
    for variable, path in _variables(expected, prefix, env):
        wanted = schema.at(expected, path)
        if wanted is not None or len(path) > 1:
            found.append(Override(path, _value(env[variable], wanted), variable))
    return sorted(found, key=lambda override: len(override.path))


def check_variables(cls: type[Section], prefix: str, env: Mapping[str, str], others: frozenset[str]) -> None:
    """Raise `SettingsError` for a variable with the prefix that is neither a key of `cls` nor one of `others`.

    For a command that reads no file, and so does not know which variables hold the keys of nodes: any may whose name
    ends in `_KEY`.
    """
    given = {
        name: value
        for name, value in env.items()
        if name.startswith(prefix) and not name.endswith("_KEY") and name not in others
    }
    expected = inspect.type_info(cls) if given else None
    if isinstance(expected, inspect.StructType):
        check_unknown(expected, prefix, given, others)


def check_unknown(expected: inspect.StructType, prefix: str, env: Mapping[str, str], others: frozenset[str]) -> None:
    """Raise `SettingsError` for a variable with the prefix that is neither a key nor one of `others`."""
    for variable, path in _variables(expected, prefix, env):
        if variable in others or schema.at(expected, path) is not None:
            continue
        # Without the prefix, which all of them have in common.
        names = ["__".join(map(str, path)).upper() for path in _keys(expected)]
        known = [*names, *(name.removeprefix(prefix) for name in others if name.startswith(prefix))]
        near = difflib.get_close_matches(variable.removeprefix(prefix), known, n=1)
        advice = (
            f"did you mean {prefix}{near[0]}?"
            if near
            else f"variables that begin with {prefix} are keys; rename or unset it"
        )
        raise SettingsError(f"unknown environment variable {variable}: {advice}")


def _keys(table: inspect.StructType, path: Path = ()) -> Iterator[Path]:
    """The keys of `table` and of the tables below it."""
    for field in table.fields:
        here = (*path, field.name)
        yield here
        if (inner := schema.struct(field.type)) is not None:
            yield from _keys(inner, here)


def _variables(expected: inspect.Type, prefix: str, env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """The variables with the prefix, and the key that each of them names."""
    prefix = prefix.rstrip("_") + "_"
    for variable in sorted(env.keys() - _service_links(env)):
        if variable.startswith(prefix) and variable != prefix:
            yield variable, _path(expected, variable.removeprefix(prefix))


def _service_links(env: Mapping[str, str]) -> set[str]:
    """The variables that Kubernetes sets in a container for the services of its namespace; a service may have the name
    of the program."""
    services = (re.escape(name.removesuffix("_SERVICE_HOST")) for name in env if name.endswith("_SERVICE_HOST"))
    link = re.compile(rf"(?:{'|'.join(services)})_(SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_\w+)?)")
    found = ((name, match) for name in env if (match := link.fullmatch(name)) is not None)
    return {name for name, match in found if match[1] != "PORT" or "://" in env[name]}  # `neuron` has a key `port`


def _path(expected: inspect.Type, name: str) -> Path:
    path: Path = ()
    for part in name.lower().split("__"):
        here = schema.at(expected, path)
        is_index = part.isdigit() and here is not None and schema.child(here, 0) is not None
        path = (*path, int(part) if is_index else part)
    return path


def _value(text: str, wanted: inspect.Type | None) -> Any:
    """`text` as a TOML value if it is one of the wanted kind, else as a string."""
    try:
        value = tomllib.loads(f"value = {text}\n")["value"]
    except tomllib.TOMLDecodeError:
        return text
    fits = isinstance(value, str) or wanted is None or schema.alternative_for(wanted, value) is not None
    return value if fits else text
