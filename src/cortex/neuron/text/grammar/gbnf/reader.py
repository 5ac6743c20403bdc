"""Reads GBNF: recursive descent over the text.

It accepts the notation of llama.cpp and what its relatives allow beyond it: line breaks anywhere (a rule ends where the
next one begins), underscores in names, and an escape before any punctuation.
"""

from __future__ import annotations

import re
from typing import Final

from cortex.neuron.text.grammar.gbnf.checks import check
from cortex.neuron.text.grammar.gbnf.tree import (
    ANY_CHARACTER,
    LAST_CHARACTER,
    SURROGATES,
    Alternation,
    CharacterClass,
    Concatenation,
    GbnfError,
    Literal,
    Node,
    Reference,
    Repetition,
    Rule,
    Rules,
    place,
)
from cortex.wire.errors import shorten

MAX_DEPTH: Final = 60
"""How deep groups nest, and how many quantifiers may follow one another."""
MAX_REPETITIONS: Final = 1_000_000

_SPACE: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*+")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_DEFINITION: Final = re.compile(rf"([A-Za-z0-9_-]+){_SPACE.pattern}::=")
_RANGE: Final = re.compile(
    rf"\{{{_SPACE.pattern}([0-9]+){_SPACE.pattern}(?:(,){_SPACE.pattern}([0-9]+)?{_SPACE.pattern})?\}}"
)
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_CONTROL: Final = {"n": "\n", "r": "\r", "t": "\t"}
_QUANTIFIERS: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def read_gbnf(text: str) -> Rules:
    """The rules, which include `root`, and in which every reference has its rule. Raises GbnfError."""
    rules = _Reader(text).rules()
    check(rules, text)
    return rules


def defines_a_rule(text: str) -> bool:
    """Whether the first thing in `text` is the name of a GBNF rule and `::=`."""
    space = _SPACE.match(text)
    return _DEFINITION.match(text, space.end() if space else 0) is not None


