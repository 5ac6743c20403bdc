"""Translates a GBNF grammar into llguidance's dialect of Lark.

Rules without recursion become terminals, which are matched as regular expressions: exactly, and fast with a large
vocabulary. A grammar without any recursion is a single terminal. In other grammars the library ends a terminal only
where it cannot go on, as lexers do.
"""

from __future__ import annotations

from typing import Final

from cortex.neuron.text.grammar.gbnf.checks import ROOT, reachable, regular
from cortex.neuron.text.grammar.gbnf.tree import (
    ANY_CHARACTER,
    Alternation,
    CharacterClass,
    Concatenation,
    Literal,
    Node,
    Reference,
    Repetition,
    Rules,
)
from cortex.neuron.text.grammar.lark import literal

_MAX_INLINE_DEPTH: Final = 8
"""How deep groups nest within a rule; the library has a limit. Deeper ones become rules."""


def to_lark(rules: Rules) -> str:
    """The same grammar in Lark. `rules` are checked."""
    return _Emitter(rules).text()


class _Emitter:
    def __init__(self, rules: Rules) -> None:
        self._lines: list[str] = []
        terminals, needed = set(regular(rules)), reachable(rules)
        self._names = {
            name: f"{'T' if name in terminals else 't'}{number}" for number, name in enumerate(rules) if name in needed
        }
        for name, lark_name in self._names.items():
            self._lines.append(f"{lark_name}: {self._node(rules[name].body, lark_name, 0)}")

    def text(self) -> str:
        return "\n".join([f"start: {self._names[ROOT]}", *self._lines])

    def _node(self, node: Node, owner: str, depth: int) -> str:
        """Part of the rule `owner`; as one operand if `depth` is above 0."""
        match node:
            case Literal(text):
                return literal(text)
            case CharacterClass():
                return f"/{_regex(node)}/"
            case Reference(name):
                return self._names[name]
            case Repetition(_, _, 0) | Concatenation(()):
                return '""'
            case Repetition(item, least, most):
                repeated = self._node(item, owner, depth + 1)
                if isinstance(item, Repetition):
                    repeated = self._group(repeated, owner, depth + 1)
                return f"{repeated}{_quantifier(least, most)}"
            case Concatenation(parts):
                joined = " ".join(self._node(part, owner, depth + 1) for part in parts)
            case Alternation(parts):
                joined = " | ".join(self._node(part, owner, depth + 1) for part in parts)
        return joined if depth == 0 else self._group(joined, owner, depth)

    def _group(self, body: str, owner: str, depth: int) -> str:
        if depth <= _MAX_INLINE_DEPTH:
            return f"({body})"
        name = f"{owner}_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name


def _quantifier(least: int, most: int | None) -> str:
    match least, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
    return f"{{{least},{'' if most is None else most}}}"


def _regex(characters: CharacterClass) -> str:
    if characters == ANY_CHARACTER:
        return "(?s:.)"
    ranges = "".join(f"\\x{{{first:X}}}-\\x{{{last:X}}}" for first, last in characters.ranges)
    return f"[{'^' if characters.is_negated else ''}{ranges}]"
