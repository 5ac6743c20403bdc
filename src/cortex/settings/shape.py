"""What a config type expects at a path: the one reading of `msgspec.inspect` that loader and reference share."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path as FilePath
from typing import Any

import msgspec.inspect as inspect

from .listen import Listen
from .positions import Path

Items = (inspect.ListType, inspect.VarTupleType, inspect.SetType, inspect.FrozenSetType)


def bare(shape: inspect.Type) -> inspect.Type:
    """`shape` without annotations."""
    while isinstance(shape, inspect.Metadata):
        shape = shape.type
    return shape


def alternatives(shape: inspect.Type) -> Iterator[inspect.Type]:
    """The members of a union, or the one type itself, without annotations."""
    shape = bare(shape)
    if isinstance(shape, inspect.UnionType):
        for member in shape.types:
            yield from alternatives(member)
    else:
        yield shape


def struct(shape: inspect.Type) -> inspect.StructType | None:
    """The table type in `shape`, where it has one."""
    return next((member for member in alternatives(shape) if isinstance(member, inspect.StructType)), None)


def child(shape: inspect.Type, part: str | int) -> inspect.Type | None:
    """What is expected at `part` of a value of type `shape`; `None` when there is no such place."""
    for member in alternatives(shape):
        if isinstance(part, int):
            if isinstance(member, Items):
                return member.item_type
        elif isinstance(member, inspect.StructType):
            return next((field.type for field in member.fields if field.encode_name == part), None)
        elif isinstance(member, inspect.DictType):
            return member.value_type
    return None


def at(shape: inspect.Type, path: Path) -> inspect.Type | None:
    """What is expected at `path`."""
    found: inspect.Type | None = shape
    for part in path:
        if found is None:
            return None
        found = child(found, part)
    return found


def takes_text(shape: inspect.Type) -> bool:
    """Whether a plain string is a possible value, for types made from text as much as for `str` itself."""
    return any(
        isinstance(member, inspect.StrType | inspect.CustomType)
        or (isinstance(member, inspect.LiteralType | inspect.EnumType) and bool(choices(member)))
        for member in alternatives(shape)
    )


def choices(shape: inspect.Type) -> tuple[str, ...]:
    """The texts a choice is between; empty when `shape` is no choice of texts."""
    found: list[Any] = []
    for member in alternatives(shape):
        if isinstance(member, inspect.LiteralType):
            found += member.values
        elif isinstance(member, inspect.EnumType):
            found += [value.value for value in member.cls if isinstance(value, Enum)]
    return tuple(value for value in found if isinstance(value, str))


def takes(shape: inspect.Type, value: object) -> bool:
    """Whether a TOML number, boolean, list or table has the kind that `shape` asks for."""
    kinds: dict[type, tuple[type[inspect.Type], ...]] = {
        bool: (inspect.BoolType,),
        int: (inspect.IntType, inspect.FloatType),
        float: (inspect.FloatType,),
        list: Items,
        dict: (inspect.StructType, inspect.DictType),
    }
    wanted = kinds.get(type(value), ())
    return any(isinstance(member, (*wanted, inspect.AnyType)) for member in alternatives(shape))


def describe(shape: inspect.Type) -> str:
    """The type in a reader's words: `number`, `true or false`, `"lru" or "priority"`."""
    words = [_word(member) for member in alternatives(shape) if not isinstance(member, inspect.NoneType)]
    return " or ".join(dict.fromkeys(words))


def _word(shape: inspect.Type) -> str:
    if texts := choices(shape):
        return " or ".join(f'"{text}"' for text in texts)
    if isinstance(shape, inspect.CustomType):
        return _CUSTOM.get(shape.cls, "text")
    if isinstance(shape, Items):
        return f"list of {describe(shape.item_type)}"
    if isinstance(shape, inspect.DictType):
        return f"table of {describe(shape.value_type)}"
    return next((word for kind, word in _WORDS.items() if isinstance(shape, kind)), "value")


_CUSTOM: dict[type, str] = {FilePath: "path", Listen: "host:port"}
_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "whole number",
    inspect.FloatType: "number",
    inspect.StrType: "text",
    inspect.StructType: "table",
    inspect.AnyType: "any value",
}
