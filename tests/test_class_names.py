"""One name, one thing: within one program no two classes have the same public name."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

PUBLIC_CLASS = re.compile(r"^class ([A-Za-z]\w*)", re.MULTILINE)
SOURCE = Path(__file__).parents[1] / "src" / "cortex"
OTHER_PROGRAMS = {"gateway": ("neuron", "cli"), "neuron": ("gateway", "fleet", "cli"), "cli": ("gateway", "neuron")}
"""Packages that a program does not consist of. Counterparts in them, such as `Metrics`, may have the same name."""
ONE_PER_DIALECT = {"Encoder"}
"""Members of the codecs, which are modules: `openai_chat.Encoder`."""


def repeated_names(source: Path, others: tuple[str, ...]) -> dict[str, list[str]]:
    """Class name → the modules that define it, where several do."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        module = path.relative_to(source)
        if module.parts[0] not in others:
            for name in PUBLIC_CLASS.findall(path.read_text(encoding="utf-8")):
                found[name].append(module.as_posix())
    return {name: modules for name, modules in found.items() if len(modules) > 1}


@pytest.mark.parametrize("program", OTHER_PROGRAMS)
def test_no_class_name_is_used_twice_in_one_program(program: str) -> None:
    repeated = repeated_names(SOURCE, OTHER_PROGRAMS[program])
    assert {name: modules for name, modules in repeated.items() if name not in ONE_PER_DIALECT} == {}


def test_detects_a_class_name_that_is_used_twice(tmp_path: Path) -> None:
    for package in ("wire", "fleet", "neuron"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "node.py").write_text("class Device: ...\nclass _Fields: ...\n")
    assert repeated_names(tmp_path, ("fleet",)) == {"Device": ["neuron/node.py", "wire/node.py"]}
    assert repeated_names(tmp_path, ("fleet", "neuron")) == {}
