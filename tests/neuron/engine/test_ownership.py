"""Each fact about a running request has one writer: the step loop, the scheduler, or the speculation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from cortex.neuron.engine import speculation
from cortex.neuron.engine.active_request import ActiveRequest
from cortex.neuron.engine.scheduling.sequence import SavedStates, Sequence
from cortex.neuron.engine.speculation.speculation import _Drafting

ENGINE = Path(speculation.__file__).parents[1]
OWNERS: dict[type, tuple[str, ...]] = {
    ActiveRequest: ("step_loop.py", "active_request.py"),
    Sequence: ("scheduling/scheduler.py", "scheduling/sequence.py"),
    SavedStates: ("scheduling/sequence_states.py",),
    _Drafting: ("speculation/speculation.py",),
}
"""The modules of the engine that may write the fields of each: the owner of the objects, and the one of their class.
No field has two writers."""
BELOW = ("kv",)
"""Knows of no request. What it holds has attributes of the same names."""
MUTATORS = frozenset({"append", "clear", "extend", "insert", "pop", "sort"})
"""Methods that change a list."""


def written(tree: ast.AST, *, by_itself: bool = False) -> Iterator[tuple[str, int]]:
    """The attributes of other objects than `self` (`by_itself`: those of `self`) that are assigned, deleted or changed
    in place, and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed: ast.expr = node.func.value
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node
        else:
            continue
        while isinstance(changed, ast.Subscript):
            changed = changed.value
        if isinstance(changed, ast.Attribute):
            of_self = isinstance(changed.value, ast.Name) and changed.value.id == "self"
            if of_self == by_itself:
                yield changed.attr, changed.lineno


def writers(owned: type, engine: Path = ENGINE) -> dict[str, dict[str, list[int]]]:
    """The modules that write each field of a class, and where."""
    names = {each.name for each in fields(owned)}
    if owned is not ActiveRequest:
        names -= {"tokens", "request"}  # which it shares with the active request
    found: dict[str, dict[str, list[int]]] = {}
    for path in sorted(engine.rglob("*.py")):
        module = path.relative_to(engine)
        if module.parts[0] in BELOW:
            continue
        tree = ast.parse(path.read_text())
        places = [*written(tree)]
        for each in ast.walk(tree):
            if isinstance(each, ast.ClassDef) and each.name == owned.__name__:
                places += written(each, by_itself=True)
        for name, line in places:
            if name in names:
                found.setdefault(name, {}).setdefault(str(module), []).append(line)
    return found


@pytest.mark.parametrize("owned", OWNERS, ids=lambda owned: owned.__name__)
def test_each_fact_of_a_request_has_one_writer(owned: type) -> None:
    found = writers(owned)
    strangers = {name: modules for name, modules in found.items() if not modules.keys() <= {*OWNERS[owned]}}
    assert strangers == {}, "the fields are written elsewhere, too"
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}, "they have two writers"
    assert {module for modules in found.values() for module in modules} == {*OWNERS[owned]}


def test_detects_a_second_writer(tmp_path: Path) -> None:
    (tmp_path / "scheduling").mkdir()
    (tmp_path / "kv").mkdir()
    (tmp_path / "scheduling" / "sequence.py").write_text("class Sequence:\n    def f(self):\n        self.row = 1\n")
    (tmp_path / "scheduling" / "admission.py").write_text("sequence.row = 2\nself.row = 3\n")
    (tmp_path / "kv" / "pages.py").write_text("page.row = 4\n")
    assert writers(Sequence, tmp_path) == {"row": {"scheduling/admission.py": [1], "scheduling/sequence.py": [3]}}


@pytest.mark.parametrize(
    "code", ["a.row = 1", "a.row += 1", "del a.row", "a.b.row[1:] = c", "a.row.append(1)", "a, b.row = 1, 2"]
)
def test_detects_a_write(code: str) -> None:
    assert [name for name, _ in written(ast.parse(code))] == ["row"]


@pytest.mark.parametrize("code", ["self.row = 1", "b = a.row", "row = 1", "a.row.index(1)", "a.other(row)"])
def test_reads_and_own_attributes_are_no_writes(code: str) -> None:
    assert "row" not in [name for name, _ in written(ast.parse(code))]
