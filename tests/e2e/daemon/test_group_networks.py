"""Groups on hosts that are network namespaces: torch's launcher over Gloo, partitions, and the loss of a host.

Each node has two networks: one to the gateway, and the cluster's, which a test can cut.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ...programs import PYTHONPATH
from ...waiting import wait_until
from .conftest import Daemon, StartGateway, nodes_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("GROUP_TESTS") != "full", reason="takes long; set GROUP_TESTS=full"),
]

NAMES = ("one", "two", "three")
KEY = "a-key-of-the-nodes-in-tests"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    """Three namespaces with a node each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Daemon] = {}

    def connect(self) -> None:
        for bridge, address in (("cgrp-mgmt", "10.87.0.254/24"), ("cgrp-fast", "")):
            ip("link", "add", bridge, "type", "bridge")
            ip("link", "set", bridge, "up")
            if address:
                ip("address", "add", address, "dev", bridge)
        for number, name in enumerate(NAMES, 1):
            ip("netns", "add", self.space(name))
            ip("-n", self.space(name), "link", "set", "lo", "up")
            for bridge, network in (("cgrp-mgmt", "10.87.0"), ("cgrp-fast", "10.88.0")):
                outer, inner = f"{bridge[5:]}-{number}", bridge[5:]
                ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", self.space(name))
                ip("link", "set", outer, "master", bridge, "up")
                ip("-n", self.space(name), "address", "add", f"{network}.{number}/24", "dev", inner)
                ip("-n", self.space(name), "link", "set", inner, "up")
        for program, command in (("torchrun", "-m torch.distributed.run"), ("python", "")):
            (self.folder / program).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
            (self.folder / program).chmod(0o755)

    def space(self, name: str) -> str:
        return f"cgrp-{name}"

    def cut(self, name: str, *, is_cut: bool) -> None:
        """The cluster's network of one host."""
        ip("link", "set", f"fast-{NAMES.index(name) + 1}", "down" if is_cut else "up")

    def start(self, name: str) -> None:
        number = NAMES.index(name) + 1
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        program = Path(__file__).with_name("torch_group.py")
        (folder / "neuron.toml").write_text(
            f'listen = "10.87.0.{number}:13131"\nkeys = ["{KEY}"]\ncluster_address = "10.88.0.{number}"\ndrain_s = 2\n'
            f'[harness.torch]\nhf_cache = "{folder}/hub"\n'
            f'[[harnesses]]\nname = "torchrun"\nargs = "{program} --port ${{PORT}}"\nmemory_mb = 400\n'
        )
        command = [sys.executable, "-m", "cortex.neuron", "--config", str(folder / "neuron.toml")]
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}", "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space(name), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
            )
        self.nodes[name] = Daemon(process, f"http://10.87.0.{number}:13131", folder / "log", KEY)

    def servers(self) -> list[int]:
        """The processes of the program, on any host."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and "torch_group.py" in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        for node in self.nodes.values():
            node.process.kill()
            node.process.wait()
        # A deleted namespace keeps its links for as long as a process in it lives.
        names = [f"{network}-{number}" for network in ("mgmt", "fast") for number in range(1, len(NAMES) + 1)]
        links = [("link", "delete", link) for link in (*names, "cgrp-mgmt", "cgrp-fast")]
        spaces = [("netns", "delete", self.space(name)) for name in NAMES]
        for arguments in (*links, *spaces):
            with contextlib.suppress(subprocess.CalledProcessError):  # it has not come that far
                ip(*arguments)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2 for network namespaces")
    if subprocess.run(["ip", "netns", "add", "cgrp-probe"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not permitted here")
    ip("netns", "delete", "cgrp-probe")
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        made.connect()
        for name in NAMES:
            made.start(name)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def gateway(hosts: Hosts, start_gateway: StartGateway) -> Daemon:
    models = "".join(
        f'[[models]]\nid = "{name}"\nharness = "torchrun"\nnodes = {nodes}\nsource = "test/divided"\nvram_mb = 800\n'
        for name, nodes in (("pair", '["one", "two"]'), ("triple", "3"))
    )
    return start_gateway(models, hosts.nodes)


def ask(gateway: Daemon, model: str) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
    return gateway.call("/v1/chat/completions", body)


def test_launcher_divides_a_model_among_two_and_three_hosts(hosts: Hosts, gateway: Daemon) -> None:
    contents = []
    for model in ("pair", "triple"):
        status, response = ask(gateway, model)
        assert status == 200, response
        contents.append(response["choices"][0]["message"]["content"])
        gateway.call(f"/fleet/models/{model}/unload", {})
        wait_until(lambda: not hosts.servers(), "servers are left")
    assert contents[0] == contents[1], "the same model, however it is divided"


def test_partition_between_the_hosts_ends_the_group_and_its_end_starts_it_again(hosts: Hosts, gateway: Daemon) -> None:
    assert ask(gateway, "pair")[0] == 200
    before = hosts.servers()
    hosts.cut("two", is_cut=True)
    wait_until(lambda: not set(before) & set(hosts.servers()), "the group has not ended")
    wait_until(lambda: "two cannot be reached at 10.88.0.2" in str(ask(gateway, "pair")), "another start does not fail")
    assert not hosts.servers(), "the ports are checked before any server starts"
    hosts.cut("two", is_cut=False)
    wait_until(lambda: ask(gateway, "pair")[0] == 200, "it is not served again")


@pytest.mark.parametrize("name", ["two", "one"])
def test_lost_host_ends_the_group_and_its_return_starts_it_again(hosts: Hosts, gateway: Daemon, name: str) -> None:
    wait_until(lambda: ask(gateway, "pair")[0] == 200, "it is not served")
    before = hosts.servers()
    hosts.nodes[name].process.send_signal(signal.SIGKILL)
    hosts.nodes[name].process.wait()
    wait_until(lambda: not set(before) & set(hosts.servers()), "a member is left on a host")
    hosts.start(name)
    wait_until(lambda: nodes_of(gateway)[name]["up"], "the node is not up")
    wait_until(lambda: ask(gateway, "pair")[0] == 200, "it is not served again")
