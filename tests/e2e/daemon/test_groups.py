"""Models that servers run on two and three nodes: start, service, loss of every part, and nothing left behind.

The nodes are loopback addresses, the servers stand-ins with the arguments of the real ones (`group_server.py`). With
`GROUP_TESTS=full` more faults, also in network namespaces (`test_group_networks.py`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .conftest import Daemon, StartDaemon, StartGateway, nodes_of, until

pytestmark = pytest.mark.e2e
long = pytest.mark.skipif(os.environ.get("GROUP_TESTS") != "full", reason="takes long; set GROUP_TESTS=full")

NAMES = ("one", "two", "three")
PROGRAMS = ("vllm", "sglang", "llama-server", "rpc-server")


@dataclass
class Group:
    """Three nodes and their gateway."""

    start_daemon: StartDaemon
    start_gateway: StartGateway
    folder: Path
    nodes: dict[str, Daemon] = field(default_factory=dict)
    gateway: Daemon = field(init=False)

    def __post_init__(self) -> None:
        program = f"#!{sys.executable} -IS\n" + Path(__file__).with_name("group_server.py").read_text()
        for name in PROGRAMS:
            (self.folder / name).write_text(program)
            (self.folder / name).chmod(0o755)
        (self.folder / "model").mkdir()
        (self.folder / "model" / "weights").write_bytes(bytes(1000))
        for name in NAMES:
            self.start_node(name, waits=False)
        for node in self.nodes.values():
            node.wait_for("cold", "tiny")
        self.gateway = self.start_gateway(self.models, self.nodes)

    def start_node(self, name: str, *, waits: bool = True, version: str = "1.2.3") -> None:
        number = NAMES.index(name) + 1
        listen = self.nodes[name].url.removeprefix("http://") if name in self.nodes else ""
        self.nodes[name] = self.start_daemon(
            f'cluster_address = "127.0.0.{number}"',
            "drain_s = 5",
            '[[harnesses]]\nname = "broken"\nlike = "vllm"\nargs = "--fails 1"',
            listen=listen,
            waits=waits,
            environment={"PATH": f"{self.folder}:{os.environ['PATH']}", "STAND_IN_VERSION": version},
        )

    @property
    def models(self) -> str:
        source = f'source = "{self.folder}/model"\nvram_mb = 60'
        return "".join(
            f'[[models]]\nid = "{name}"\nharness = "{harness}"\nnodes = {nodes}\n{source}\n'
            for name, harness, nodes in (
                ("two", "vllm", '["one", "two"]'),
                ("all", "sglang", "3"),
                ("rpc", "llama-server", '["two", "one"]'),
                ("broken", "broken", "2"),
            )
        )

    def ask(self, model: str) -> tuple[int, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        return self.gateway.call("/v1/chat/completions", body)

    def is_served(self, model: str) -> bool:
        return self.ask(model)[0] == 200

    def processes(self, model: str = "") -> dict[int, int]:
        """Process id → rank of the servers of a model, or of all."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                arguments = (entry / "cmdline").read_text().split("\0")[:-1] if entry.name.isdigit() else []
            except OSError:
                continue
            programs = [str(self.folder / name) for name in PROGRAMS]
            if len(arguments) > 2 and arguments[2] in programs and (not model or model in arguments):
                rank = arguments[arguments.index("--node-rank") + 1] if "--node-rank" in arguments else "0"
                found[int(entry.name)] = int(rank)
        return found

    def members(self, model: str) -> dict[str, tuple[str, int]]:
        """By node: the state and the rank."""
        return {
            name: (held["state"], held["rank"])
            for name, node in nodes_of(self.gateway).items()
            for held in (*node["models"], *node["members"])
            if held["id"] == model
        }

    def unload(self, model: str) -> None:
        self.gateway.call(f"/fleet/models/{model}/unload", {})
        until(lambda: not self.processes(model), f"{model} is not gone")


@pytest.fixture(scope="module")
def group(
    start_daemon: StartDaemon, start_gateway: StartGateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group]:
    made = Group(start_daemon, start_gateway, tmp_path_factory.mktemp("group"))
    yield made
    for node in made.nodes.values():
        node.process.terminate()
    until(lambda: not made.processes(), "servers are left")


def test_group_starts_on_all_its_nodes_and_the_leader_serves(group: Group) -> None:
    for model, nodes in (("two", {"one", "two"}), ("all", set(NAMES)), ("rpc", {"one", "two"})):
        status, response = group.ask(model)
        assert (status, response["choices"][0]["message"]["content"]) == (200, "word word "), response
        members = group.members(model)
        assert members.keys() == nodes
        assert sorted(members.values()) == [("ready", rank) for rank in range(len(nodes))]
        group.unload(model)
    assert not any(node["members"] for node in nodes_of(group.gateway).values())


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=long),
        pytest.param(0, signal.SIGSTOP, marks=long),
        pytest.param(1, signal.SIGSTOP, marks=long),
    ],
)
def test_group_of_which_a_member_is_lost_ends_and_is_started_again(group: Group, rank: int, number: int) -> None:
    until(lambda: group.is_served("two"), "it is not served")
    before = group.processes("two")
    (victim,) = [process for process, its_rank in before.items() if its_rank == rank]
    os.kill(victim, number)
    until(lambda: not before.keys() & group.processes("two").keys(), "a member of the old group is left")
    until(lambda: sorted(group.members("two").values()) == [("ready", 0), ("ready", 1)], "it is not started again")
    assert group.is_served("two")
    assert len(group.processes("two")) == 2


@long
def test_group_goes_on_while_its_gateway_restarts(group: Group) -> None:
    until(lambda: group.is_served("two"), "it is not served")
    before = group.processes("two")
    group.gateway.process.kill()
    group.gateway.process.wait()
    group.gateway = group.start_gateway(group.models, group.nodes)
    assert group.is_served("two")
    assert group.processes("two") == before


@long
def test_group_whose_node_restarts_is_started_again(group: Group) -> None:
    until(lambda: group.is_served("two"), "it is not served")
    group.nodes["two"].process.terminate()
    group.nodes["two"].process.wait()
    until(lambda: not group.processes("two"), "the leader has not ended")
    group.start_node("two")
    until(lambda: group.members("two") == {"one": ("ready", 0), "two": ("ready", 1)}, "it is not started again")
    group.unload("two")


def test_failed_start_shows_the_log_of_the_member_and_leaves_nothing(group: Group) -> None:
    status, response = group.ask("broken")
    assert status >= 400
    assert "it fails on purpose" in str(response)
    assert not group.processes("broken")


@long
def test_nodes_with_different_versions_of_the_server_start_no_group(group: Group) -> None:
    group.nodes["three"].process.kill()
    group.nodes["three"].process.wait()
    group.start_node("three", version="2.0.0")
    until(lambda: all(node["up"] for node in nodes_of(group.gateway).values()), "the node is not up")
    status, response = group.ask("all")
    assert status >= 400
    assert "different versions of its server" in str(response)
    assert "2.0.0 on three" in str(response)
    assert not group.processes("all")
