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
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ...neuron.fake_hub import FakeHub, served
from ...programs import PYTHONPATH, WITHOUT_TORCH
from ...waiting import wait_until
from .conftest import Daemon, StartDaemon, StartGateway, nodes_of

pytestmark = pytest.mark.e2e
IS_FULL = os.environ.get("GROUP_TESTS") == "full"
long = pytest.mark.skipif(not IS_FULL, reason="takes long; set GROUP_TESTS=full")

NAMES = ("one", "two", "three")
PROGRAMS = ("vllm", "sglang", "llama-server", "ggml-rpc-server", "ray")
HUB_MODEL = {"config.json": b"{}", "model.safetensors": bytes(100_000)}


@dataclass
class Group:
    """Three nodes and their gateway."""

    start_daemon: StartDaemon
    start_gateway: StartGateway
    folder: Path
    hub: FakeHub
    native: Path
    nodes: dict[str, Daemon] = field(default_factory=dict)
    gateway: Daemon = field(init=False)

    def __post_init__(self) -> None:
        program = f"#!{sys.executable} -IS\n" + Path(__file__).with_name("group_server.py").read_text()
        for name in PROGRAMS:
            (self.folder / name).write_text(program)
            (self.folder / name).chmod(0o755)
        self.temporary.mkdir()
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
            '[[harnesses]]\nname = "large"\nlike = "vllm"\nargs = "--megabytes 400"',
            "[limits]\nmemory_mb = 450",
            listen=listen,
            waits=waits,
            environment={
                "PATH": f"{self.folder}:{os.environ['PATH']}",
                "STAND_IN_VERSION": version,
                "HF_ENDPOINT": self.hub.endpoint,
                "NO_PROXY": "*",
                "TMPDIR": str(self.temporary),
                "PYTHONPATH": PYTHONPATH if IS_FULL else WITHOUT_TORCH,  # a long test loads a native model
            },
        )

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def temporary_folders(self) -> list[Path]:
        """Those of the servers on all nodes."""
        return list(self.temporary.glob("cortex-*"))

    @property
    def models(self) -> str:
        groups = "".join(
            f'[[models]]\nid = "{name}"\nharness = "{harness}"\nnodes = {nodes}\nsource = "{source}"\n'
            f"vram_mb = {800 if name == 'large' else 60}\n"
            for name, harness, nodes, source in (
                ("two", "vllm", '["one", "two"]', f"{self.folder}/model"),
                ("all", "sglang", "3", f"{self.folder}/model"),
                ("rpc", "llama-server", '["two", "one"]', f"{self.folder}/model"),
                ("ray", "vllm-ray", '["one", "two"]', f"{self.folder}/model"),
                ("broken", "broken", "2", f"{self.folder}/model"),
                ("hub", "vllm", '["one", "two"]', "org/model"),
                ("large", "large", '["one", "two"]', f"{self.folder}/model"),
            )
        )
        return f'{groups}[[models]]\nid = "native"\nsource = "{self.native}"\nonly_on = ["one"]\nvram_mb = 300\n'

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
            is_ours = len(arguments) > 2 and arguments[2] in programs
            if is_ours and (not model or model in arguments or Path(arguments[2]).name == model):
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

    def num_loads(self, model: str) -> int:
        """Loads on the nodes since they were started."""
        return sum(node.log.read_text().count(f"{model}: cold → loading") for node in self.nodes.values())

    def unload(self, model: str) -> None:
        self.gateway.call(f"/fleet/models/{model}/unload", {})
        wait_until(lambda: not self.processes(model), f"{model} is not gone")
        wait_until(lambda: not self.temporary_folders, f"temporary files of {model} are left")


@pytest.fixture(scope="module")
def group(
    start_daemon: StartDaemon, start_gateway: StartGateway, tmp_path_factory: pytest.TempPathFactory, wide_model: Path
) -> Iterator[Group]:
    with served(FakeHub(HUB_MODEL)) as hub:
        made = Group(start_daemon, start_gateway, tmp_path_factory.mktemp("group"), hub, wide_model)
        yield made
        for node in made.nodes.values():
            node.process.terminate()
        wait_until(lambda: not made.processes() and not made.temporary_folders, "servers or their files are left")


