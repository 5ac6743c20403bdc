"""Rules for sources that no linter checks: files are short, what libraries do not promise is used in one package, where
each use has a probe and a fallback, no test replaces a constant of the project: what tests vary is a parameter, and no
test sleeps until something must have happened: it waits for that, with the helpers of `waiting.py` if no event tells.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .own_files import python_files

ROOT = Path(__file__).parents[1]
MAX_LINES = 600

SOURCE = Path(__file__).parents[1] / "src"
PRIVATE = re.compile(
    r"\btorch\.ops\b|\btriton\.(?:runtime|backends|compiler|knobs|JITFunction)\b"
    r"|\btransformers\.(?:conversion_mapping|core_model_loading|integrations)\b"
    r"|\b(?:torch|triton|transformers)(?:\.\w+)*\._(?!_)\w+"
    r"|^\s*from (?:torch|triton|transformers)(?:\.\w+)* import (?:.*\W)?_\w+",
    re.MULTILINE,
)
"""What these libraries do not promise. Members of their objects are the business of the linter (SLF)."""

NAME = r"_?[A-Z][A-Z0-9_]+"
DEFINITION = re.compile(rf"^ *({NAME}(?:, {NAME})*)(?:: [^=\n]+)? = ", re.MULTILINE)
PATCHES = {"setattr", "object", "patch"}
"""`monkeypatch.setattr`, `patch.object` and `patch`."""
SUSPECT = re.compile(r"setattr|patch|\.[A-Z_][A-Z0-9_]+ \S?= ")
"""Other files need not be parsed."""


def long_files(root: Path) -> set[str]:
    """The Python files that have more than `MAX_LINES` lines, relative to `root`."""
    paths = [path for folder in ("src", "tests", "bench") for path in python_files(root / folder)]
    return {str(path.relative_to(root)) for path in paths if path.read_bytes().count(b"\n") > MAX_LINES}


def test_no_file_is_too_long() -> None:
    assert not long_files(ROOT), "divide them by what they are about"


def test_detects_a_file_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "tests" / ".venv").mkdir(parents=True)
    (tmp_path / "tests" / ".venv" / "library.py").write_text("pass\n" * (MAX_LINES + 1))
    (tmp_path / "src" / "short.py").write_text("pass\n" * MAX_LINES)
    (tmp_path / "src" / "long.py").write_text("pass\n" * (MAX_LINES + 1))
    assert long_files(tmp_path) == {"src/long.py"}


def private_uses(source: Path) -> list[str]:
    """Lines outside of `private_api` that use what a library does not promise."""
    found = []
    for path in sorted((source / "cortex").rglob("*.py")):
        if "private_api" not in path.parts:
            text = path.read_text(encoding="utf-8")
            if not any(f"{name}." in text for name in ("torch", "triton", "transformers")):
                continue
            lines = {text.count("\n", 0, match.start() + 1) + 1 for match in PRIVATE.finditer(text)}
            found += [f"{path.relative_to(source)}:{line}: belongs into neuron/private_api" for line in sorted(lines)]
    return found


def test_what_libraries_do_not_promise_is_used_in_one_package() -> None:
    assert private_uses(SOURCE) == []


@pytest.mark.parametrize(
    "code",
    [
        "y = torch._addmm_activation(x)",
        "y = torch.ops.aten.mm(x)",
        "from torch.overrides import TorchFunctionMode, _get_current_function_mode",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "def f():\n    from triton.runtime import driver",
        "from transformers.conversion_mapping import get_model_conversion_mapping",
    ],
)
def test_detects_a_private_name_of_a_library(tmp_path: Path, code: str) -> None:
    for name in ("neuron/kernels", "neuron/private_api"):
        (tmp_path / "cortex" / name).mkdir(parents=True)
        (tmp_path / "cortex" / name / "x.py").write_text(f"import torch\n\n{code}\n")
    line = 4 if code.startswith("def") else 3
    assert private_uses(tmp_path) == [f"cortex/neuron/kernels/x.py:{line}: belongs into neuron/private_api"]


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


SLEEPS = {"time", "asyncio"}
NEVER_ENDS_S = 3600
PACED = {
    "browser/stage.py": "_play",
    "e2e/daemon/group_server.py": "work watch",
    "gateway/page/test_signing_in.py": "drip",
    "gateway/proxy/accounting/test_disconnected_usage.py": "endless",
    "gateway/proxy/test_inference.py": "decode",
    "gateway/proxy/test_large_bodies.py": "test_disconnect_and_burst_of_large_requests_leave_nothing_behind",
    "gateway/proxy/test_many_clients.py": "paced",
    "gateway/proxy/test_node_failures.py": "half respond work",
    "gateway/proxy/test_redaction.py": "fails",
    "gateway/proxy/test_translation.py": "half",
    "gateway/test_metrics_of_traffic.py": "read_slowly respond",
    "gateway/test_server.py": "client paced",
    "hostile/test_floods.py": (
        "test_connects_and_resets_leave_nothing_behind test_silent_and_dripping_connections_delay_nobody"
    ),
    "http/conftest.py": "script",
    "http/server/test_rejections.py": (
        "test_rejects_endless_chunk_extensions test_times_out_slow_heads_and_bodies_with_an_error"
    ),
    "http/test_bounds.py": (
        "test_closes_an_idle_connection_that_sends_empty_lines test_concurrent_bodies_stay_within_the_buffer "
        "test_times_out_a_body_below_the_minimum_rate"
    ),
    "http/test_relay.py": "thinking verbose",
    "http/test_relay_clients.py": "stream visit",
    "http/test_relay_faults.py": "dying reject_late",
    "http/upstream/test_pool.py": "die_second_time reject_early slow stream waiting",
    "http/upstream/test_responses.py": "half old_style",
    "neuron/api/conftest.py": "_outputs load",
    "neuron/api/inference/test_waiting_clients.py": "one",
    "neuron/api/test_head_deadline.py": "drip test_deadline_does_not_apply_to_a_body",
    "neuron/engine/host_pages/late_copies.py": "_run",
    "neuron/engine/host_pages/test_disk.py": "test_files_of_a_killed_writer_are_whole_or_not_found",
    "neuron/faulty/faulty_engine.py": "load step wake",
    "neuron/node/divided/test_faults.py": "respond_all_along",
    "neuron/node/harness/command/fake_server.py": "_stream do_POST",
    "test_traffic_bench.py": "_respond",
}
"""The functions that take their time on purpose: nodes, servers, engines and clients that are slow, or act at some time
that is drawn."""
UNSEEN = {
    "gateway/responses/test_conversations.py": "test_next_turn_at_another_gateway_has_the_previous_one",
    "neuron/kernels/moe/test_hosted.py": (
        "test_rows_are_seen_after_a_pause_and_the_thread_that_looks_for_them_ends_with_its_team"
    ),
}
"""Waits for what nothing shows yet. No function is to be added."""
OTHERS = ("waiting.py", "browser/screenshots.py", "soak/")
"""The shared helpers; a program that takes the pictures of the docs, and one that is a load of hours."""


def is_sleep(node: ast.AST) -> bool:
    """Whether it sleeps for a while; to sleep 0 seconds gives others a turn, and to sleep for ever is to hang."""
    match node:
        case ast.ImportFrom(module=module):
            return module in SLEEPS and any(each.name == "sleep" for each in node.names)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr="sleep"), args=args) if module in SLEEPS:
            return not is_endless_or_none(args)
        case ast.Call(func=ast.Attribute(attr="wait_for_timeout")):  # Playwright's
            return True
        case _:
            return False


def is_endless_or_none(args: list[ast.expr]) -> bool:
    match args:
        case [ast.Constant(value=int(seconds))]:
            return not 0 < seconds < NEVER_ENDS_S
        case [ast.Name(id="NEVER_S")]:
            return True
        case _:
            return False


def sleeps(tests: Path) -> Iterator[tuple[str, str, int]]:
    """The file, the function and the line of each sleep below `tests`."""

    def inside(parent: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        for node in ast.iter_child_nodes(parent):
            if is_sleep(node):
                yield function, getattr(node, "lineno", 0)
            yield from inside(node, node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function)

    for path in python_files(tests):
        name = path.relative_to(tests).as_posix()
        text = "" if name.startswith(OTHERS) else path.read_text(encoding="utf-8")
        if "sleep" in text or "wait_for_timeout" in text:
            yield from ((name, function, line) for function, line in inside(ast.parse(text), ""))


def test_no_test_sleeps_until_something_must_have_happened() -> None:
    allowed = {(name, each) for known in (PACED, UNSEEN) for name, all_of in known.items() for each in all_of.split()}
    found = list(sleeps(ROOT / "tests"))
    assert not [f"{name}:{line}: wait for it" for name, function, line in found if (name, function) not in allowed]
    assert allowed == {(name, function) for name, function, _ in found}, "these sleep no more: shorten the list"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("time.sleep(0.1)", True),
        ("await asyncio.sleep(pause_s)", True),
        ("from time import sleep", True),
        ("page.wait_for_timeout(20)", True),
        ("await asyncio.sleep(0)", False),
        ("await asyncio.sleep(NEVER_S)", False),
        ("time.sleep(3600)", False),
        ("await host.sleep()", False),
    ],
)
def test_detects_a_sleep(tmp_path: Path, code: str, is_found: bool) -> None:
    (tmp_path / "test_x.py").write_text(f"async def test_it():\n    while not is_so:\n        {code}\n")
    assert list(sleeps(tmp_path)) == [("test_x.py", "test_it", 3)] * is_found
