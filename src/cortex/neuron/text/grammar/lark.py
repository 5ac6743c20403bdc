"""Builds grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.text.grammar.closed_objects import closed
from cortex.neuron.text.tokenizer.tokenizer import Tokenizer
from cortex.wire.fields.constraints import relaxed

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
        schema = closed(relaxed(schema).schema)
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


def literal(text: str) -> str:
    """`text` as a quoted string; the quoting is JSON's."""
    return json.dumps(text, ensure_ascii=False)
