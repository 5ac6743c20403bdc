"""Import rules: each package may import only the packages that the table below lists for it.

The source of every module is checked against the table; `test_missing_packages.py` detects indirect imports.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

ENGINE_LIBRARIES = frozenset({"torch", "triton", "numpy", "safetensors", "tokenizers"})
FAMILIES = {"neuron.families", "neuron.pictures"}
KERNELS = {"neuron.kernels", "neuron.private_api", "neuron.delta_sizes", "system.cache_folder", "formats.quant_names"}
LAYERS = {"neuron.layers", *KERNELS}
MODELS = {"neuron.models", "neuron.weights", *FAMILIES, *LAYERS}
ENGINE = {"neuron.engine", "formats.units", "system.fair_turns", *MODELS}
WORKER = {"neuron.worker", "system.engine_packages", "ipc", "routing", "system.tasks", "telemetry", "wire", *ENGINE}
TOKENIZER = {"neuron.tokenizer_process", "ipc", "telemetry", "wire", "neuron.text", "neuron.weights", *FAMILIES}
HUB = {"neuron.hub_process", "ipc", "neuron.weights", "wire"}
PICTURES = {"neuron.picture_process", "ipc", "settings", "neuron.pictures", "wire"}
NODE = {"neuron.node", "neuron.config", "neuron.servers", "http", "system.private_file", "formats.quant_names"}
NODE |= {*HUB, *PICTURES, *TOKENIZER, *WORKER}
API = {"neuron.api", "system.build", "system.open_files", "system.service_manager", "foreign", "parsing", "http"}
API |= {"settings", *NODE}
NEURON = {"neuron", "system.exits", *API}
LEDGER = {
    "gateway.ledger",
    "gateway.database",
    "gateway.config",
    "http",
    "system.private_file",
    "system.tasks",
    "wire",
    "settings",
}
DISPATCH = {
    "gateway.dispatch",
    "gateway.database",
    "gateway.config",
    "gateway.metrics",
    "fleet",
    "http",
    "system.open_files",
    "system.private_file",
    "system.fair_turns",
    "system.service_manager",
    "routing",
    "system.tasks",
    "wire",
}
PROXY = {"gateway.proxy", "gateway.pictures", "foreign", "parsing", "ipc", "telemetry", *DISPATCH, *LEDGER}
HISTORY = {"gateway.history", *PROXY}
GATEWAY_API = {"gateway.api", "gateway.created_models", "system.build", *HISTORY}
GATEWAY_PAGE = {"gateway.page", "cortex", *PROXY}
RESPONSES = {"gateway.responses", *PROXY}
BATCHES = {"gateway.batches", *GATEWAY_API}
GATEWAY = {"gateway", "system.exits", *BATCHES, *GATEWAY_PAGE, *RESPONSES}


@dataclass(frozen=True, slots=True)
class Rule:
    """What a package may import: packages of this project, and third-party libraries (None: any)."""

    packages: set[str]
    libraries: frozenset[str] | None = None
    lazy_libraries: frozenset[str] = frozenset()
    """Allowed inside functions only: not installed on some hosts where the module must import."""


RULES: dict[str, Rule] = {
    "": Rule(set(), frozenset()),
    "formats": Rule(set(), frozenset()),
    "system": Rule(set(), frozenset()),
    "system.build": Rule({"cortex"}, frozenset()),
    "system.cache_folder": Rule(set(), frozenset()),
    "system.fair_turns": Rule(set(), frozenset()),
    "system.engine_packages": Rule(set(), frozenset()),
    "system.exits": Rule(set(), frozenset()),
    "system.open_files": Rule(set(), frozenset()),
    "system.private_file": Rule(set(), frozenset()),
    "system.service_manager": Rule(set(), frozenset()),
    "formats.quant_names": Rule(set(), frozenset()),
    "system.tasks": Rule(set(), frozenset()),
    "formats.units": Rule(set(), frozenset()),
    "settings": Rule({"settings"}, frozenset({"msgspec"})),
    "telemetry": Rule({"telemetry", "settings", "cortex"}),
    "wire": Rule({"wire"}, frozenset({"msgspec"})),
    "fleet": Rule({"fleet", "formats.quant_names", "formats.units", "wire", "settings"}, frozenset({"msgspec"})),
    "routing": Rule({"routing"}, frozenset({"msgspec"})),
    "http": Rule({"http", "settings", "wire"}, frozenset({"httptools"})),
    "ipc": Rule({"ipc", "system.fair_turns", "system.tasks", "telemetry", "wire"}, frozenset({"msgspec"})),
    "foreign": Rule({"foreign", "http", "ipc", "wire"}, frozenset({"msgspec"})),
    "parsing": Rule({"parsing", "foreign", "ipc", "telemetry", "wire"}, frozenset({"msgspec"})),
    "gateway.config": Rule(
        {"fleet", "gateway.database", "gateway.ledger", "settings", "telemetry", "wire"}, frozenset({"msgspec"})
    ),
    "gateway.created_models": Rule({"fleet", "settings", "system.private_file", "wire"}, frozenset({"msgspec"})),
    "gateway.database": Rule({"system.exits", "wire"}, frozenset(), frozenset({"psycopg"})),
    "gateway.metrics": Rule({"fleet", "wire"}),
    "gateway.ledger": Rule(LEDGER),
    "gateway.dispatch": Rule(DISPATCH),
    "gateway.proxy": Rule(PROXY),
    "gateway.api": Rule(GATEWAY_API),
    "gateway.pictures": Rule({"gateway.pictures", "gateway.config", "http", "parsing", "wire"}),
    "gateway.page": Rule(GATEWAY_PAGE),
    "gateway.history": Rule(HISTORY),
    "gateway.responses": Rule(RESPONSES),
    "gateway.batches": Rule(BATCHES),
    "gateway": Rule(GATEWAY),
    "neuron.delta_sizes": Rule(set(), frozenset()),
    "neuron.private_api": Rule({"neuron.private_api"}, ENGINE_LIBRARIES, frozenset({"transformers"})),
    "neuron.kernels": Rule(KERNELS, ENGINE_LIBRARIES),
    "neuron.layers": Rule(LAYERS, ENGINE_LIBRARIES),
    "neuron.families": Rule(FAMILIES, frozenset()),
    "neuron.weights": Rule(
        {"neuron.weights", "neuron.delta_sizes", "formats.quant_names", *FAMILIES}, ENGINE_LIBRARIES
    ),
    "neuron.models": Rule({*MODELS, "formats.units"}, ENGINE_LIBRARIES, frozenset({"transformers"})),
    "neuron.engine": Rule({*ENGINE, "neuron.text"}, ENGINE_LIBRARIES, frozenset({"llguidance"})),
    "neuron.text": Rule({"neuron.text", "neuron.weights", "wire", "settings", *FAMILIES}),
    "neuron.pictures": Rule({"neuron.pictures"}, frozenset(), frozenset({"numpy", "PIL"})),
    "neuron.picture_process": Rule(PICTURES, frozenset({"msgspec", "numpy", "PIL"})),
    "neuron.config": Rule(
        {"neuron.picture_process", "neuron.servers", "wire", "settings", "system.cache_folder", "telemetry"}
    ),
    "neuron.servers": Rule({"neuron.servers", "wire", "settings"}, frozenset({"msgspec"})),
    "neuron.worker": Rule(WORKER),
    "neuron.tokenizer_process": Rule(TOKENIZER),
    "neuron.hub_process": Rule(HUB, frozenset({"huggingface_hub", "msgspec"})),
    "neuron.node": Rule(NODE),
    "neuron.api": Rule(API),
    "neuron": Rule(NEURON),
    "cli": Rule({"cli", "cortex", "system.engine_packages", *GATEWAY, *NEURON}),
}


@dataclass(frozen=True, slots=True)
class Import:
    module: str
    """Dotted and absolute."""
    line: int
    lazy: bool
    """Inside a function, so that it runs only when the function does."""
    for_types: bool
    """Under `if TYPE_CHECKING:`, so that it never runs."""


def package_of(module: str) -> str:
    """The key in `RULES` of a module: `neuron.engine` for `cortex.neuron.engine.memory.plan`."""
    parts = module.split(".")[1:]
    for depth in (2, 1):
        package = ".".join(parts[:depth])
        if package in RULES:
            return package
    return ".".join(parts[:1])


def module_name(source: Path, path: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_for_types(test: ast.expr) -> bool:
    """Whether it is `TYPE_CHECKING` or `typing.TYPE_CHECKING`."""
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def imports_in(tree: ast.Module, module: str, *, is_package: bool, modules: Container[str]) -> Iterator[Import]:
    """Every import, relative ones resolved."""
    package = module if is_package else module.rpartition(".")[0]

    def walk(nodes: Iterable[ast.AST], *, lazy: bool = False, for_types: bool = False) -> Iterator[Import]:
        for child in nodes:
            if isinstance(child, ast.If) and _is_for_types(child.test):
                yield from walk(child.body, lazy=lazy, for_types=True)
                yield from walk(child.orelse, lazy=lazy, for_types=for_types)
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, lazy, for_types)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    anchor = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*anchor, *([child.module] if child.module else [])])
                for alias in child.names:
                    member = f"{base}.{alias.name}"
                    yield Import(member if member in modules else base, child.lineno, lazy, for_types)
            elif not isinstance(child, ast.expr):  # which has no imports
                inside_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from walk(ast.iter_child_nodes(child), lazy=lazy or inside_function, for_types=for_types)

    yield from walk(tree.body)


@cache
def modules_of(source: Path) -> dict[str, Path]:
    """The modules under `source/cortex` by dotted name."""
    return {module_name(source, path): path for path in sorted((source / "cortex").rglob("*.py"))}


@cache
def imports_of(source: Path, module: str) -> tuple[Import, ...]:
    modules = modules_of(source)
    path = modules[module]
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return tuple(imports_in(tree, module, is_package=path.stem == "__init__", modules=modules))


def violation(package: str, found: Import) -> str | None:
    """Why this import breaks the rules, or None."""
    rule = RULES[package]
    top = found.module.split(".")[0]
    if top == "cortex":
        target = package_of(found.module)
        allowed = target in rule.packages or target == ""
        return None if allowed else f"{package or 'cortex'} may not import {target}"
    if top in sys.stdlib_module_names or rule.libraries is None or top in rule.libraries:
        return None
    if top in rule.lazy_libraries:
        return None if found.lazy else f"{top} must be imported inside the function that needs it"
    return f"{package or 'cortex'} may not import {top}"


def violations(source: Path) -> list[str]:
    """One line for each forbidden import under `source/cortex`."""
    found = []
    for module, path in modules_of(source).items():
        package = package_of(module)
        if package not in RULES:
            found.append(f"{module}: package {package!r} is not in the import rules; add it to RULES")
            continue
        for entry in imports_of(source, module):
            if not entry.for_types and (reason := violation(package, entry)):
                found.append(f"{path.relative_to(source)}:{entry.line}: {reason}")
    return found


def test_every_import_follows_the_rules() -> None:
    assert violations(SOURCE) == []


MAX_MODULES = 15
"""Of a folder."""


def test_no_folder_has_more_modules_than_a_reader_can_hold() -> None:
    modules = Counter(path.parent for path in (SOURCE / "cortex").rglob("*.py"))
    crowded = {str(folder.relative_to(SOURCE)) for folder, number in modules.items() if number > MAX_MODULES}
    assert not crowded, "join modules that only one neighbour imports, or give some a folder"


OF_WORKERS = ("clients", "faulty", "ipc")
"""Folders of modules that other processes import by their plain name."""


def plain_imports(tests: Path) -> list[str]:
    """Imports of modules of the tests by their plain name, which works only while somebody else changes `sys.path`."""
    paths = [path for path in sorted(tests.rglob("*.py")) if not set(path.relative_to(tests).parts) & set(OF_WORKERS)]
    shared = {path.stem for path in paths}
    plain = re.compile(r"^(?:from|import) (\w+)\b", re.MULTILINE)
    return [
        f"{path.relative_to(tests)} imports {name} by its plain name; write `from .{name} import …`"
        for path in paths
        for name in plain.findall(path.read_text())
        if name in shared
    ]


def test_tests_import_each_other_by_package() -> None:
    assert plain_imports(Path(__file__).parent) == []


def test_detects_an_import_by_plain_name(tmp_path: Path) -> None:
    (tmp_path / "fake_node.py").write_text("")
    (tmp_path / "test_relative.py").write_text("from .fake_node import start\nfrom . import fake_node\n")
    assert plain_imports(tmp_path) == []
    (tmp_path / "test_plain.py").write_text("import fake_node\nfrom fake_node import start\n")
    assert [problem.partition(" ")[0] for problem in plain_imports(tmp_path)] == ["test_plain.py", "test_plain.py"]


def import_cycles(source: Path) -> list[str]:
    """One line for each module of an import cycle. Lazy imports count, and type-only ones of another folder: a class
    may name the one of its folder that makes it."""
    modules = modules_of(source)
    imported = {
        module: {
            entry.module
            for entry in imports_of(source, module)
            if entry.module in modules and not (entry.for_types and modules[entry.module].parent == path.parent)
        }
        - {module}
        for module, path in modules.items()
    }
    while True:
        needed = set().union(*imported.values())
        kept = {module: needs & imported.keys() for module, needs in imported.items() if module in needed}
        kept = {module: needs for module, needs in kept.items() if needs}
        if kept == imported:
            break
        imported = kept
    return sorted(f"{module} → {', '.join(sorted(needs))}" for module, needs in imported.items())


def test_there_is_no_import_cycle() -> None:
    assert import_cycles(SOURCE) == []


def test_detects_an_import_cycle(tmp_path: Path) -> None:
    package = tmp_path / "cortex" / "wire"
    package.mkdir(parents=True)
    (package / "a.py").write_text("def f():\n    from cortex.wire import b")
    (package / "b.py").write_text("from cortex.wire.a import f")
    (package / "c.py").write_text("from cortex.wire.a import f\nimport os")
    (package / "d.py").write_text("if TYPE_CHECKING:\n    from cortex.wire.e import g")
    (package / "e.py").write_text("from cortex.wire.d import g")
    assert import_cycles(tmp_path) == ["cortex.wire.a → cortex.wire.b", "cortex.wire.b → cortex.wire.a"]
    (package / "sub").mkdir()
    (package / "sub" / "f.py").write_text("from cortex.wire.g import h")
    (package / "g.py").write_text("if TYPE_CHECKING:\n    from cortex.wire.sub.f import h")
    modules_of.cache_clear()
    assert import_cycles(tmp_path)[2:] == ["cortex.wire.g → cortex.wire.sub.f", "cortex.wire.sub.f → cortex.wire.g"]


def folder_circles(package: Path) -> list[str]:
    """The folders of a package that import each other, directly or through others, whether or not their modules form a
    cycle."""
    source = next(parent.parent for parent in package.parents if parent.name == "cortex")
    name = module_name(source, package / "__init__.py")
    imported: dict[str, set[str]] = {}
    for module, path in modules_of(source).items():
        if not module.startswith(f"{name}.") or path.parent == package:
            continue
        for entry in imports_of(source, module):
            here, there = (each.removeprefix(f"{name}.").split(".")[0] for each in (module, entry.module))
            if entry.module.startswith(f"{name}.") and here != there and (package / there).is_dir():
                imported.setdefault(here, set()).add(there)

    def reached(folder: str) -> set[str]:
        found: set[str] = set()
        while new := set().union(*(imported.get(each, set()) for each in found or {folder})) - found:
            found |= new
        return found

    return sorted(folder for folder in imported if folder in reached(folder))


def test_folders_of_a_package_do_not_import_each_other() -> None:
    root = SOURCE / "cortex"
    packages = {path.parent.relative_to(root) for path in root.rglob("__init__.py")} - {Path()}
    assert {str(package): found for package in packages if (found := folder_circles(root / package))} == {}


def test_detects_folders_that_import_each_other(tmp_path: Path) -> None:
    for module, code in (
        ("a/one", "from cortex.wire.b.two import x"),
        ("b/two", ""),
        ("b/three", "def f():\n    from cortex.wire.a import four"),
        ("a/four", ""),
        ("c/five", "from cortex.wire.a.four import x"),
        ("d/six", "from cortex.wire.e.seven import x"),
        ("e/seven", "from cortex.wire.f.eight import x"),
        ("f/eight", "from cortex.wire.d import six"),
    ):
        path = tmp_path / "cortex" / "wire" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(code)
    assert folder_circles(tmp_path / "cortex" / "wire") == ["a", "b", "d", "e", "f"]


@pytest.mark.parametrize(
    ("file", "code", "expected"),
    [
        ("gateway/x.py", "from cortex.neuron.api import app", "gateway may not import neuron.api"),
        ("gateway/x.py", "def f():\n    import cortex.neuron.config", "gateway may not import neuron.config"),
        ("fleet/x.py", "from ..gateway import server", "fleet may not import gateway"),
        ("wire/x.py", "from cortex import fleet", "wire may not import fleet"),
        ("neuron/engine/x.py", "import msgspec", "neuron.engine may not import msgspec"),
        ("neuron/engine/x.py", "import llguidance", "llguidance must be imported inside the function"),
        ("neuron/engine/x.py", "from cortex.wire import errors", "neuron.engine may not import wire"),
        ("neuron/layers/x.py", "from cortex.neuron.models import llama", "neuron.layers may not import neuron.models"),
        ("neuron/worker/x.py", "from cortex.neuron.api import app", "neuron.worker may not import neuron.api"),
        ("http/x.py", "from cortex.gateway import server", "http may not import gateway"),
        ("ipc/x.py", "from cortex.neuron.worker import protocol", "ipc may not import neuron.worker"),
        (
            "gateway/dispatch/x.py",
            "from cortex.gateway.proxy import request",
            "gateway.dispatch may not import gateway.proxy",
        ),
        ("attic/x.py", "import os", "not in the import rules"),
    ],
)
def test_detects_a_forbidden_import(tmp_path: Path, file: str, code: str, expected: str) -> None:
    for name in ("gateway", "fleet", "wire", "neuron/api", "neuron/models"):
        package = tmp_path / "cortex" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    module = tmp_path / "cortex" / file
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(code)
    assert any(expected in line for line in violations(tmp_path)), violations(tmp_path)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("neuron/engine/x.py", "def f():\n    import llguidance"),
        ("neuron/engine/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import msgspec"),
        (
            "gateway/x.py",
            "from ..fleet import queueing\nfrom cortex.wire import errors\nfrom cortex import __version__",
        ),
        ("cli/x.py", "from cortex.neuron.api import app\nfrom cortex.gateway import config"),
    ],
)
def test_accepts_allowed_imports(tmp_path: Path, file: str, code: str) -> None:
    for name in ("gateway", "fleet", "wire", "cli", "neuron/api", "neuron/engine"):
        package = tmp_path / "cortex" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (tmp_path / "cortex" / file).write_text(code)
    assert violations(tmp_path) == []
