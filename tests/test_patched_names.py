"""No test replaces a constant of the project: what tests vary is a parameter with the constant as its default."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .own_files import python_files

ROOT = Path(__file__).parents[1]
NAME = r"_?[A-Z][A-Z0-9_]+"
DEFINITION = re.compile(rf"^ *({NAME}(?:, {NAME})*)(?:: [^=\n]+)? = ", re.MULTILINE)
PATCHES = {"setattr", "object", "patch"}
"""`monkeypatch.setattr`, `patch.object` and `patch`."""
SUSPECT = re.compile(r"setattr|patch|\.[A-Z_][A-Z0-9_]+ \S?= ")
"""Other files need not be parsed."""


def replaced(node: ast.AST) -> str | None:
    """The name that a call or an assignment replaces in another module or class, if it is written out."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return next((each.attr for each in targets if isinstance(each, ast.Attribute)), None)
    if not isinstance(node, ast.Call):
        return None
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    names = (each.value for each in node.args[:2] if isinstance(each, ast.Constant) and isinstance(each.value, str))
    return next(names, None) if function in PATCHES else None


def constants(*folders: Path) -> set[str]:
    """The names of all constants that modules in `folders` define."""
    paths = (path for folder in folders for path in python_files(folder))
    found = (DEFINITION.findall(path.read_text(encoding="utf-8")) for path in paths)
    return {name for definitions in found for names in definitions for name in names.split(", ")}


def patched(tests: Path, names: set[str]) -> Iterator[str]:
    """The places in `tests` where a constant of `names` is replaced."""
    for path in python_files(tests):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if SUSPECT.search(text) else ():
            name = (replaced(node) or "").rpartition(".")[2]
            if name in names:
                yield f"{path.relative_to(tests)}:{getattr(node, 'lineno', 0)}: pass {name} as a parameter"


def test_no_test_replaces_a_constant() -> None:
    assert list(patched(ROOT / "tests", constants(ROOT / "src", ROOT / "bench"))) == []


@pytest.mark.parametrize(
    "code",
    [
        'monkeypatch.setattr(groups, "RENEW_S", 1)',
        'monkeypatch.setattr("cortex.gateway.groups._RENEW_S", 1)',
        'patch.object(groups, "RENEW_S", 1)',
        'with patch("cortex.gateway.groups.RENEW_S", 1): pass',
        "groups.RENEW_S = 1",
    ],
)
def test_detects_a_replaced_constant(tmp_path: Path, code: str) -> None:
    others = 'monkeypatch.setattr(huggingface_hub, "CACHE", 1); monkeypatch.setattr(groups, "renew", print)'
    (tmp_path / "test_x.py").write_text(f"{others}\n{code}\n")
    (found,) = patched(tmp_path, {"RENEW_S", "_RENEW_S"})
    assert found.startswith("test_x.py:2: pass ")


def test_finds_the_constants_of_modules_and_classes(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "RENEW_S = 1.0\n_POLL_S: Final = 2\nclass A:\n    LIMIT: int = 3\nnames == LEFT\nA1, B1 = 4, 5\n"
    )
    assert constants(tmp_path) == {"RENEW_S", "_POLL_S", "LIMIT", "A1", "B1"}