def test_group_starts_on_all_its_nodes_and_the_leader_serves(group: Group) -> None:
    pair = {"one", "two"}
    for model, nodes in (("two", pair), ("all", set(NAMES)), ("rpc", pair), ("ray", pair)):
        status, response = group.ask(model)
        assert (status, response["choices"][0]["message"]["content"]) == (200, "word word "), response
        members = group.members(model)
        assert members.keys() == nodes
        assert sorted(members.values()) == [("ready", rank) for rank in range(len(nodes))]
        group.unload(model)
    assert not [node["members"] for node in nodes_of(group.gateway).values() if node["members"]]


@pytest.mark.parametrize(
    ("model", "size", "rank", "number"),
    [
        ("two", 2, 1, signal.SIGKILL),
        *(pytest.param("two", 2, rank, signal.SIGSTOP, marks=long) for rank in range(2)),
        *(pytest.param("all", 3, rank, signal.SIGKILL, marks=long) for rank in range(3)),
    ],
)
def test_group_of_which_a_member_is_lost_ends_and_is_started_again(
    group: Group, model: str, size: int, rank: int, number: int
) -> None:
    wait_until(lambda: group.is_served(model), "it is not served")
    before, folders = group.processes(model), set(group.temporary_folders)
    (victim,) = [process for process, its_rank in before.items() if its_rank == rank]
    os.kill(victim, number)
    wait_until(lambda: not before.keys() & group.processes(model).keys(), "a member of the old group is left")
    ready = [("ready", rank) for rank in range(size)]
    wait_until(lambda: sorted(group.members(model).values()) == ready, "it is not started again")
    assert group.is_served(model)
    assert len(group.processes(model)) == size
    assert not folders & set(group.temporary_folders), "temporary files of the old group are left"
    group.unload(model)


@long
@pytest.mark.parametrize("is_head", [False, True])
def test_group_whose_part_of_ray_ends_is_started_again(group: Group, is_head: bool) -> None:
    wait_until(lambda: group.is_served("ray"), "it is not served")
    before = group.processes("ray")
    arguments = {process: Path(f"/proc/{process}/cmdline").read_text().split("\0") for process in before}
    parts = [process for process, words in arguments.items() if "--block" in words]
    (victim,) = [process for process in parts if ("--head" in arguments[process]) == is_head]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not before.keys() & group.processes("ray").keys(), "a part of the old group is left")
    wait_until(lambda: group.is_served("ray"), "it is not served again")
    group.unload("ray")


@long
def test_group_goes_on_while_its_gateway_restarts(group: Group) -> None:
    wait_until(lambda: group.is_served("two"), "it is not served")
    before = group.processes("two")
    group.gateway.process.kill()
    group.gateway.process.wait()
    group.gateway = group.start_gateway(group.models, group.nodes)
    assert group.is_served("two")
    assert group.processes("two") == before


@long
def test_group_whose_node_restarts_is_started_again(group: Group) -> None:
    wait_until(lambda: group.is_served("two"), "it is not served")
    group.nodes["two"].process.terminate()
    group.nodes["two"].process.wait()
    wait_until(lambda: not group.processes("two"), "the leader has not ended")
    group.start_node("two")
    wait_until(lambda: group.members("two") == {"one": ("ready", 0), "two": ("ready", 1)}, "it is not started again")
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
    wait_until(lambda: all(node["up"] for node in nodes_of(group.gateway).values()), "the node is not up")
    status, response = group.ask("all")
    assert status >= 400
    assert "different versions of its server" in str(response)
    assert "2.0.0 on three" in str(response)
    assert not group.processes("all")
    group.nodes["three"].process.kill()
    group.nodes["three"].process.wait()
    group.start_node("three")
    wait_until(lambda: group.is_served("all"), "it is not served when the versions are equal again")
    group.unload("all")


