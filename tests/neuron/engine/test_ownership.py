"""Each fact about a running request has one writer: the step loop, the scheduler, or the speculation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from cortex.neuron.engine import speculation
from cortex.neuron.engine.active_request import ActiveRequest
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.speculation.speculation import _Drafting

ENGINE = Path(speculation.__file__).parents[1]
OWNERS: dict[type, tuple[str, ...]] = {
    ActiveRequest: ("active_request.py", "step_loop.py"),
    Sequence: ("scheduling",),
    _Drafting: ("speculation",),
}
"""The files and folders of the engine that may write the attributes of each."""
BELOW = ("kv",)
"""Knows of no request. What it holds has attributes of the same names."""
MUTATORS = frozenset({"append", "clear", "extend", "insert", "pop", "sort"})
"""Methods that change a list."""


def written(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The attributes of other objects than `self` that are assigned, deleted or changed in place, and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed: ast.expr = node.func.value
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node
        else:
            continue
        while isinstance(changed, ast.Subscript):
            changed = changed.value
        of_self = (
            isinstance(changed, ast.Attribute) and isinstance(changed.value, ast.Name) and changed.value.id == "self"
        )
        if isinstance(changed, ast.Attribute) and not of_self:
            yield changed.attr, changed.lineno


def _parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ENGINE).parts


@pytest.mark.parametrize("owned", OWNERS, ids=lambda owned: owned.__name__)
def test_only_the_owner_writes_the_facts_of_a_request(owned: type) -> None:
    names = {each.name for each in fields(owned)}
    if owned is not ActiveRequest:
        names -= {"tokens", "request"}  # which it shares with the active request
    paths = [path for path in sorted(ENGINE.rglob("*.py")) if not {*OWNERS[owned], *BELOW} & {*_parts(path)}]
    found = [
        f"{path.relative_to(ENGINE)}:{line} writes `{name}` of a {owned.__name__}"
        for path in paths
        for name, line in written(ast.parse(path.read_text()))
        if name in names
    ]
    assert found == []


@pytest.mark.parametrize(
    "code", ["a.row = 1", "a.row += 1", "del a.row", "a.b.row[1:] = c", "a.row.append(1)", "a, b.row = 1, 2"]
)
def test_detects_a_write(code: str) -> None:
    assert [name for name, _ in written(ast.parse(code))] == ["row"]


@pytest.mark.parametrize("code", ["self.row = 1", "b = a.row", "row = 1", "a.row.index(1)", "a.other(row)"])
def test_reads_and_own_attributes_are_no_writes(code: str) -> None:
    assert "row" not in [name for name, _ in written(ast.parse(code))]
