"""The sets of llama-swap's matrix: expressions such as `(a | b) & +others`, as lists of models. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

_TOKEN = re.compile(r"\s*([&|()]|\+?[^\s&|()+]+)")
MAX_SETS = 1000
"""llama-swap's limit of sets per expression."""


class MatrixProblem(ValueError):
    """An expression that cannot be read; the message says why."""


def expanded(name: str, expressions: Mapping[str, str], inside: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The sets that the expression `name` expands to, in order. Raises MatrixProblem."""
    if name in inside:
        raise MatrixProblem(f"the set {name} of the matrix refers to itself")
    if name not in expressions:
        raise MatrixProblem(f"the matrix has no set {name}")
    text = expressions[name]
    tokens = list(_tokens(text))
    if not tokens:
        raise MatrixProblem(f"the set {name} of the matrix is empty")
    reader = _Reader(tokens, expressions, (*inside, name))
    sets = reader.alternatives()
    if reader.tokens:
        raise MatrixProblem(f"the set {name} of the matrix cannot be read from `{reader.tokens[0]}` on")
    return sets


def _tokens(text: str) -> Iterator[str]:
    place = 0
    while place < len(text.rstrip()):
        found = _TOKEN.match(text, place)
        if found is None:
            raise MatrixProblem(f"the matrix has `{text[place : place + 20].strip()}`, which is not an expression")
        yield found[1]
        place = found.end()


class _Reader:
    """Reads `tokens` from the front: `&` binds more tightly than `|`."""

    def __init__(self, tokens: list[str], expressions: Mapping[str, str], inside: tuple[str, ...]) -> None:
        self.tokens = tokens
        self._expressions = expressions
        self._inside = inside

    def alternatives(self) -> list[tuple[str, ...]]:
        found = self._combined()
        while self._take("|"):
            found += self._combined()
        if len(found) > MAX_SETS:
            raise MatrixProblem(f"the set {self._inside[-1]} of the matrix expands to more than {MAX_SETS} sets")
        return found

    def _combined(self) -> list[tuple[str, ...]]:
        parts = [self._part()]
        while self._take("&"):
            parts.append(self._part())
        total = 1
        for part in parts:
            total *= len(part)
        if total > MAX_SETS:
            raise MatrixProblem(f"the set {self._inside[-1]} of the matrix expands to more than {MAX_SETS} sets")
        return [tuple(dict.fromkeys(itertools.chain(*each))) for each in itertools.product(*parts)]

    def _part(self) -> list[tuple[str, ...]]:
        if self._take("("):
            found = self.alternatives()
            if not self._take(")"):
                raise MatrixProblem(f"the set {self._inside[-1]} of the matrix lacks a `)`")
            return found
        if not self.tokens or self.tokens[0] in "&|)":
            raise MatrixProblem(f"the set {self._inside[-1]} of the matrix lacks a model after an operator")
        token = self.tokens.pop(0)
        if token.startswith("+"):
            return expanded(token[1:], self._expressions, self._inside)
        return [(token,)]

    def _take(self, token: str) -> bool:
        if self.tokens and self.tokens[0] == token:
            del self.tokens[0]
            return True
        return False
