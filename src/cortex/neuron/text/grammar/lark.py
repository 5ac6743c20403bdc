"""Builds grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.text.tokenizer.tokenizer import Tokenizer
from cortex.wire.fields.relaxed_schema import relaxed

# With unbounded white space, small models write nothing else until they run out of tokens.
_WHITE_SPACE: Final = r"[ \n\t]{0,32}"


class LarkGrammar:
    """A grammar under construction: rules with unique names, and other grammars that they refer to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        self._others: list[dict[str, Any]] = []
        self._has_text = False

    def rule(self, stem: str, body: str) -> str:
        """Adds a rule and returns its name."""
        name = f"{stem}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def terminal(self, stem: str, body: str) -> str:
        """Adds a terminal, with `stem` in upper case, and returns its name. It is matched as one regular expression:
        thousands of alternatives cost little, where as a rule they exceed the parser's limits."""
        assert stem.isupper()
        return self.rule(stem, body)

    def marker(self, text: str) -> str:
        """The token `text` if the vocabulary has it as one token, or the token that it begins with; else its
        characters."""
        for end in (len(text), text.find(">") + 1):
            token = self._tokenizer.whole_id(text[:end]) if end else None
            if token is not None:
                return f"<[{token}]> {literal(text[end:])}" if text[end:] else f"<[{token}]>"
        return literal(text)

    def text_until(self, end: str) -> str:
        """Any text up to and including the first `end`."""
        token = self.marker(end)
        if self._tokenizer.whole_id(end) is not None and token.startswith("<["):
            return f"{self.text_without(end)} {token}"
        self._need_text()
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: TEXT {token}")
        return name

    def text_without(self, *parts: str) -> str:
        """Any text in which none of `parts` occurs."""
        name = f"WITHOUT_{len(self._rules)}"
        excluded = "".join(f" & ~(/(.|\\n)*/ {literal(part)} /(.|\\n)*/)" for part in parts)
        self._rules.append(f"{name}: /(.|\\n)*/{excluded}")
        return name

    def json(self, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
        """JSON of this schema without the parts that no grammar can express; `lenient` also ignores invalid ones. An
        object has no properties beyond those that its schema lists, unless the schema allows others."""
        schema = _closed(relaxed(schema).schema)
        options = {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient, "coerce_one_of": True}
        stated = schema.get("x-guidance")
        return self.other(
            {"json_schema": {**schema, "x-guidance": options | (stated if isinstance(stated, dict) else {})}}
        )

    def other(self, grammar: Mapping[str, Any]) -> str:
        """Another grammar as a part of this one."""
        name = f"part_{len(self._others)}"
        self._others.append({**grammar, "name": name})
        return f"@{name}"

    def build(self, start: str) -> str:
        """The grammar with the start rule `start`, in the form that `matcher.Matcher` compiles."""
        lines = [f"start: {start}", *self._rules, *(["TEXT: /(.|\\n)*/"] if self._has_text else [])]
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": "\n".join(lines)}, *self._others]})

    def _need_text(self) -> None:
        self._has_text = True


_OPEN: Final = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"})
"""Keywords about further properties of an object."""
_JOINT: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
"""Keywords whose subschemas apply to the same value as the schema that contains them."""
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose values are schemas by name."""
_DATA: Final = frozenset({"const", "default", "enum", "examples", "required", "x-guidance"})
"""Keywords whose values are not schemas."""


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema` with `additionalProperties: false` for objects that list their properties and do not mention others.
    Otherwise models write further ones until they run out of tokens; other servers close objects, too."""
    try:
        # Closed, each of the parts that describe one object would forbid the properties of the others.
        return schema if _has_joint_parts(schema) else _with_closed_objects(schema)
    except RecursionError:
        return schema  # it is rejected when the grammar is built


def _has_joint_parts(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_joint_parts, value))
    if not isinstance(value, Mapping):
        return False
    parts = value.get("allOf")
    is_joint = isinstance(parts, list) and len(parts) > 1
    is_joint |= isinstance(value.get("properties"), Mapping) and not _JOINT.isdisjoint(value)
    return is_joint or any(map(_has_joint_parts, value.values()))


def _with_closed_objects(value: Any, *, is_named: bool = False) -> Any:
    """`is_named`: `value` has schemas by name."""
    if isinstance(value, list):
        return list(map(_with_closed_objects, value))
    if not isinstance(value, Mapping):
        return value
    made = {
        key: each
        if key in _DATA and not is_named
        else _with_closed_objects(each, is_named=key in _NAMED and not is_named)
        for key, each in value.items()
    }
    listed, required = value.get("properties"), value.get("required")
    if not is_named and isinstance(listed, Mapping) and _OPEN.isdisjoint(value):
        names = required if isinstance(required, list) else []
        if all(name in listed for name in names if isinstance(name, str)):
            made["additionalProperties"] = False
    return made


def literal(text: str) -> str:
    """`text` as a quoted string; the quoting is JSON's."""
    return json.dumps(text, ensure_ascii=False)
