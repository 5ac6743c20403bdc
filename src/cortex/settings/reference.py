"""The reference page of a config type, written from the type itself so that it cannot drift."""

from __future__ import annotations

import ast
import inspect as source_inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec
import msgspec.inspect as inspect

from . import shape


def reference(cls: type[msgspec.Struct]) -> str:
    """Markdown: one table of keys, types, defaults and meanings for each table of the file, outermost first.

    A meaning is the string below the attribute, or else its `msgspec.Meta(description=…)`.
    """
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return "\n".join(_sections(info, "")).rstrip() + "\n"


def _sections(table: inspect.StructType, heading: str, meaning: str = "") -> Iterator[str]:
    if heading:
        yield f"## `{heading}`\n"
    for text in filter(None, (meaning, _prose(table.cls))):
        yield f"{text}\n"
    meanings = {
        field.name: _attribute_docstrings(table.cls).get(field.name) or _description(field.type)
        for field in table.fields
    }
    rows = [field for field in table.fields if _is_row(field.type)]
    if rows:
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for field in rows:
            kind, text = _cell(_type(field.type)), _cell(meanings[field.name])
            yield f"| `{field.encode_name}` | {kind} | {_default(field)} | {text} |"
        yield ""
    outer = heading.strip("[]")
    for field in table.fields:
        inner, form = _nested(field.type)
        if inner is not None:
            name = f"{outer}.{field.encode_name}" if outer else field.encode_name
            told_above = _is_row(field.type)
            yield from _sections(inner, form.format(name), "" if told_above else meanings[field.name])


def _nested(kind: inspect.Type) -> tuple[inspect.StructType | None, str]:
    """The table type below a key, and how its header is written."""
    for member in shape.alternatives(kind):
        if isinstance(member, inspect.StructType):
            return member, "[{}]"
        if isinstance(member, shape.Items) and (inner := shape.struct(member.item_type)):
            return inner, "[[{}]]"
        if isinstance(member, inspect.DictType) and (inner := shape.struct(member.value_type)):
            return inner, "[{}.NAME]"
    return None, ""


def _is_row(kind: inspect.Type) -> bool:
    """Whether a key can be written as `key = value`: it is no table, or a table of what need not be tables."""
    if _nested(kind)[0] is None:
        return True
    members = [member for member in shape.alternatives(kind) if isinstance(member, inspect.DictType)]
    return any(shape.takes_text(member.value_type) for member in members)


def _prose(cls: type) -> str:
    return source_inspect.cleandoc(cls.__doc__) if cls.__doc__ else ""


def _attribute_docstrings(cls: type) -> dict[str, str]:
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


def _description(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata):
        return str((kind.extra_json_schema or {}).get("description", "")) or _description(kind.type)
    return ""


def _type(kind: inspect.Type) -> str:
    limits = [limit for member in shape.alternatives(kind) for limit in _limits(member)]
    return shape.describe(kind) + (f", {' and '.join(limits)}" if limits else "")


def _limits(kind: inspect.Type) -> Iterator[str]:
    for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        limit = getattr(kind, name, None)
        if limit is not None:
            yield f"{sign} {limit}"


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return "" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return _toml(value.value)
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(_toml(inner) for inner in value) + "]"
    return f'"{value}"'


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
