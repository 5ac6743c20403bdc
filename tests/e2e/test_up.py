"""`cortex up` from start to end: ready line, second start, signals, and every fault in one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cortex.cli.up.demo import SMOLLM2

from ..programs import WITHOUT_TORCH
from ..waiting import WAIT_S
from .test_agents import write_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conftest import Run, Start

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Is ready sooner than the demo model."""
    return str(write_model(tmp_path_factory.mktemp("small") / "small", "qwen3.jinja"))


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=WAIT_S) as response:
        return json.load(response)


def chat(url: str) -> str:
    body = {
        "model": SMOLLM2.id,
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def test_the_printed_curl_line_works_as_it_is(up: Run) -> None:
    command = next(line for line in up.lines if line.strip().startswith("curl "))
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert json.loads(result.stdout)["choices"][0]["message"]["content"]


def test_all_three_ports_respond(up: Run) -> None:
    entry = next(model for model in get(f"{up.url}/v1/models")["data"] if model["id"] == SMOLLM2.id)
    assert entry["loaded"] is True
    assert get(f"http://127.0.0.1:{up.neuron_port}/health")["status"] == "ok"
    with urllib.request.urlopen(f"http://127.0.0.1:{up.metrics_port}/metrics", timeout=WAIT_S) as response:
        assert "cortex_requests_total" in response.read().decode()


def test_ctrl_c_while_it_loads_leaves_no_process(start: Start) -> None:
    run = start()
    run.wait_for_program("neuron")
    assert run.stop(signal.SIGINT) in (0, 130)
    run.assert_nothing_left()


def test_up_ends_with_one_line_if_the_gateway_dies_while_models_load(start: Start, small_model: str) -> None:
    run = start(small_model)
    os.kill(run.wait_for_program("gateway"), signal.SIGKILL)
    run.assert_one_line_fault("gateway", code=1)


@pytest.mark.parametrize("option", ["--port", "--metrics-port", "--neuron-port"])
def test_a_port_in_use_names_port_and_option(start: Start, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        start(option, str(port)).assert_one_line_fault(f"port {port}", option, code=7)


def test_a_missing_config_is_named(start: Start, tmp_path: Path) -> None:
    run = start("--config", str(tmp_path / "none.toml"))
    assert run.wait_end() == 3
    assert run.lines == [f"cortex: no config file at {tmp_path}/none.toml: create it, or name another one\n"]
    run.assert_nothing_left()


def test_a_broken_config_names_the_line_and_the_nearest_key(start: Start, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[gateway]\nlissten = "127.0.0.1:1"\n')
    run = start("--config", str(config))
    assert run.wait_end() == 3
    assert "line 2" in run.lines[-1]
    assert "listen" in run.lines[-1]
    run.assert_nothing_left()


def test_a_missing_model_path_is_a_usage_error(start: Start) -> None:
    start("./not-there.gguf").assert_one_line_fault("not-there.gguf", code=2)


def test_an_unreadable_model_file_is_named(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user can read every file")
    start(str(path)).assert_one_line_fault("secret.gguf", code=2)


def test_a_model_file_that_the_neuron_rejects_is_explained(start: Start, tmp_path: Path, demo_model: Path) -> None:
    path = tmp_path / "truncated.gguf"
    with demo_model.open("rb") as whole, path.open("wb") as part:
        part.write(whole.read(20_000_000))
    start(str(path), PYTHONPATH=WITHOUT_TORCH).assert_one_line_fault("truncated", code=1)


def test_no_network_for_the_demo_model_is_explained(start: Start, tmp_path: Path) -> None:
    environment = {"CORTEX_CACHE": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    run = start(**environment, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_EXTRA_INDEX_URL="")
    run.assert_one_line_fault("demo model", code=4)


def test_no_network_for_a_hub_model_is_explained(start: Start, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PYTHONPATH": WITHOUT_TORCH}
    run = start("nobody/no-such-model", **environment)
    run.assert_one_line_fault("nobody/no-such-model")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a filesystem of its own with hardly a byte free."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small filesystem")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_no_disk_space_for_the_demo_model_is_explained(start: Start, full_disk: Path) -> None:
    start(CORTEX_CACHE=str(full_disk)).assert_one_line_fault("disk space", "CORTEX_CACHE", code=7)


def test_no_disk_space_for_the_run_itself_is_explained(start: Start, full_disk: Path, demo_model: Path) -> None:
    with (full_disk / "fill").open("wb", buffering=0) as fill:
        while shutil.disk_usage(full_disk).free:
            fill.write(bytes(4096))
    start(str(demo_model), CORTEX_CACHE=str(full_disk)).assert_one_line_fault("no space left", code=7)


@pytest.mark.ends_shared
def test_ctrl_c_mid_response_leaves_no_process(up: Run) -> None:
    """The last test of those that share this run, and of this folder."""
    assert "Tokyo" in chat(up.url)
    with socket.create_connection(("127.0.0.1", up.port)) as client:
        body = json.dumps(
            {"model": SMOLLM2.id, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert client.recv(1)
        assert up.stop(signal.SIGINT) == 0  # long before the response would have ended
    up.assert_nothing_left()
