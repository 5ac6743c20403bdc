"""Programs import without the packages that are not installed where they run.

Fresh interpreters import them while those packages cannot be imported, which also detects indirect imports.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .waiting import WAIT_S

SOURCE = Path(__file__).parents[1] / "src"

BLOCKED_IMPORTS = """
import importlib, importlib.abc, pkgutil, sys

blocked, packages = set(sys.argv[1].split(",")), sys.argv[2].split(",")

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == stop or name.startswith(stop + ".") for stop in blocked):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
        return None

sys.meta_path.insert(0, Block())
for package in packages:
    module = importlib.import_module(package)
    for entry in pkgutil.walk_packages(getattr(module, "__path__", []), package + "."):
        if not entry.name.endswith("__main__"):
            importlib.import_module(entry.name)
"""

GATEWAY_ONLY = frozenset(
    {"torch", "triton", "numpy", "aiohttp", "huggingface_hub", "tokenizers", "opentelemetry", "cortex.neuron"}
)
NO_ENGINE = frozenset(
    {
        "torch",
        "triton",
        "transformers",
        "tokenizers",
        "huggingface_hub",
        "numpy",
        "safetensors",
        "jinja2",
        "llguidance",
        "PIL",
    }
)
NOT_ON_A_GPU_HOST = frozenset(
    {"msgspec", "httptools", "llguidance", "uvloop", "click", "rich", "jinja2", "huggingface_hub", "transformers"}
)


def import_without(blocked: frozenset[str], *packages: str, source: Path = SOURCE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORTS, ",".join(sorted(blocked)), ",".join(packages)],
        env={"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


@pytest.mark.parametrize(
    ("blocked", "packages"),
    [
        pytest.param(
            GATEWAY_ONLY,
            ("cortex.wire", "cortex.fleet", "cortex.http", "cortex.ipc", "cortex.gateway", "cortex.cli"),
            id="the gateway and the commands run without the engine",
        ),
        pytest.param(
            frozenset({"torch", "triton", "transformers"}),
            ("cortex.neuron.text", "cortex.neuron.tokenizer_process.service"),
            id="prompts are parsed and encoded without torch",
        ),
        pytest.param(
            NO_ENGINE,
            ("cortex.neuron.api", "cortex.neuron.node", "cortex.neuron.tokenizer_process.client", "cortex.ipc"),
            id="a node's HTTP process runs without the engine's packages",
        ),
        pytest.param(
            NOT_ON_A_GPU_HOST,
            (
                "cortex.neuron.engine",
                "cortex.neuron.models",
                "cortex.neuron.layers",
                "cortex.neuron.kernels",
                "cortex.neuron.weights",
            ),
            id="the engine runs on a bare GPU host",
        ),
    ],
)
def test_packages_import_without_optional_dependencies(blocked: frozenset[str], packages: tuple[str, ...]) -> None:
    result = import_without(blocked, *packages)
    assert result.returncode == 0, result.stderr


def test_detects_an_indirect_import_of_a_blocked_package(tmp_path: Path) -> None:
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "innocent.py").write_text("from planted import deep")
    (package / "deep.py").write_text("import torch")
    result = import_without(GATEWAY_ONLY, "planted", source=tmp_path)
    assert "blocked: torch" in result.stderr
