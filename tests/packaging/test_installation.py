"""The wheel and the sdist, installed by pip into clean environments, as a user does it. Needs a package index.

Run by `make distribution`: the engine is large, and the suite must not need the network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cortex import __version__

from ..waiting import WAIT_S

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("TEST_INSTALLATION"), reason="needs a package index; run `make distribution`"
    ),
    pytest.mark.timeout(3600),  # packages are downloaded: the engine's have gigabytes
]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path, *requirements: str) -> Path:
    """A clean virtual environment; returns its folder of programs."""
    run(sys.executable, "-m", "venv", folder)
    for requirement in requirements:
        run(folder / "bin" / "pip", "install", "--disable-pip-version-check", "--no-cache-dir", requirement)
    return folder / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it: of a release, or of the files that git knows."""
    if release := os.environ.get("DIST"):
        return ROOT / release
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    run(os.environ["TEST_INSTALLATION"], "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


def test_files_are_those_of_the_checksums(built: Path) -> None:
    if not (built / "SHA256SUMS").exists():
        pytest.skip("not a release")
    run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=built)


def test_sdist_installs_and_has_what_an_operator_needs(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    programs = environment(tmp_path / "venv", str(sdist))
    assert run(programs / "cortex", "--version").split()[-1] == __version__
    names = set(run("tar", "tzf", sdist).splitlines())
    for path in ("packaging/install.sh", "packaging/grafana/cortex.json", "examples/models.toml", "docs/operations.md"):
        assert f"cortex_fleet-{__version__}/{path}" in names


def test_gateway_alone_has_no_torch_and_says_what_is_missing(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    programs = environment(tmp_path / "venv", str(wheel))
    assert "torch" not in run(programs / "pip", "list").lower()
    missing = subprocess.run([programs / "cortex", "up"], capture_output=True, text=True, check=False)
    assert missing.returncode != 0
    assert "pip install '.[neuron]'" in missing.stderr


def test_manifests_pass_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    programs = environment(tmp_path / "venv", "kubernetes-validate")
    manifests = sorted((ROOT / "packaging" / "kubernetes").glob("*.yaml"))
    assert manifests
    run(programs / "kubernetes-validate", "--strict", *manifests)


@pytest.mark.skipif(shutil.which("podman") is None, reason="needs podman")
def test_podman_compose_reads_the_compose_files(tmp_path: Path) -> None:
    programs = environment(tmp_path / "venv", "podman-compose")
    folder = ROOT / "packaging" / "compose"
    merged = run(programs / "podman-compose", "-f", "compose.yaml", "-f", "compose.cpu.yaml", "config", cwd=folder)
    services = yaml.safe_load(merged)["services"]
    assert services["neuron"]["image"] == "localhost/neuron-cpu"
    assert "deploy" not in services["neuron"]


@pytest.fixture(scope="module")
def with_engine(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = built.glob("*.whl")
    locked = re.search(r"^torch==[\d.]+", (ROOT / "packaging" / "requirements-neuron.lock").read_text(), re.M)
    assert locked is not None
    return environment(tmp_path_factory.mktemp("engine") / "venv", locked[0], f"{wheel}[neuron]")


@pytest.fixture
def up(with_engine: Path, tmp_path: Path) -> Iterator[str]:
    """What `cortex up` printed once it was ready."""
    ports = ["--port", "34313", "--metrics-port", "34314", "--neuron-port", "34131"]
    process = subprocess.Popen(
        [with_engine / "cortex", "up", *ports], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if "Ctrl-C stops everything" in line:
            break
    yield printed
    process.send_signal(signal.SIGINT)
    process.wait(WAIT_S)


def test_installed_wheel_serves_the_demo_model_and_the_page(up: str) -> None:
    found = re.search(r"curl (\S+) .* -d '(.*)'", up)
    assert found is not None, up
    request = urllib.request.Request(found[1], found[2].encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        assert "Tokyo" in json.load(response)["choices"][0]["message"]["content"]
    page = urllib.request.Request("http://127.0.0.1:34313/", headers={"accept": "text/html"})
    with urllib.request.urlopen(page, timeout=WAIT_S) as response:
        text = response.read().decode()
    scripts = re.findall(r'(?:src|href)="([^"]+\.(?:js|css))"', text)
    assert scripts
    for script in scripts:
        with urllib.request.urlopen(f"http://127.0.0.1:34313/{script.lstrip('/')}", timeout=WAIT_S) as response:
            assert response.status == 200