class _Reader:
    """`_at` is the character that is read next. Between items it is never white space."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> Rules:
        rules: dict[str, Rule] = {}
        self._skip_space()
        while self._at < len(self._text):
            rule = self._rule()
            if rule.name in rules:
                first = place(self._text, rules[rule.name].at)
                raise self._error(rule.at, f"the rule '{shorten(rule.name)}' is defined already, at {first}")
            rules[rule.name] = rule
        return rules

    def _rule(self) -> Rule:
        began = self._at
        definition = _DEFINITION.match(self._text, self._at)
        if definition is None:
            raise self._expected('a rule, such as root ::= "yes" | "no"')
        self._at = definition.end()
        self._skip_space()
        body = self._choice(0)
        if self._at < len(self._text) and not self._begins_rule():
            raise self._expected('a literal "…", a class […], a group (…), a rule\'s name, | or the next rule')
        return Rule(definition[1], body, began)

    def _choice(self, depth: int) -> Node:
        options = [self._concatenation(depth)]
        while self._takes("|"):
            options.append(self._concatenation(depth))
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _concatenation(self, depth: int) -> Node:
        items: list[Node] = []
        while (item := self._item(depth)) is not None:
            items.append(self._repeated(item, depth))
        return items[0] if len(items) == 1 else Concatenation(tuple(items))

    def _item(self, depth: int) -> Node | None:
        """None where none begins."""
        item: Node
        match self._text[self._at : self._at + 1]:
            case '"':
                item = self._literal()
            case "[":
                item = self._class()
            case "(":
                return self._group(depth + 1)
            case ".":
                self._at += 1
                item = ANY_CHARACTER
            case _:
                name = _NAME.match(self._text, self._at)
                if name is None or self._begins_rule():
                    return None
                item = Reference(name[0], self._at)
                self._at = name.end()
        self._skip_space()
        return item

    def _group(self, depth: int) -> Node:
        opened = self._at
        if depth > MAX_DEPTH:
            raise self._error(opened, f"groups are nested more than {MAX_DEPTH} deep; make rules of the inner ones")
        self._takes("(")
        body = self._choice(depth)
        if not self._takes(")"):
            raise self._expected(f"the ) of the group that begins at {place(self._text, opened)}")
        return body

    def _repeated(self, item: Node, depth: int) -> Node:
        """`item` with the quantifiers that follow it."""
        while True:
            began = self._at
            mark = self._text[self._at : self._at + 1]
            if mark in _QUANTIFIERS:
                self._at += 1
                least, most = _QUANTIFIERS[mark]
            elif mark == "{":
                least, most = self._range()
            else:
                return item
            depth += 1
            if depth > MAX_DEPTH:
                raise self._error(began, f"more than {MAX_DEPTH} quantifiers and groups are nested; remove some")
            item = Repetition(item, least, most)
            self._skip_space()

    def _range(self) -> tuple[int, int | None]:
        began = self._at
        found = _RANGE.match(self._text, self._at)
        if found is None:
            raise self._expected("a quantifier {n}, {n,} or {n,m}")
        self._at = found.end()
        least, most = _number(found[1]), _number(found[3] or found[1])
        if max(least, most) > MAX_REPETITIONS:
            raise self._error(began, f"at most {MAX_REPETITIONS} repetitions are possible")
        if found[2] and not found[3]:
            return least, None
        if most < least:
            raise self._error(began, f"the quantifier ends at {most}, before its beginning {least}; exchange them")
        return least, most

    def _literal(self) -> Literal:
        opened = self._at
        self._at += 1
        characters: list[str] = []
        while not self._ends(opened, '"', "literal"):
            characters.append(self._character())
        return Literal("".join(characters))

    def _class(self) -> CharacterClass:
        opened = self._at
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while not self._ends(opened, "]", "class"):
            began = self._at
            first = last = ord(self._character())
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                if self._at == len(self._text):
                    continue
                last = ord(self._character())
            if last < first:
                raise self._error(began, "the range ends before its beginning; exchange its ends")
            ranges.append((first, last))
        if not _has_character(ranges, is_negated=is_negated):
            raise self._error(opened, "the class contains no character; name at least one")
        return CharacterClass(tuple(ranges), is_negated)

    def _ends(self, opened: int, mark: str, kind: str) -> bool:
        """Whether a literal or class ends here; its end is passed."""
        if self._at == len(self._text):
            raise self._expected(f"the {mark} of the {kind} that begins at {place(self._text, opened)}")
        if not self._text.startswith(mark, self._at):
            return False
        self._at += 1
        return True

    def _character(self) -> str:
        """One character of a literal or class, perhaps escaped."""
        character = self._text[self._at]
        if character == "\\":
            return self._escaped()
        if ord(character) in SURROGATES:
            raise self._error(self._at, "half of a surrogate pair is no character")
        self._at += 1
        return character

    def _escaped(self) -> str:
        began = self._at
        mark = self._text[self._at + 1 : self._at + 2]
        self._at += 2
        if mark in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[mark]]
            if re.fullmatch(rf"[0-9A-Fa-f]{{{_HEX_DIGITS[mark]}}}", digits) is None:
                raise self._error(began, f"expected {_HEX_DIGITS[mark]} hexadecimal digits after \\{mark}")
            self._at += len(digits)
            code = int(digits, 16)
            if code > LAST_CHARACTER or code in SURROGATES:
                raise self._error(began, f"U+{code:04X} is no character")
            return chr(code)
        if mark in _CONTROL:
            return _CONTROL[mark]
        if mark and mark.isascii() and mark.isprintable() and not mark.isalnum():
            return mark
        raise self._error(began, r"expected an escape: \n, \r, \t, \xHH, \uHHHH, \UHHHHHHHH or \ before punctuation")

    def _begins_rule(self) -> bool:
        return _DEFINITION.match(self._text, self._at) is not None

    def _takes(self, mark: str) -> bool:
        """Passes `mark` and the space after it, if it is here."""
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        self._skip_space()
        return True

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at

    def _expected(self, what: str) -> GbnfError:
        if self._at == len(self._text):
            return self._error(self._at, f"expected {what}, but the text ends")
        found = self._text[self._at : self._at + 20].split("\n")[0]
        return self._error(self._at, f"expected {what}, but found {shorten(found)!r}")

    def _error(self, at: int, problem: str) -> GbnfError:
        return GbnfError(self._text, at, problem)


def _number(digits: str) -> int:
    """At most one more than the limit: the interpreter does not convert very long integers."""
    return int(digits) if len(digits.lstrip("0")) <= len(str(MAX_REPETITIONS)) else MAX_REPETITIONS + 1


def _has_character(ranges: list[tuple[int, int]], *, is_negated: bool) -> bool:
    """Whether any character is in a class."""
    if not is_negated:
        return bool(ranges)
    next_code = 0
    for first, last in sorted(ranges):
        if next_code < first and not (next_code in SURROGATES and first in (SURROGATES.stop, *SURROGATES)):
            return True
        next_code = max(next_code, last + 1)
    return next_code <= LAST_CHARACTER
