"""The macros of a llama-swap configuration. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MACRO = re.compile(r"\$\{([^}]*)\}")
OURS = ("PORT", "MODEL_ID", "PID")
"""Those that a node replaces itself, under the same names."""


class MacroProblem(ValueError):
    """A macro that is not defined, or refers to itself."""


def expanded(value: Any, macros: Mapping[str, Any], kept: Mapping[str, str | None]) -> Any:
    """`value` with its macros replaced, in texts at any depth. `kept`: names that stay as they are (None), or that have
    this value. A text that is one macro gets the macro's value with its type. Raises MacroProblem."""
    return _Expander(macros, kept).value(value, ())


class _Expander:
    def __init__(self, macros: Mapping[str, Any], kept: Mapping[str, str | None]) -> None:
        self._macros = macros
        self._kept = kept

    def value(self, value: Any, inside: tuple[str, ...]) -> Any:
        match value:
            case str():
                whole = _MACRO.fullmatch(value)
                if whole is not None and whole[1] in self._macros and whole[1] not in inside:
                    return self.value(self._macros[whole[1]], (*inside, whole[1]))
                return _MACRO.sub(lambda found: self._text(found[1], inside), value)
            case list():
                return [self.value(each, inside) for each in value]
            case dict():
                return {self._key(name, inside): self.value(each, inside) for name, each in value.items()}
        return value

    def _key(self, name: Any, inside: tuple[str, ...]) -> str:
        return str(self.value(str(name), inside))

    def _text(self, name: str, inside: tuple[str, ...]) -> str:
        if name in inside:
            raise MacroProblem(f"the macro ${{{name}}} refers to itself")
        if name in self._macros:
            value = self.value(self._macros[name], (*inside, name))
            return str(value).lower() if isinstance(value, bool) else str(value)
        if name in self._kept:
            given = self._kept[name]
            return f"${{{name}}}" if given is None else given
        if name.startswith("env."):
            return f"${{{name}}}"
        raise MacroProblem(f"the macro ${{{name}}} is not defined")
