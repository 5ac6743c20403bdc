"""The Lark of a grammar matches the same texts."""

from __future__ import annotations

import re
from itertools import product

import hypothesis
import llguidance
import pytest
from hypothesis import strategies as st

from cortex.neuron.text.grammar.gbnf.reader import (
    Alternation,
    CharacterClass,
    Concatenation,
    GbnfError,
    Literal,
    Node,
    Reference,
    Repetition,
    Rule,
    read_gbnf,
    to_lark,
)

from .trees import nodes, written

BYTES = llguidance.LLTokenizer("byte")
TEXTS = ["".join(letters) for length in range(4) for letters in product("ab\n", repeat=length)]


def matches(matcher: llguidance.LLMatcher, text: str) -> bool:
    state = matcher.deep_copy()
    tokens = BYTES.tokenize_str(text)
    return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


def compiled(grammar: str) -> llguidance.LLMatcher:
    lark = to_lark(read_gbnf(grammar))
    matcher = llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), (lark, matcher.get_error())
    return matcher


def pattern(node: Node) -> str:
    """The same language as a regular expression of the standard library."""
    match node:
        case Literal(text):
            return re.escape(text)
        case CharacterClass(ranges, is_negated):
            inside = "".join(f"\\U{first:08X}-\\U{last:08X}" for first, last in ranges)
            return f"[{'^' if is_negated else ''}{inside}]" if ranges else r"[\s\S]"
        case Repetition(item, least, most):
            return f"(?:{pattern(item)}){{{least},{'' if most is None else most}}}"
        case Concatenation(items):
            return "".join(map(pattern, items))
        case Alternation(options):
            return f"(?:{'|'.join(map(pattern, options))})"
        case Reference():
            raise AssertionError(node)


@hypothesis.given(nodes(st.sampled_from("ab\n"), max_leaves=8))
def test_matches_the_same_texts_as_the_tree(body: Node) -> None:
    try:
        matcher = compiled(written([Rule("root", body, 0)]))
    except GbnfError:
        return  # a class without characters
    expected = re.compile(pattern(body))
    for text in TEXTS:
        assert matches(matcher, text) == (expected.fullmatch(text) is not None), text


ARITHMETIC = """
root  ::= term ([-+*/] term)*   # left to right
term  ::= num-ber | "(" ws root ws ")"
num-ber ::= [0-9]{1,3} ("." [0-9]+)?
ws ::= [ \\t\\n]*
"""
LISTS = 'root ::= "[" (root ("," root)*)? "]"\n  | leaf\nleaf ::= "é" | [^\\x00-\\x7F,\\[\\]]'


@pytest.mark.parametrize(
    ("grammar", "fitting", "other"),
    [
        ('root ::= ("a"*)*', ["", "a", "aaa"], ["b"]),
        ('root ::= (("a"? "b"?)+ | "")*', ["", "ab", "ba", "bbaa"], ["c"]),
        ('root ::= x* "c"\nx ::= "a"* | "b"?', ["c", "abc", "bac"], ["ca", "b"]),
        ('root ::= [a-z]+ "abc"', ["xabc", "abcabc", "abxabc"], ["abc", "xab"]),
        ('root ::= root "a" | "b"', ["b", "ba", "baa"], ["a", "", "bb"]),
        ('root ::= "a"{0} "b"{2,} "c"{0,2}', ["bb", "bbbc", "bbcc"], ["abb", "b", "bbccc"]),
        ('root ::= "x" y?\ny ::= "y" root', ["x", "xyx"], ["xy", ""]),
        (". ".join(["root ::= ", "", ""]), ["a\n", "é😀"], ["a", "abc"]),
        (ARITHMETIC, ["1", "12+(3.5*4)", "( 1 )", "((1))-2"], ["", "1+", "1.", "(1", "1234"]),
        (LISTS, ["é", "[]", "[[],😀]", "[é,[é]]"], ["[", "a", "[é,]", ""]),
        ("root ::= " + "(" * 40 + '"a" "b"' + ")*" * 40, ["", "ab", "abab"], ["a", "ba"]),
        ("root ::= " + '("x" (' * 20 + 'root? "a" "b"' + ") )" * 20, ["x" * 20 + "ab"], ["ab"]),
    ],
)
def test_matches_what_the_grammar_says(grammar: str, fitting: list[str], other: list[str]) -> None:
    matcher = compiled(grammar)
    assert [text for text in fitting if not matches(matcher, text)] == []
    assert [text for text in other if matches(matcher, text)] == []
