"""The syntax tree of a GBNF grammar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

LAST_CHARACTER: Final = 0x10FFFF
SURROGATES: Final = range(0xD800, 0xE000)
"""Code points that are no characters."""


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
