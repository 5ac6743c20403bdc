"""Objects of a schema have only the properties that are listed, unless the schema says otherwise. Models would write
further ones until they run out of tokens; other servers close objects, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_OPEN: Final = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"})
"""Keywords about further properties of an object."""
_JOINT: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
"""Keywords whose subschemas apply to the same value as the schema that contains them."""
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_NAMED: Final = _DEFINITIONS | {"properties", "patternProperties"}
"""Keywords whose values are schemas by name."""
_DATA: Final = frozenset({"const", "default", "enum", "examples", "required", "x-guidance"})
"""Keywords whose values are not schemas."""
_PLAIN: Final = frozenset({"type", "properties", "required", "title", "description"})
"""Keywords of an object that can be joined with others."""
_MAX_GROWTH: Final = 8
_MAX_ADDED: Final = 20_000
"""Parts are joined by copies of definitions, which may have parts themselves: no schema may grow beyond this factor and
number of schemas."""


class _TooLarge(Exception):
    """Joined, the schema would be much larger than it is with references."""


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema` with `additionalProperties: false` for objects that list their properties and do not mention others.
    Properties without a type make an object, and a required property is one that is listed."""
    try:
        return _Closing(schema).root()
    except RecursionError:
        return schema  # it is rejected when the grammar is built
    except _TooLarge:
        return schema


class _Closing:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._opens_definitions = False
        """Parts of an object that cannot be joined may refer to any of them."""
        self._num_left = _MAX_ADDED + _MAX_GROWTH * sum(1 for _ in _schemas(root))

    def root(self) -> Mapping[str, Any]:
        for schema in _schemas(self._root):
            joined = self._joined(schema)
            if _is_joint(joined) and (references := [*_references({key: joined.get(key) for key in _JOINT})]):
                if not all(place.startswith(("#/$defs/", "#/definitions/")) for place in references):
                    return self._root
                self._opens_definitions = True
        made: Mapping[str, Any] = self._closed(self._root)
        return made

    def _closed(self, value: Any, *, is_part: bool = False) -> Any:
        """`is_part`: other schemas list properties of the same object, which this one would forbid."""
        if isinstance(value, list):
            return [self._closed(each, is_part=is_part) for each in value]
        if not isinstance(value, Mapping):
            return value
        self._count(1)
        schema = self._joined(value)
        is_joint = is_part or _is_joint(schema)
        made = {key: self._closed_below(key, each, is_joint=is_joint) for key, each in schema.items()}
        if is_joint or not isinstance(schema.get("properties"), Mapping):
            return made
        if "const" not in schema and "enum" not in schema:
            made.setdefault("type", "object")
        if _OPEN.isdisjoint(schema):
            made["properties"] |= {name: {} for name in _required(schema) if name not in schema["properties"]}
            made["additionalProperties"] = False
        return made

    def _closed_below(self, key: str, value: Any, *, is_joint: bool) -> Any:
        if key in _NAMED and isinstance(value, Mapping):
            is_part = key in _DEFINITIONS and self._opens_definitions
            return {name: self._closed(each, is_part=is_part) for name, each in value.items()}
        return value if key in _DATA else self._closed(value, is_part=is_joint and key in _JOINT)

    def _joined(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """One object instead of `allOf` its parts, if they only list properties, and no two the same one."""
        parts = schema.get("allOf")
        own = {key: value for key, value in schema.items() if key != "allOf"}
        if not isinstance(parts, list) or not parts or not _JOINT.isdisjoint(own) or not _OPEN.isdisjoint(own):
            return schema
        properties: dict[str, Any] = {}
        required: list[str] = []
        for part in (own, *map(self._resolved, parts)):
            listed = part.get("properties", {}) if isinstance(part, Mapping) else None
            if not isinstance(listed, Mapping) or not listed.keys().isdisjoint(properties):
                return schema
            if part is not own and (not part.keys() <= _PLAIN or part.get("type", "object") != "object"):
                return schema
            self._count(len(listed))
            properties |= listed
            required += _required(part)
        if not properties or own.get("type", "object") != "object":
            return schema
        return {**own, "type": "object", "properties": properties, "required": [*dict.fromkeys(required)]}

    def _count(self, num_schemas: int) -> None:
        self._num_left -= num_schemas
        if self._num_left < 0:
            raise _TooLarge

    def _resolved(self, part: Any) -> Any:
        """The definition to which a part refers."""
        if not isinstance(part, Mapping) or part.keys() != {"$ref"} or not isinstance(part["$ref"], str):
            return part
        found: Any = self._root
        for name in part["$ref"].removeprefix("#/").split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _is_joint(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas describe one object."""
    parts = schema.get("allOf")
    num_joint = len(_JOINT & schema.keys()) + isinstance(schema.get("properties"), Mapping)
    return num_joint > 1 or (isinstance(parts, list) and len(parts) > 1)


def _required(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _schemas(value: Any, *, is_named: bool = False) -> Iterator[Mapping[str, Any]]:
    """All schemas in a schema. `is_named`: `value` has them by name."""
    if isinstance(value, list):
        for each in value:
            yield from _schemas(each)
    elif isinstance(value, Mapping):
        if not is_named:
            yield value
        for key, each in value.items():
            if is_named or key not in _DATA:
                yield from _schemas(each, is_named=key in _NAMED and not is_named)


def _references(value: Any) -> Iterator[str]:
    for schema in _schemas(value):
        if isinstance(place := schema.get("$ref"), str):
            yield place
