"""The types that a configuration expects, read from `msgspec.inspect`. The loader and the reference page share it."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import msgspec.inspect as inspect

from .listen import Listen
from .positions import Path
from .section import Section

Items = (inspect.ListType, inspect.VarTupleType)

_KINDS: dict[type, tuple[type[inspect.Type], ...]] = {
    bool: (inspect.BoolType,),
    int: (inspect.IntType, inspect.FloatType),
    float: (inspect.FloatType,),
    str: (inspect.StrType, inspect.LiteralType, inspect.CustomType),
    list: Items,
    dict: (inspect.StructType, inspect.DictType),
}
_CUSTOM: dict[type, str] = {FilePath: "path", Listen: "host:port"}
_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "whole number",
    inspect.FloatType: "number",
    inspect.StrType: "text",
    inspect.StructType: "table",
    inspect.AnyType: "any value",
}
_BOUNDS = (("ge", "≥", operator.ge), ("gt", ">", operator.gt), ("le", "≤", operator.le), ("lt", "<", operator.lt))


def alternatives(expected: inspect.Type) -> Iterator[inspect.Type]:
    """The members of a union, or the type itself, without annotations. `None` is not one: TOML cannot write it."""
    while isinstance(expected, inspect.Metadata):
        expected = expected.type
    if isinstance(expected, inspect.UnionType):
        for member in expected.types:
            yield from alternatives(member)
    elif not isinstance(expected, inspect.NoneType):
        yield expected


def alternative_for(expected: inspect.Type, value: object) -> inspect.Type | None:
    """The member of `expected` that accepts TOML values of this kind; `None` when there is none."""
    kinds: tuple[type[inspect.Type], ...] = (*_KINDS.get(type(value), ()), inspect.AnyType)
    return next((member for member in alternatives(expected) if isinstance(member, kinds)), None)


def struct(expected: inspect.Type) -> inspect.StructType | None:
    """The table type in `expected`, if it has one."""
    return next((member for member in alternatives(expected) if isinstance(member, inspect.StructType)), None)


def field_name(table: inspect.StructType, key: str) -> str:
    """The name of the field that `key` stands for; of none, the key itself."""
    return table.cls.field_of(key) if issubclass(table.cls, Section) else key


def child(expected: inspect.Type, part: str | int) -> inspect.Type | None:
    """The type at `part` of a value of type `expected`; `None` when there is no such key or index."""
    for member in alternatives(expected):
        if isinstance(part, int):
            if isinstance(member, Items):
                return member.item_type
        elif isinstance(member, inspect.StructType):
            name = field_name(member, part)
            return next((field.type for field in member.fields if field.name == name), None)
        elif isinstance(member, inspect.DictType):
            return member.value_type
    return None


def at(expected: inspect.Type, path: Path) -> inspect.Type | None:
    """The type at `path`; `None` when there is no such key."""
    found: inspect.Type | None = expected
    for part in path:
        found = None if found is None else child(found, part)
    return found


def satisfies(member: inspect.Type, value: Any) -> bool:
    """Whether `value`, which has the right kind, is within the bounds of `member`."""
    if isinstance(member, inspect.StrType):
        return len(value) >= (member.min_length or 0) and (
            member.pattern is None or bool(re.search(member.pattern, value))
        )
    bounds = ((getattr(member, name, None), compare) for name, _, compare in _BOUNDS)
    return all(bound is None or compare(value, bound) for bound, compare in bounds)


def describe(expected: inspect.Type) -> str:
    """The type for people: `number ≥ 0`, `true or false`, `"lru" or "priority"`."""
    return " or ".join(dict.fromkeys(_describe(member) for member in alternatives(expected)))


def _describe(member: inspect.Type) -> str:
    match member:
        case inspect.LiteralType():
            return " or ".join(toml(value) for value in member.values)
        case inspect.CustomType():
            return _CUSTOM[member.cls]
        case inspect.ListType() | inspect.VarTupleType():
            return f"list of {describe(member.item_type)}"
        case inspect.DictType():
            return f"table of {describe(member.value_type)}"
        case inspect.StrType(pattern=str() as pattern):
            return f"text that matches `{pattern}`"
        case inspect.StrType(min_length=int() as length):
            return f"text of {length} or more characters"
    bounds = [f"{sign} {bound}" for name, sign, _ in _BOUNDS if (bound := getattr(member, name, None)) is not None]
    return f"{_WORDS[type(member)]} {' and '.join(bounds)}".rstrip()


def toml(value: object) -> str:
    """`value` as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(inner) for inner in value) + "]"
    return f'"{value}"'
