"""A fleet in the middle of an upgrade: an earlier revision as the node and as the gateway, and its database.

`make mixed` names the revision in `MIXED_WITH`.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex.gateway.ledger.keys import as_toml, generate

from ...ports import free_port
from ...programs import SOURCE
from ...waiting import WAIT_S, wait_until
from .conftest import TINY, Daemon

REVISION = os.environ.get("MIXED_WITH", "")
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not REVISION, reason="make mixed sets MIXED_WITH")]

KEY = generate("anna", operator=True, window_tokens=100_000)
NODE_KEY = "nk-a-key-of-the-node"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the earlier revision."""
    folder = tmp_path_factory.mktemp("earlier")
    archive = subprocess.run(["git", "archive", REVISION, "src"], cwd=SOURCE.parent, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[Start]:
    """Starts a node, or a gateway over one, from the given sources."""
    started: list[Daemon] = []

    def program(module: str, source: Path, config: str, url: str, key: str) -> Daemon:
        file = tmp_path / f"{module}.toml"
        file.write_text(config)
        log = tmp_path / f"{module}.{len(started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(file)],
                stdin=subprocess.DEVNULL,
                stderr=output,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(source), "NODE_KEY": NODE_KEY},
            )
        started.append(Daemon(process, url, log, key))
        return started[-1]

    def begin(source: Path, node: Daemon | None = None) -> Daemon:
        listen = f"127.0.0.1:{free_port()}"
        if node is None:
            config = (
                f'listen = "{listen}"\nkeys = ["{NODE_KEY}"]\n[harness.torch]\nhf_cache = "{tmp_path}/hub"\n'
                f'[[models]]\nid = "{TINY}"\nsource = "{tiny_model}"\n'
            )
            daemon = program("cortex.neuron", source, config, f"http://{listen}", NODE_KEY)
            daemon.wait_for("cold", TINY)
            return daemon
        config = (
            f'[gateway]\nlisten = "{listen}"\nmetrics_listen = "127.0.0.1:{free_port()}"\nnode_key_env = "NODE_KEY"\n'
            f'[[neurons]]\nname = "beast"\nendpoint = "{node.url}"\n{as_toml(KEY.section)}'
        )
        daemon = program("cortex.gateway", source, config, f"http://{listen}", KEY.text)
        wait_until(lambda: is_up(daemon), "the node is not up")
        return daemon

    yield begin
    for daemon in started:
        end(daemon)


def end(daemon: Daemon) -> None:
    if daemon.process.poll() is None:
        daemon.process.terminate()
    daemon.process.wait(WAIT_S)


def is_up(gateway: Daemon) -> bool:
    try:
        status, body = gateway.call("/fleet/status")
    except (urllib.error.URLError, ConnectionError):
        return False
    return status == 200 and body["nodes"][0]["up"]


def used(gateway: Daemon) -> int:
    """Tokens in the ledger."""
    status, body = gateway.call("/fleet/usage")
    assert status == 200, body
    return sum(row["prompt_tokens"] + row["completion_tokens"] for row in body["rows"])


def state(gateway: Daemon) -> str:
    node = gateway.call("/fleet/status")[1]["nodes"][0]
    return str({model["id"]: model["state"] for model in node["models"]}.get(TINY, "cold"))


def serve_everything(gateway: Daemon) -> None:
    """What a client and an operator do, through both programs."""
    chat: dict[str, Any] = {"model": TINY, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"model": TINY, "input": "hi", "max_output_tokens": 4}),
        ("/v1/completions", {"model": TINY, "prompt": "hi", "max_tokens": 4}),
    ):
        status, response = gateway.call(path, body)
        assert status == 200, (path, response)
        usage = response["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) in range(1, 5), (path, usage)
    assert state(gateway) == "ready"
    wait_until(lambda: used(gateway) > 0, "no usage was recorded")
    status, body = gateway.call(f"/v1/models/{TINY}")
    assert status == 200, body
    status, body = gateway.call("/v1/chat/completions", {**chat, "model": "none"})
    assert status == 404, body
    for order, then in (("unload", "cold"), ("load", "ready")):
        status, body = gateway.call(f"/fleet/models/{TINY}/{order}", {})
        assert status == 200, body
        wait_until(lambda then=then: state(gateway) == then, f"the model is not {then}")  # type: ignore[misc]
    assert "Traceback" not in gateway.log.read_text()


def test_gateway_of_this_revision_works_with_an_earlier_node(earlier: Path, start: Start) -> None:
    serve_everything(start(SOURCE, start(earlier)))


def test_earlier_gateway_works_with_a_node_of_this_revision(earlier: Path, start: Start) -> None:
    serve_everything(start(earlier, start(SOURCE)))


def test_database_of_an_earlier_gateway_is_used_on(earlier: Path, start: Start) -> None:
    node = start(earlier)
    gateway = start(earlier, node)
    body = {"model": TINY, "prompt": "hi", "max_tokens": 4}
    status, response = gateway.call("/v1/responses", {"model": TINY, "input": "hi", "max_output_tokens": 4})
    assert status == 200, response
    assert gateway.call("/v1/completions", body)[0] == 200
    wait_until(lambda: used(gateway) > 0, "no usage was recorded")
    before = used(gateway)
    end(gateway)
    upgraded = start(SOURCE, node)
    assert used(upgraded) == before
    again = {"model": TINY, "input": "more", "max_output_tokens": 4, "previous_response_id": response["id"]}
    status, continued = upgraded.call("/v1/responses", again)
    assert status == 200, json.dumps(continued)
