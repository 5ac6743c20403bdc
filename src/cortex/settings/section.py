"""The base of every configuration type, and the error of every configuration that cannot be used."""

from __future__ import annotations

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a config file. It is immutable and rejects unknown keys.

    Subclasses repeat `frozen=True` for the type checker. A string below an attribute is that key's line in the
    reference page. `__post_init__` may raise `ValueError` for a rule that types cannot state; the loader adds file,
    line and key.
    """

    @classmethod
    def field_of(cls, key: str) -> str:
        """The field that a key of the table stands for."""
        return key

    @property
    def other_variables(self) -> frozenset[str]:
        """Environment variables that have the prefix of this file but are no keys of it: any other one is an error."""
        return frozenset()


class SettingsError(Exception):
    """A configuration that cannot be used. `message` is one line for the operator: what, where, and what to do."""

    def __init__(self, message: str) -> None:
        self.message = " ".join(message.splitlines())
        super().__init__(self.message)
