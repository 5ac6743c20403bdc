"""Reads GBNF, checks it, and translates it into llguidance's dialect of Lark.

It accepts the notation of llama.cpp and what its relatives allow beyond it: line breaks anywhere (a rule ends where the
next one begins), underscores in names, and an escape before any punctuation. Rules without recursion become terminals,
which are matched as regular expressions: exactly, and fast with a large vocabulary. A grammar without any recursion is
a single terminal. In other grammars the library ends a terminal only where it cannot continue, as lexers do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cortex.neuron.text.grammar.lark import literal
from cortex.wire.errors import shorten

LAST_CHARACTER: Final = 0x10FFFF
SURROGATES: Final = range(0xD800, 0xE000)
"""Code points that are not characters."""


class GbnfError(Exception):
    """The text is not a grammar. The message names the place and what is expected there."""

    def __init__(self, text: str, at: int, problem: str) -> None:
        super().__init__(f"{place(text, at)}: {problem}")


def place(text: str, at: int) -> str:
    """The place of the character `at` of `text` in words; lines and columns are counted from 1."""
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}"


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """One character from `ranges` of code points (both ends included), or, if negated, one outside of them."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False


ANY_CHARACTER: Final = CharacterClass((), is_negated=True)


@dataclass(frozen=True, slots=True)
class Reference:
    name: str
    at: int = field(compare=False)
    """Its first character in the text."""


@dataclass(frozen=True, slots=True)
class Repetition:
    item: Node
    least: int
    most: int | None
    """None: no limit."""


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Its items one after another; without items, the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of at least two options."""

    options: tuple[Node, ...]


Node: TypeAlias = Literal | CharacterClass | Reference | Repetition | Concatenation | Alternation
"""Its depth is bounded by the reader, so recursive functions over it need no bound of their own."""


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    body: Node
    at: int = field(compare=False)


Rules: TypeAlias = Mapping[str, Rule]
"""By name, in the order of the text."""


def references(node: Node) -> Iterator[Reference]:
    """Every reference below `node`, in the order of the text."""
    match node:
        case Reference():
            yield node
        case Repetition(item):
            yield from references(item)
        case Concatenation(parts) | Alternation(parts):
            for part in parts:
                yield from references(part)


ROOT: Final = "root"


def check(rules: Rules, text: str) -> None:
    """Raises GbnfError, with the place in `text`, unless there is a root, every reference has a rule, and from every
    rule that the root needs the output can begin or end."""
    if ROOT not in rules:
        known = f"; the rules are {shorten(', '.join(rules))}" if rules else ""
        raise GbnfError(text, 0, f"expected a rule named {ROOT}, with which the output begins{known}")
    for rule in rules.values():
        for reference in references(rule.body):
            if reference.name not in rules:
                raise GbnfError(text, reference.at, f"expected a defined rule; '{shorten(reference.name)}' is not")
    stuck = reachable(rules) - _productive(rules)
    for name in rules:
        if name in stuck:
            problem = f"the rule '{shorten(name)}' allows nothing before it needs itself again"
            raise GbnfError(text, rules[name].at, f"{problem}; expected an option that begins otherwise")


def reachable(rules: Rules) -> set[str]:
    """The names of the rules that the root needs."""
    found, pending = {ROOT}, [ROOT]
    while pending:
        new = {reference.name for reference in references(rules[pending.pop()].body)} - found
        found |= new
        pending += new
    return found


def regular(rules: Rules) -> list[str]:
    """The names of the rules without recursion, each after those that it refers to."""
    users: dict[str, list[str]] = defaultdict(list)
    num_pending: dict[str, int] = {}
    for name, rule in rules.items():
        used = {reference.name for reference in references(rule.body)}
        num_pending[name] = len(used)
        for other in used:
            users[other].append(name)
    found = [name for name, count in num_pending.items() if count == 0]
    for name in found:  # grows
        for user in users[name]:
            num_pending[user] -= 1
            if num_pending[user] == 0:
                found.append(user)
    return found


def _productive(rules: Rules) -> set[str]:
    """Rules that match the empty text or allow a first character, as a least fixed point."""
    order = dict.fromkeys([*regular(rules), *reversed(list(rules))])  # most rules follow those that refer to them
    nullable: set[str] = set()
    beginning: set[str] = set()
    while True:
        before = len(nullable) + len(beginning)
        for name in order:
            can_be_empty, can_begin = _starts(rules[name].body, nullable, beginning)
            if can_be_empty:
                nullable.add(name)
            if can_begin:
                beginning.add(name)
        if len(nullable) + len(beginning) == before:
            return nullable | beginning


def _starts(node: Node, nullable: set[str], beginning: set[str]) -> tuple[bool, bool]:
    """Whether `node` matches the empty text, and whether it allows a first character, if these rules do."""
    match node:
        case Literal(text):
            return not text, bool(text)
        case CharacterClass():
            return False, True
        case Reference(name):
            return name in nullable, name in beginning
        case Repetition(item, least, most):
            can_be_empty, can_begin = _starts(item, nullable, beginning)
            return can_be_empty or least == 0, can_begin and most != 0
        case Alternation(options):
            found = [_starts(option, nullable, beginning) for option in options]
            return any(each[0] for each in found), any(each[1] for each in found)
        case Concatenation(items):
            can_be_empty, can_begin = True, False
            for item in items:
                item_empty, item_begins = _starts(item, nullable, beginning)
                can_begin = can_begin or (can_be_empty and item_begins)
                can_be_empty = can_be_empty and item_empty
            return can_be_empty, can_begin


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
        """None if no item begins here."""
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
