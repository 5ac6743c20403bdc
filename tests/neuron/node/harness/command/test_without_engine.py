"""A node on a host that has only `pip install cortex-fleet`: no torch, no tokenizers, nothing of the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .....ports import free_port
from .....waiting import WAIT_S, wait_until
from .commands import START

HIDE = """
import importlib.machinery

HIDDEN = {names!r}
find = importlib.machinery.PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find(name, path, target)

importlib.machinery.PathFinder.find_spec = find_spec
"""
ENGINE = ("torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2", "llguidance", "transformers", "PIL")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which no interpreter, and no child of one, finds the packages of the engine and of the hub."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(HIDE.format(names={*ENGINE, "huggingface_hub"}))
    return {**os.environ, "PYTHONPATH": str(folder), "HF_HOME": str(folder / "hub")}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    harness = {"name": "fake", "cmd": list(START), "memory_mb": 16}
    lines = [
        'listen = "127.0.0.1:13131"',
        "[[harnesses]]",
        *(f"{name} = {json.dumps(value)}" for name, value in harness.items()),
    ]
    with_path = {"name": "with-files", "cmd": [*START, "--log", "${MODEL_PATH}"], "memory_mb": 16}
    lines += ["[[harnesses]]", *(f"{name} = {json.dumps(value)}" for name, value in with_path.items())]
    for model in ({"id": "m", "harness": "fake"}, {"id": "owner/native"}, {"id": "owner/far", "harness": "with-files"}):
        lines += ["[[models]]", *(f"{name} = {json.dumps(value)}" for name, value in model.items())]
    path = tmp_path_factory.mktemp("node") / "neuron.toml"
    path.write_text("\n".join(lines))
    return path


def neuron(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cortex.cli.neuron", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=WAIT_S)


def responds(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def url(environment: dict[str, str], file: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "cortex.cli.neuron", "serve", "-c", str(file), "-p", str(port)]
    with subprocess.Popen(command, env=environment, cwd=file.parent) as process:
        try:
            wait_until(lambda: process.poll() is not None or responds(port))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def call(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(url: str, model: str) -> tuple[int, Any]:
    return call(f"{url}/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "hi"}]})


def test_serves_models_through_harnesses(url: str) -> None:
    status, discovery = call(f"{url}/discovery")
    assert (status, discovery["harnesses"]) == (200, ["fake", "with-files"])
    status, answer = chat(url, "m")
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"]


def test_native_model_is_rejected_with_the_extra_that_is_missing(url: str) -> None:
    status, answer = call(f"{url}/models/load", {"model_id": "owner/native", "wait": True})
    assert status == 422, answer
    assert "engine is not installed" in answer["error"]["message"]
    assert "'.[neuron]'" in answer["error"]["message"]
    assert "harness" in answer["error"]["message"]
    assert chat(url, "owner/native")[0] in (422, 404)


def test_download_is_rejected_with_the_extra_that_is_missing(url: str) -> None:
    status, answer = call(f"{url}/models/load", {"model_id": "owner/far", "wait": True})
    assert status >= 400
    assert "huggingface-hub" in answer["error"]["message"]


def test_doctor_says_what_the_devices_can_do(environment: dict[str, str], file: Path) -> None:
    done = neuron(environment, "doctor", "-c", file, "--json")
    findings = [finding["what"] for finding in json.loads(done.stdout) if finding["topic"] == "devices"]
    assert "natively: nothing" in findings[0]
    assert "through a harness: fake, with-files" in findings[0]
    assert json.loads(neuron(environment, "discover", "-c", file, "--json").stdout)["devices"]


def test_commands_that_need_the_engine_say_so(environment: dict[str, str]) -> None:
    done = neuron(environment, "tp-smoke")
    assert done.returncode != 0
    assert "torch" in done.stderr
