"""A dialect's table of body fields. The parser reads a body through it, and docs/fields.md is written from it.

A field is honoured, tolerated (it has no effect, and a response without it is still right) or rejected with a 400 that
names it. Fields that a table does not list are ignored, and the response lists them in a header.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cortex.wire.errors import InvalidValue, shorten
from cortex.wire.fields import body as wire_body
from cortex.wire.fields.body import Fields, RawFields
from cortex.wire.fields.request_class import CLASS_FIELDS


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
    """Values of a rejected field without effect, which are tolerated."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that the example needs."""
    in_envelope: bool = False
    """Whether a gateway reads it before the body is parsed (`wire/request_summary.py`)."""
    has_content: bool = False
    """Whether its objects may hold media, which a server would fetch by address. Texts in it are never addresses."""
    is_limit: bool = False
    """Whether it is the limit of one choice, or a field that servers may read in its place."""

    def is_harmless(self, value: Any) -> bool:
        """Whether a value of a rejected field has no effect."""
        return value is None or any(value == harmless for harmless in self.harmless)


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of tool, of input item or of content block."""

    name: str
    treatment: Treatment
    note: str = ""


class FieldTable:
    """The fields of one dialect by name. Immutable."""

    def __init__(
        self,
        *groups: Iterable[BodyField],
        of_gateways: Iterable[str] = (),
        relayed: Iterable[str] = (),
        opens_paths: bool = False,
    ) -> None:
        """`of_gateways`: fields that a gateway honours, independent of nodes. `relayed`: fields that are not read here
        and choose no model at any known server. `opens_paths`: whether servers may read any of the other fields as a
        path."""
        self.opens_paths = opens_paths
        self._fields = {one.name: one for group in groups for one in group}
        self.names = frozenset(name.partition(".")[0] for name in self._fields)
        """The fields of a body itself."""
        read = [one.name.partition(".")[0] for one in self if one.in_envelope]
        self.envelope = tuple(dict.fromkeys((*read, *of_gateways)))
        """The fields that a gateway reads."""
        self.class_fields = tuple(name for name in self.envelope if name in CLASS_FIELDS)
        """Those of them that say how urgent a request is."""
        self.contents = frozenset(one.name for one in self if one.has_content)
        """The fields with texts, and with objects that may hold media."""
        self.inert = frozenset(
            one.name.partition(".")[0]
            for one in self
            if one.treatment is not Treatment.REJECTED and not one.has_content
        )
        """The fields that hold no media, whatever is in them."""
        self.limits = tuple(one.name for one in self if one.is_limit)
        """The fields with the limit of one choice. The first is the one that is written for servers."""
        self._rejected = tuple(one for one in self if one.treatment is Treatment.REJECTED)
        self._spelled = {_folded(name): name for name in self.names}
        assert len(self._spelled) == len(self.names), "a field is another spelling of one of this table"
        self._relayed = frozenset(relayed)

    def __iter__(self) -> Iterator[BodyField]:
        return iter(self._fields.values())

    def get(self, name: str) -> BodyField | None:
        return self._fields.get(name)

    def read(self, body: bytes) -> Fields:
        """The body, from which only fields of this table can be read. Raises `MalformedJSON`, `MissingModel`, or
        `InvalidValue` for a field that is rejected."""
        fields = wire_body.parse(body, self.names)
        fields.model()
        for one in self._rejected:
            if not one.is_harmless(fields.raw(one.name)):
                raise fields.invalid(one.name, one.note)
        return fields

    def scan(self, body: bytes) -> RawFields:
        """What a gateway reads of a body. Raises `MalformedJSON`."""
        return wire_body.scan(body, self.envelope, self.contents)

    def check_spelling(self, names: Collection[str]) -> None:
        """Raises InvalidValue for a name that is not a field of this table but that a server could read as one: many
        ignore case (Go, .NET), some also separators, or what follows a bracket."""
        for name in names:
            meant = None if name in self.names else self._spelled.get(_folded(name))
            if meant is not None:
                raise InvalidValue(
                    f"'{shorten(name)}' is not a field, and a server may read it as '{meant}'; spell it '{meant}'.",
                    param=shorten(name),
                )

    def check_overrides(self, names: Collection[str], overridden: Iterable[str]) -> None:
        """Raises InvalidValue for another spelling of a field that is set or removed for a server, by any name."""
        own = frozenset(overridden)
        spelled = {_folded(name): name for name in own}
        for name in names:
            meant = None if name in own else spelled.get(_folded(name))
            if meant is not None:
                raise InvalidValue(
                    f"a server may read '{shorten(name)}' as '{meant}', which is set or removed here; leave it out.",
                    param=shorten(name),
                )

    def check_known(self, values: Mapping[str, Any]) -> None:
        """Raises InvalidValue for a field that is neither honoured nor tolerated and so cannot be checked: it may
        choose another model or use uncounted tokens."""
        for name, value in values.items():
            one = self._fields.get(name)
            if name in self._relayed:
                continue
            if name not in self.names:
                problem = "it is not known here, and the key has a budget or a list of models; remove it"
            elif one is None or one.treatment is not Treatment.REJECTED or one.is_harmless(value):
                continue
            else:
                problem = one.note
            raise InvalidValue(f"Invalid value for '{shorten(name)}': {problem}.", param=shorten(name))


def _folded(name: str) -> str:
    """A normal form: equal for names that some server treats as the same."""
    plain = name.partition("[")[0].partition(".")[0]
    return "".join(character for character in plain.casefold() if character.isalnum())


def honoured(name: str, example: Any, note: str = "", **context: Any) -> BodyField:
    return BodyField(name, Treatment.HONOURED, example, note, context=context)


def in_envelope(name: str, example: Any, note: str = "") -> BodyField:
    """A field that is honoured, and that a gateway reads, too."""
    return BodyField(name, Treatment.HONOURED, example, note, in_envelope=True)


def content(name: str, example: Any, note: str = "", *, in_envelope: bool = True, **context: Any) -> BodyField:
    """A field that is honoured, with texts and possibly with media."""
    return BodyField(
        name, Treatment.HONOURED, example, note, context=context, in_envelope=in_envelope, has_content=True
    )


def limit(name: str, example: Any, note: str = "") -> BodyField:
    return BodyField(name, Treatment.HONOURED, example, note, in_envelope=True, is_limit=True)


def tolerated(name: str, example: Any, note: str = "", **context: Any) -> BodyField:
    return BodyField(name, Treatment.TOLERATED, example, note, context=context)


def rejected(name: str, example: Any, problem: str, *harmless: Any) -> BodyField:
    return BodyField(name, Treatment.REJECTED, example, problem, harmless)
