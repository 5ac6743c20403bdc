"""Builds grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.text.tokenizer.tokenizer import Tokenizer

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

    def marker(self, text: str) -> str:
        """The token `text` if the vocabulary has it as one token, else its characters."""
        token = self._tokenizer.whole_id(text)
        return f"<[{token}]>" if token is not None else literal(text)

    def text_until(self, end: str) -> str:
        """Any text up to and including the first `end`."""
        self._need_text()
        token = self.marker(end)
        if token.startswith("<["):
            return f"TEXT {token}"
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: TEXT {token}")
        return name

    def text_without(self, part: str) -> str:
        """Any text in which `part` does not occur."""
        name = f"WITHOUT_{len(self._rules)}"
        self._rules.append(f"{name}: /(.|\\n)*/ & ~(/(.|\\n)*/ {literal(part)} /(.|\\n)*/)")
        return name

    def json(self, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
        """JSON of this schema; `lenient` ignores keywords that cannot be enforced."""
        options = {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient}
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
