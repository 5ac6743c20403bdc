"""A dialect's table of body fields. The parser reads a body through it, and docs/fields.md is written from it.

A field is honoured, tolerated (it has no effect, and a response without it is still right) or rejected with a 400 that
names it. Fields that a table does not list are ignored, and the response lists them in a header.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cortex.wire.fields import body as wire_body
from cortex.wire.fields.body import Fields


class Treatment(StrEnum):
    HONOURED = "honoured"
    TOLERATED = "tolerated"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class BodyField:
    """One field. A name with dots is a field of an object; those are honoured or tolerated."""

    name: str
    treatment: Treatment
    example: Any
    """A value that shows the treatment; for a rejected field, one that is rejected."""
    note: str = ""
    """For the docs; for a rejected field also the reason in the error."""
    harmless: tuple[Any, ...] = ()
    """Values of a rejected field that ask for nothing: they are tolerated."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that the example needs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of tool, of input item or of content block."""

    name: str
    treatment: Treatment
    note: str = ""


class FieldTable:
    """The fields of one dialect by name. Immutable."""

    def __init__(self, *groups: Iterable[BodyField]) -> None:
        self._fields = {one.name: one for group in groups for one in group}
        self._names = frozenset(name.partition(".")[0] for name in self._fields)
        self._rejected = tuple(one for one in self if one.treatment is Treatment.REJECTED)

    def __iter__(self) -> Iterator[BodyField]:
        return iter(self._fields.values())

    def get(self, name: str) -> BodyField | None:
        return self._fields.get(name)

    def read(self, body: bytes) -> Fields:
        """The body, from which only fields of this table can be read. Raises `MalformedJSON`, `MissingModel`, or
        `InvalidValue` for a field that is rejected."""
        fields = wire_body.parse(body, self._names)
        fields.model()
        for one in self._rejected:
            value = fields.raw(one.name)
            if value is not None and not any(value == harmless for harmless in one.harmless):
                raise fields.invalid(one.name, one.note)
        return fields


def honoured(name: str, example: Any, note: str = "", **context: Any) -> BodyField:
    return BodyField(name, Treatment.HONOURED, example, note, context=context)


def tolerated(name: str, example: Any, note: str = "", **context: Any) -> BodyField:
    return BodyField(name, Treatment.TOLERATED, example, note, context=context)


def rejected(name: str, example: Any, problem: str, *harmless: Any) -> BodyField:
    return BodyField(name, Treatment.REJECTED, example, problem, harmless)
