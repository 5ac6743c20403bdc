"""Random syntax trees, and the GBNF text of a tree."""

from __future__ import annotations

from hypothesis import strategies as st

from cortex.neuron.text.grammar.gbnf.reader import (
    ANY_CHARACTER,
    Alternation,
    CharacterClass,
    Concatenation,
    Literal,
    Node,
    Reference,
    Repetition,
    Rule,
)

NAMES = ("root", "a", "b-c", "D_1")


def nodes(
    characters: st.SearchStrategy[str], names: tuple[str, ...] = (), max_leaves: int = 12
) -> st.SearchStrategy[Node]:
    """Trees as the reader builds them: a group of one part is that part."""
    codes = characters.map(ord)
    ranges = st.tuples(codes, codes).map(lambda ends: (min(ends), max(ends)))
    leaves: st.SearchStrategy[Node] = st.one_of(
        st.builds(Literal, st.text(characters, max_size=3)),
        st.builds(CharacterClass, st.lists(ranges, min_size=1, max_size=3).map(tuple), st.booleans()),
        st.just(ANY_CHARACTER),
        st.just(Concatenation(())),
        *([st.builds(Reference, st.sampled_from(names), st.just(0))] if names else []),
    )
    return st.recursive(leaves, _larger, max_leaves=max_leaves)


def _larger(parts: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    counts = st.one_of(
        st.sampled_from([(0, None), (1, None), (0, 1), (0, 0), (2, 2), (2, None)]),
        st.tuples(st.integers(0, 2), st.integers(0, 2)).map(lambda count: (count[0], sum(count))),
    )
    several = st.lists(parts, min_size=2, max_size=3).map(tuple)
    return st.one_of(
        st.builds(lambda item, count: Repetition(item, *count), parts, counts),
        st.builds(Concatenation, several),
        st.builds(Alternation, several),
    )


def written(rules: list[Rule]) -> str:
    return "\n".join(f"{rule.name} ::= {write(rule.body)}" for rule in rules)


def write(node: Node) -> str:
    """The GBNF of `node` with as few groups as possible."""
    match node:
        case Alternation(options):
            return " | ".join(f"({write(part)})" if isinstance(part, Alternation) else write(part) for part in options)
        case Concatenation(items):
            return " ".join(_operand(part, Alternation, Concatenation) for part in items)
        case Repetition(item, least, most):
            return f"{_operand(item, Alternation, Concatenation)}{{{least},{'' if most is None else most}}}"
        case Reference(name):
            return name
        case Literal(text):
            return f'"{"".join(map(_escape, text))}"'
        case CharacterClass() if node == ANY_CHARACTER:
            return "."
        case CharacterClass(ranges, is_negated):
            inside = "".join(f"{_escape(chr(first))}-{_escape(chr(last))}" for first, last in ranges)
            return f"[{'^' if is_negated else ''}{inside}]"


def _operand(node: Node, *kinds: type) -> str:
    return f"({write(node)})" if isinstance(node, kinds) else write(node)


def _escape(character: str) -> str:
    code = ord(character)
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08X}"
