"""The wheel and the source distribution, as a user installs them: without the checkout and without torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cortex import __version__

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # a build changes the arguments
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    # A checkout on the path would count as an installation.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy: the build leaves files in its source tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("docs", "examples", "packaging"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-c", BUILD, out, cwd=source)
    return out


def closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that `requirements` need, with the dependencies of each."""
    found: set[str] = set()
    pending = list(requirements)
    while pending:
        requirement = Requirement(pending.pop())
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in found:
            found.add(name)
            pending += importlib.metadata.requires(name) or []
    return found


def link(distribution: str, packages: Path) -> None:
    """Make an installed distribution importable from `packages` too."""
    installed = importlib.metadata.distribution(distribution)
    for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
        if not (packages / top).exists():
            (packages / top).symlink_to(str(installed.locate_file(top)))


def test_torch_is_locked_in_one_place_inside_the_accepted_range() -> None:
    """An upper bound: `pip install` would take a version of torch that nobody has tried with this engine."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (accepted,) = [each for line in extras["neuron"] if (each := Requirement(line)).name == "torch"]
    assert {part.operator for part in accepted.specifier} == {">=", "<"}
    (locked,) = re.findall(r"^torch==([\d.]+)", (ROOT / "packaging" / "requirements-neuron.lock").read_text(), re.M)
    assert accepted.specifier.contains(locked)
    for file in (ROOT / "Makefile", ROOT / "packaging" / "install.sh", *(ROOT / "packaging" / "container").iterdir()):
        assert not re.search(r"torch *==\s*\d", file.read_text()), f"{file.name} names a version of its own"


def test_wheel_without_extras_is_the_gateway_without_torch(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith(f"cortex_fleet-{__version__}-")
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--no-compile", wheel)
    (packages,) = venv.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"cortex_fleet-{__version__}.dist-info/METADATA").decode()
    needed = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    for distribution in closure(needed):
        link(distribution, packages)

    assert run(venv / "bin" / "cortex", "--version").split()[-1] == __version__
    imports = "import sys, cortex.gateway.server; print('torch' in sys.modules, cortex.__file__)"
    has_torch, where = run(python, "-I", "-c", imports, cwd=tmp_path).split()
    assert has_torch == "False"
    assert Path(where).is_relative_to(packages)
    assert any((packages / "cortex" / "gateway" / "page" / "files").glob("*.html"))
    missing = subprocess.run([venv / "bin" / "neuron", "serve"], capture_output=True, text=True, check=False)
    assert "pip install '.[neuron]'" in missing.stderr
    assert "[[harnesses]]" in missing.stderr
    devices = json.loads(run(venv / "bin" / "neuron", "discover", "--json"))["devices"]
    assert devices[0]["total_bytes"] > 0


def test_sdist_has_what_a_build_needs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/cortex/py.typed"} <= names
    assert "src/cortex/gateway/page/files/index.html" in names
    assert {"packaging/install.sh", "packaging/grafana/cortex.json", "examples/models.toml"} <= names
