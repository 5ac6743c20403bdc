"""The programs of a soak: a gateway and two nodes on this machine, with models that play scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from cortex.gateway.ledger.keys import NewKey, as_toml
from cortex.neuron.engine.memory.host import anonymous_bytes

from ..clients.scripted_model import write_scripted_model
from ..neuron.pooled_sources import write_embedder
from ..ports import free_port

ROOT = Path(__file__).parents[2]
CHAT_MODELS = ("one", "two", "three")
EMBEDDER = "embedder"
MODEL_MB, NODE_MB = 160, 260
"""A node has room for one of the chat models and the embedder, so that requests for the others swap them."""
START_S = 180.0


@dataclass
class Program:
    """One process of ours, which may be started again."""

    command: list[str]
    url: str
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        with self.log.open("ab") as output:
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **self.environment}
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output, env=environment)

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                assert self.process is not None
                assert self.process.poll() is None, self.log.read_text()[-4000:]
                assert time.monotonic() < deadline, self.log.read_text()[-4000:]
                time.sleep(0.2)

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(each) for each in path.read_text().split()]

    def worker(self) -> int | None:
        """The process that has the models in memory."""
        for child in self.children():
            try:
                name = Path(f"/proc/{child}/comm").read_text()
            except OSError:
                continue
            if name.startswith("neuron-worker"):
                return child
        return None

    def measured(self) -> dict[str, float]:
        """What the process itself holds; its children come and go."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))
        return {
            "memory": anonymous_bytes(self.pid) / 2**20,
            "descriptors": len(os.listdir(f"/proc/{self.pid}/fd")),
            "threads": threads,
        }


def write_programs(folder: Path, keys: tuple[NewKey, ...]) -> tuple[Program, dict[str, Program]]:
    """The gateway and the nodes, by name; none of them is started."""
    texts = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    scripted = write_scripted_model(folder / "scripted", texts)
    embedder = write_embedder(folder / "embedder")
    nodes = {name: _node(folder / name, scripted, embedder) for name in ("north", "south")}
    gateway_folder = folder / "gateway"
    gateway_folder.mkdir()
    port = free_port()
    neurons = "".join(f'[[neurons]]\nname = "{name}"\nendpoint = "{node.url}"\n' for name, node in nodes.items())
    (gateway_folder / "cortex.toml").write_text(
        f'[gateway]\nlisten = "127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:0"\nstate = "{gateway_folder}/state"\n'
        f"poll_interval_s = 0.5\n[eviction]\nmin_residency_s = 2\nfair_wait_s = 4\nretry_failed_after_s = 2\n"
        f"[activity]\nrequests = 1000\nlog_retention_days = 1\n{neurons}"
        + "\n".join(as_toml(key.section) for key in keys)
    )
    command = [sys.executable, "-m", "cortex.gateway", "--config", str(gateway_folder / "cortex.toml")]
    return Program(command, f"http://127.0.0.1:{port}", gateway_folder / "log"), nodes


def _node(folder: Path, scripted: Path, embedder: str) -> Program:
    folder.mkdir()
    port = free_port()
    models = "".join(
        f'[[models]]\nid = "{name}"\nsource = "{scripted}"\nmemory_mb = {MODEL_MB}\ncontext_tokens = 2048\n'
        for name in CHAT_MODELS
    )
    (folder / "neuron.toml").write_text(
        f'listen = "127.0.0.1:{port}"\nmodel_roots = ["{scripted.parent}"]\n[limits]\nmemory_mb = {NODE_MB}\n'
        f'[harness.torch]\nhf_cache = "{folder}/hub"\n{models}[[models]]\nid = "{EMBEDDER}"\nsource = "{embedder}"\n'
    )
    command = [sys.executable, "-m", "cortex.neuron", "--config", str(folder / "neuron.toml")]
    return Program(command, f"http://127.0.0.1:{port}", folder / "log")