def test_files_of_a_group_come_to_all_its_nodes_before_it_starts_and_once_from_the_hub(group: Group) -> None:
    status, response = group.ask("hub")
    assert status == 200, response
    names = [path.rpartition("/")[2] for path, _ in group.hub.contents_requests()]
    assert sorted(names) == sorted(HUB_MODEL)
    group.unload("hub")


@long
def test_members_with_different_files_start_no_group(group: Group) -> None:
    wait_until(lambda: group.is_served("hub"), "it is not served")
    group.unload("hub")
    (config,) = (group.nodes["two"].log.parent / "hub").rglob("config.json")
    intact = config.resolve()
    config.unlink()
    config.write_text("{ }")
    status, response = group.ask("hub")
    assert status >= 400
    assert "different files of hub" in str(response)
    assert not group.processes("hub")
    config.unlink()
    config.symlink_to(intact)


def _is_gone(group: Group, processes: dict[int, int]) -> bool:
    return not processes.keys() & group.processes("two").keys()


@long
def test_two_gateways_start_a_lost_group_once(group: Group) -> None:
    second = group.start_gateway(group.models, group.nodes)
    wait_until(lambda: group.is_served("two"), "it is not served")
    wait_until(lambda: bool(nodes_of(second)["two"]["members"]), "the second gateway does not see it")
    body = {"model": "two", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for _ in range(5):
        before, num_loads = group.processes("two"), group.num_loads("two")
        os.kill(next(iter(before)), signal.SIGKILL)
        wait_until(partial(_is_gone, group, before), "the old one is left")
        wait_until(lambda: len(group.processes("two")) == 2, "it is not started again")
        wait_until(lambda: group.is_served("two"), "it is not served")
        wait_until(lambda: second.call("/v1/chat/completions", body)[0] == 200, "the second gateway does not serve it")
        assert group.num_loads("two") == num_loads + 2, "one start, with a load on each node"
    second.process.kill()
    second.process.wait()
    group.unload("two")


@long
def test_group_is_pinned_moved_and_drained_as_one(group: Group) -> None:
    orders = group.gateway.call
    assert orders("/fleet/models/all/pin", {"wait": True})[0] == 200
    members = group.members("all")
    assert sorted(rank for _, rank in members.values()) == [0, 1, 2]
    leader = next(name for name, (_, rank) in members.items() if rank == 0)
    os.kill(next(iter(group.processes("all"))), signal.SIGKILL)
    wait_until(
        lambda: sorted(s for s, _ in group.members("all").values()) == ["ready"] * 3, "a pinned group is not back"
    )
    assert orders("/fleet/models/all/unload", {"wait": True})[0] == 409, "it is pinned"
    orders("/fleet/models/all/unpin", {})
    group.unload("all")
    assert orders("/fleet/models/all/load", {"node": "two", "wait": True})[0] == 200
    assert group.members("all")["two"] == ("ready", 0), f"it was led by {leader}"
    orders("/fleet/nodes/three/drain", {})
    for _ in range(2):  # while it runs, and after
        status, response = group.ask("all")
        assert status >= 400
        assert "three" in str(response)
        group.unload("all")
    orders("/fleet/nodes/three/undrain", {})
    wait_until(lambda: group.is_served("all"), "it is not served again")
    orders("/fleet/nodes/three/drain", {})
    processes = group.processes("all")
    orders("/fleet/nodes/three/undrain", {})
    wait_until(lambda: group.is_served("all"), "it is not served any more")
    assert group.processes("all") == processes, "it went on while its node was drained"
    group.unload("all")


@long
def test_group_and_native_model_swap_on_the_same_memory(group: Group) -> None:
    for _ in range(10):
        for model, other in (("large", "native"), ("native", "large")):
            assert group.is_served(model)
            assert group.members(other).get("one", ("cold", 0))[0] == "cold", "both do not fit"
        assert not group.processes("large")
    assert not [node["members"] for node in nodes_of(group.gateway).values() if node["members"]]
