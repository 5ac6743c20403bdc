"""The reference page of a config type, written from the type itself so that the two cannot differ."""

from __future__ import annotations

import ast
import inspect as source_inspect
import textwrap
from collections.abc import Iterator
from functools import cache

import msgspec
import msgspec.inspect as inspect

from . import schema


def reference(cls: type[msgspec.Struct]) -> str:
    """Markdown: one table of keys, types, defaults and meanings for each table of the file, outermost first.

    A key's meaning is the string below its attribute. Required keys come first.
    """
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return "\n".join(_sections(info, "")).rstrip() + "\n"


def _sections(table: inspect.StructType, heading: str, meaning: str = "") -> Iterator[str]:
    if heading:
        yield f"## `{heading}`\n"
    for text in filter(None, (meaning, _prose(table.cls))):
        yield f"{text}\n"
    meanings = attribute_docstrings(table.cls)
    rows = sorted((field for field in table.fields if _is_row(field.type)), key=lambda field: not field.required)
    if rows:
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for field in rows:
            kind, text = _cell(schema.describe(field.type)), _cell(meanings.get(field.name, ""))
            yield f"| `{field.name}` | {kind} | {_default(field)} | {text} |"
        yield ""
    outer = heading.strip("[]")
    for field in table.fields:
        inner, form = _nested(field.type)
        if inner is not None:
            name = f"{outer}.{field.name}" if outer else field.name
            meaning = "" if _is_row(field.type) else meanings.get(field.name, "")  # a row has explained it already
            yield from _sections(inner, form.format(name), meaning)


def _nested(kind: inspect.Type) -> tuple[inspect.StructType | None, str]:
    """The table type below a key, and how its header is written."""
    for member in schema.alternatives(kind):
        if isinstance(member, inspect.StructType):
            return member, "[{}]"
        if isinstance(member, schema.Items) and (inner := schema.struct(member.item_type)):
            return inner, "[[{}]]"
        if isinstance(member, inspect.DictType) and (inner := schema.struct(member.value_type)):
            return inner, "[{}.NAME]"
    return None, ""


def _is_row(kind: inspect.Type) -> bool:
    """Whether a key can be written as `key = value`: it is not a table, or a table whose values may be text."""
    inner = schema.child(kind, "NAME")
    return _nested(kind)[0] is None or (inner is not None and schema.alternative_for(inner, "") is not None)


def _prose(cls: type) -> str:
    return source_inspect.cleandoc(cls.__doc__) if cls.__doc__ else ""


@cache
def attribute_docstrings(cls: type) -> dict[str, str]:
    """The string below each attribute, by attribute name; a subclass overrides what it repeats."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not issubclass(owner, msgspec.Struct) or owner is msgspec.Struct:
            continue
        definition = ast.parse(textwrap.dedent(source_inspect.getsource(owner))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                found[statement.target.id] = source_inspect.cleandoc(following.value.value)
    return found


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return "" if value is None else f"`{schema.toml(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
