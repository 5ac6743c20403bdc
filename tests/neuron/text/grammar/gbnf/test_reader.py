"""Reads GBNF, and names the place of what is wrong with it."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from cortex.neuron.text.grammar.gbnf.reader import (
    ANY_CHARACTER,
    MAX_DEPTH,
    Alternation,
    CharacterClass,
    Concatenation,
    GbnfError,
    Literal,
    Node,
    Reference,
    Repetition,
    Rule,
    defines_a_rule,
    read_gbnf,
    to_lark,
)

from .trees import NAMES, nodes, written

A, B = Literal("a"), Literal("b")
CHARACTERS = st.characters(exclude_categories=["Cs"])


def problem_of(text: str) -> str | None:
    try:
        to_lark(read_gbnf(text))
    except GbnfError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('"a"', A),
        ('"a" "b"', Concatenation((A, B))),
        ('"a" | "b" |', Alternation((A, B, Concatenation(())))),
        ('("a"*)*', Repetition(Repetition(A, 0, None), 0, None)),
        ('"a" +?', Repetition(Repetition(A, 1, None), 0, 1)),
        ('"a"{3}', Repetition(A, 3, 3)),
        ('"a"{ 2 , }', Repetition(A, 2, None)),
        ('"a"{2,3}', Repetition(A, 2, 3)),
        (".", ANY_CHARACTER),
        (r'"\n\r\t\\\"\x41\u00e9\U0001F600\-é#"', Literal('\n\r\t\\"Aé😀-é#')),
        (
            r"[a-z0_\]\\^-]",
            CharacterClass(tuple((ord(a), ord(b)) for a, b in ("az", "00", "__", "]]", "\\\\", "^^", "--"))),
        ),
        (r'[^"#]', CharacterClass(((34, 34), (35, 35)), is_negated=True)),
        ("x-y_1", Reference("x-y_1", 0)),
        ('# one\n "a" # two\r\n\t# three\n | "b"# four', Alternation((A, B))),
        ('(\n"a"\n|\n"b"\n)\n"a"', Concatenation((Alternation((A, B)), A))),
        ('"a" |\n"b"', Alternation((A, B))),
        ('"""a"', Concatenation((Literal(""), A))),
    ],
)
def test_reads(body: str, expected: object) -> None:
    assert read_gbnf(f'# a comment\n\nroot ::= {body}\n x-y_1 ::= "x"\n')["root"].body == expected


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("", "line 1, column 1", "expected a rule named root"),
        ('x ::= "a"', "line 1, column 1", "named root"),
        ("hello", "line 1, column 1", "expected a rule"),
        ("root = 1", "line 1, column 1", "expected a rule"),
        ("root ::= this is (not valid", "line 1, column 28", "expected the ) of the group that begins at line 1, colu"),
        ('root ::= "a"\n   "b" ) x', "line 2, column 8", "found ') x'"),
        ("root ::= [a-z", "line 1, column 14", "expected the ] of the class that begins at line 1, column 10"),
        ("root ::= [a-", "line 1, column 13", "expected the ]"),
        ("root ::= [a\\", "line 1, column 12", "expected an escape"),
        ('root ::= "a\nb', "line 2, column 2", 'expected the "'),
        ('root ::= x\n\nx ::= "a" yes', "line 3, column 11", "expected a defined rule; 'yes' is not"),
        ("root ::= root", "line 1, column 1", "the rule 'root' allows nothing before it needs itself again"),
        ('root ::= root "a" | (root)+ | x\nx ::= ""{2} root', "line 1, column 1", "needs itself"),
        ('root ::= "a" x\nx ::= y | x\ny ::= x "b"', "line 2, column 1", "the rule 'x'"),
        ("root ::= *", "line 1, column 10", "found '*'"),
        ('root ::= "a" | + "b"', "line 1, column 16", "found '+"),
        ('root ::= "a"{', "line 1, column 13", "expected a quantifier"),
        ('root ::= "a"{3,2}', "line 1, column 13", "before its beginning"),
        ('root ::= "a"{-1}', "line 1, column 13", "expected a quantifier"),
        ('root ::= "a"{' + "9" * 9999 + "}", "line 1, column 13", "at most 1000000"),
        ("root ::= [z-a]", "line 1, column 11", "exchange its ends"),
        ("root ::= []", "line 1, column 10", "no character"),
        (r"root ::= [^\x00-\U0010FFFF]", "line 1, column 10", "no character"),
        (r'root ::= "a\q"', "line 1, column 12", "expected an escape"),
        (r'root ::= "\x4"', "line 1, column 11", "expected 2 hexadecimal digits"),
        (r'root ::= "\uD800"', "line 1, column 11", "U+D800 is no character"),
        (r'root ::= "\U00110000"', "line 1, column 11", "U+110000 is no character"),
        ('root ::= "\ud800"', "line 1, column 11", "surrogate"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1", "defined already, at line 1, column 1"),
        ("root ::= " + "(" * 100_000, "line 1, column 70", "nested more than"),
        ('root ::= "a"' + "*" * 100_000, "line 1, column 73", "are nested"),
        ('root ::= "a" <b>', "line 1, column 14", "found '<b>'"),
    ],
)
def test_names_the_place_and_what_is_expected(text: str, place: str, expected: str) -> None:
    problem = problem_of(text)
    assert problem is not None
    assert problem.startswith(f"{place}: ")
    assert expected in problem
    assert len(problem) < 400


@hypothesis.given(st.lists(nodes(CHARACTERS, NAMES), min_size=4, max_size=4))
def test_reads_what_was_written(bodies: list[Node]) -> None:
    rules = [Rule(name, body, 0) for name, body in zip(NAMES, bodies, strict=True)]
    problem = problem_of(written(rules))
    if problem is None:
        assert list(read_gbnf(written(rules)).values()) == rules
    else:
        assert "needs itself" in problem or "no character" in problem


PIECES = [*'"[](){}|*\\^-#\n .é', "::=", "root", "x", "\\x", "1,", "\ud800"]


@hypothesis.given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join).map("root ::= ".__add__)))
def test_garbage_raises_only_the_readers_error(text: str) -> None:
    defines_a_rule(text)
    problem = problem_of(text)
    assert problem is None or problem.startswith("line ")


def test_deepest_groups_are_accepted() -> None:
    lark = to_lark(read_gbnf("root ::= " + "(" * MAX_DEPTH + '"a" | "b"' + ")" * MAX_DEPTH))
    assert '"a" | "b"' in lark
