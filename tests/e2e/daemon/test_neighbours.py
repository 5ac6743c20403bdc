"""Files of models between nodes: real daemons with keys, of which only one reaches the hub."""

from __future__ import annotations

import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from cortex.wire.node.neighbours import PATH, key_hash, new_ticket

from ...neuron.fake_hub import FakeHub, served
from ...programs import PYTHONPATH, WITHOUT_TORCH
from ...waiting import wait_until
from .conftest import Daemon, StartDaemon, StartGateway, nodes_of

pytestmark = pytest.mark.e2e

MODEL = "org/model"
KEYS = {name: f"nk-0123456789abcdef-{name}" for name in ("one", "two", "three")}

OWN = "own"
"""A model at a path that only the first node has and may read."""
LOADS = "two"
"""The only node that has the engine."""


@dataclass
class Fleet:
    own: Path
    hub: FakeHub
    nodes: dict[str, Daemon]
    gateway: Daemon

    def pull(self, **body: Any) -> dict[str, Any]:
        status, started = self.gateway.call("/fleet/pull", {"model": MODEL, **body})
        if status != 202:
            return {"state": "rejected", **started}
        path = f"/fleet/jobs/{started['job']['id']}"
        wait_until(lambda: bool(self.gateway.call(path)[1]["state"] != "running"), "the pull does not end")
        return dict(self.gateway.call(path)[1])

    def holders(self, model: str = MODEL) -> set[str]:
        return {name for name, node in nodes_of(self.gateway).items() if node["files"].get(model)}

    def raw(self, node: str, path: str, token: str) -> int:
        request = urllib.request.Request(self.nodes[node].url + path, headers={"authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture(scope="module")
def fleet(start_daemon: StartDaemon, start_gateway: StartGateway, tiny_model: Path) -> Iterator[Fleet]:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    with served(FakeHub(files, repository=MODEL)) as hub, TemporaryDirectory() as elsewhere:
        own = Path(elsewhere) / "Own model"
        shutil.copytree(tiny_model, own)
        nodes = {
            name: start_daemon(
                *([f'[[models]]\nid = "{OWN}"\nsource = "{own}"'] if name == "one" else []),
                key=key,
                environment={
                    "HF_ENDPOINT": hub.endpoint if name == "one" else "http://127.0.0.1:9",
                    "NO_PROXY": "*",
                    "PYTHONPATH": PYTHONPATH if name == LOADS else WITHOUT_TORCH,
                },
                waits=False,
            )
            for name, key in KEYS.items()
        }
        for node in nodes.values():
            node.wait_for("cold", "tiny")
        yield Fleet(own, hub, nodes, start_gateway(f'[[models]]\nid = "{MODEL}"\n', nodes))


@pytest.fixture(autouse=True)
def _no_files(fleet: Fleet) -> Iterator[None]:
    yield
    for node in fleet.nodes.values():
        node.call("/models/unload", {"model_id": MODEL})
        node.call("/files/delete", {"model_id": MODEL})
    wait_until(lambda: not fleet.holders(), "files are still reported")


def test_pull_to_several_nodes_downloads_once_and_fills_those_without_the_hub(fleet: Fleet) -> None:
    job = fleet.pull(nodes=["two", "one", "three"])
    assert job["state"] == "done", job
    assert sorted(job["nodes"]) == ["one", "three", "two"]
    names = [path.rpartition("/")[2] for path, _ in fleet.hub.contents_requests()]
    assert sorted(names) == sorted(set(names)), "each file came from the hub once"
    status, loaded = fleet.nodes[LOADS].call("/models/load?wait=true", {"model_id": MODEL})
    assert (status, loaded["state"]) == (200, "ready"), loaded


def test_cold_load_on_a_node_without_the_hub_takes_the_files_of_another_one(fleet: Fleet) -> None:
    assert fleet.pull(node="one")["state"] == "done"
    wait_until(lambda: fleet.holders() == {"one"}, "the files are not reported")
    status, response = fleet.gateway.call(f"/fleet/models/{MODEL}/load", {"node": LOADS, "wait": True})
    assert status == 200, response
    wait_until(lambda: fleet.nodes[LOADS].model(MODEL)["state"] == "ready", "it is not loaded")


def test_copy_needs_a_node_that_has_the_files(fleet: Fleet) -> None:
    rejected = fleet.pull(nodes=["two"], copy=True)
    assert "No other node" in str(rejected), rejected
    assert fleet.pull(node="one")["state"] == "done"
    wait_until(lambda: fleet.holders() == {"one"}, "the files are not reported")
    fleet.hub.requests.clear()
    assert fleet.pull(nodes=["two", "three"], copy=True)["state"] == "done"
    assert not fleet.hub.requests


def test_altered_and_damaged_files_of_a_neighbour_are_never_used(fleet: Fleet) -> None:
    assert fleet.pull(node="one")["state"] == "done"
    wait_until(lambda: fleet.holders() == {"one"}, "the files are not reported")
    cache = fleet.nodes["one"].log.parent / "hub"
    (weights,) = [path.resolve() for path in cache.rglob("model.safetensors")]
    intact = weights.read_bytes()
    weights.write_bytes(bytes(len(intact)))
    job = fleet.pull(nodes=["two"], copy=True)
    assert job["state"] == "failed", job
    assert not list((fleet.nodes["two"].log.parent / "hub").rglob("model.safetensors"))
    weights.write_bytes(intact)
    assert fleet.pull(nodes=["two"], copy=True)["state"] == "done"


def test_model_at_a_path_is_copied_loaded_and_copied_from_there(fleet: Fleet) -> None:
    fleet.hub.requests.clear()
    job = fleet.pull(model=OWN, nodes=["three"], copy=True)
    assert job["state"] == "done", job
    wait_until(lambda: fleet.holders(OWN) == {"three"}, "the copy is not reported")
    changed = fleet.own / "config.json"
    before = changed.read_bytes()
    fleet.own.rename(fleet.own.with_name("away"))
    try:
        job = fleet.pull(model=OWN, nodes=[LOADS], copy=True)
        assert job["state"] == "done", job
        status, response = fleet.gateway.call(f"/fleet/models/{OWN}/load", {"node": LOADS, "wait": True})
        assert status == 200, response
        wait_until(lambda: fleet.nodes[LOADS].model(OWN)["state"] == "ready", "it is not loaded")
    finally:
        fleet.own.with_name("away").rename(fleet.own)
    (copied,) = (fleet.nodes["three"].log.parent / "hub").rglob("config.json")
    assert copied.read_bytes() == before
    changed.write_bytes(before + b"\n")
    assert fleet.pull(model=OWN, nodes=["three"], copy=True)["state"] == "done"
    contents = {path.read_bytes() for path in (fleet.nodes["three"].log.parent / "hub").rglob("config.json")}
    assert before + b"\n" in contents, "a later copy has what changed"
    assert not fleet.hub.contents_requests()
    for name in ("two", "three"):
        fleet.nodes[name].call("/models/unload", {"model_id": OWN})
        status, deleted = fleet.nodes[name].call("/files/delete", {"model_id": OWN})
        assert (status, deleted["freed_bytes"] > 0) == (200, True), deleted
    status, response = fleet.nodes["two"].call("/models/load", {"model_id": "other", "source": str(fleet.own)})
    assert response["error"]["code"] == "source_not_allowed", "without a sender it is a path outside of the roots"


def test_only_tickets_for_the_repository_and_names_of_its_files_are_admitted(fleet: Fleet) -> None:
    assert fleet.pull(node="one")["state"] == "done"
    own, other = f"{PATH}{MODEL}", f"{PATH}org/other"
    ticket = new_ticket(key_hash(KEYS["one"]), MODEL, time.time())
    expired = new_ticket(key_hash(KEYS["one"]), MODEL, time.time() - 2 * 24 * 3600)
    of_another_node = new_ticket(key_hash(KEYS["two"]), MODEL, time.time())
    assert fleet.raw("one", own, ticket) == 200
    for token in (expired, of_another_node, "ticket-1-" + "0" * 64, KEYS["two"], ""):
        assert fleet.raw("one", own, token) == 401
    assert fleet.raw("one", other, ticket) == 401
    for path in ("/models", "/health/x", "/files/pulls/x", f"{own}/../../health"):
        assert fleet.raw("one", path, ticket) in (401, 404), path
    for digest in ("%2e%2e%2frefs%2fmain", "..%2f..", "main", "0" * 64, "%00", "config.json"):
        assert fleet.raw("one", f"{own}/{digest}", ticket) == 404, digest
    assert fleet.raw("one", f"{PATH}..%2f..%2fetc/passwd", KEYS["one"]) == 404
