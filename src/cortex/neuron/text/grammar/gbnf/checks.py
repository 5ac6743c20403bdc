"""What a grammar must satisfy beyond its syntax, and which of its rules are regular. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from cortex.neuron.text.grammar.gbnf.tree import (
    Alternation,
    CharacterClass,
    Concatenation,
    GbnfError,
    Literal,
    Node,
    Reference,
    Repetition,
    Rules,
    references,
)
from cortex.wire.errors import shorten

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
