"""A real neuron on its own: the daemon, its workers, and small random models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cortex.neuron.engine.memory.host import anonymous_bytes

from ...neuron.tiny_models import write_llama
from ...ports import free_port
from ...programs import PYTHONPATH
from ...waiting import WAIT_S, wait_until

TINY, WIDE = "tiny", "wide"
FORK_SERVER = "neuron-fork"
_PROGRAMS = {
    "cortex.parsing.functions": "cortex-parse",
    "cortex.neuron.hub_process.service": "neuron-hub",
    "cortex.neuron.node.inspection_process.reading": "neuron-inspect",
    "cortex.neuron.picture_process.decoding": "neuron-pictures",
    "cortex.neuron.tokenizer_process.service": "neuron-tokenize",
    "cortex.neuron.worker.program.worker": FORK_SERVER,
}
"""The module of a process → its name, which they give themselves a while after their start."""


@dataclass
class Daemon:
    """`python -m cortex.neuron`, and what a test asks of it."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    key: str = ""

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of one exchange; a POST when there is a body."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as rejection:
            return rejection.code, json.load(rejection)

    def model(self, model_id: str) -> dict[str, Any]:
        status, model = self.call(f"/models/{model_id}")
        assert status == 200, model
        return dict(model)

    def complete(self, model_id: str) -> tuple[int, Any]:
        body = {"model": model_id, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        return self.call("/v1/completions", body)

    def wait_ready(self, model_id: str) -> None:
        self.wait_for("ready", model_id)

    def wait_for(self, state: str, model_id: str) -> None:
        def is_reached() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return bool(self.model(model_id)["state"] == state)
            except OSError:
                return False  # it does not listen yet

        wait_until(is_reached, self.log.read_text)

    def descendants(self) -> dict[int, str]:
        """Process id → name of everything that descends from the daemon, but for the inspection process and its
        workers, which come and go with what there is to read."""
        parents: dict[int, tuple[int, str]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                except OSError:
                    continue  # ended between the listing and the look
                parents[int(entry.name)] = (int(rest.split()[1]), name)
        found: dict[int, str] = {}
        family = {self.process.pid}
        while grown := {child for child, (parent, _) in parents.items() if parent in family} - family:
            family |= grown
            found |= {child: _program(child, parents[child][1]) for child in grown}
        return {process_id: name for process_id, name in found.items() if name != "neuron-inspect"}

    def process_called(self, name: str) -> int:
        (found,) = [process_id for process_id, called in self.descendants().items() if called == name]
        return found

    def held_bytes(self) -> int:
        """What the daemon and everything under it hold."""
        return sum(anonymous_bytes(each) for each in (self.process.pid, *self.descendants()))


def _program(process_id: int, name: str) -> str:
    """What the process will call itself, if it has just been started."""
    if not name.startswith("python"):
        return name
    try:
        arguments = Path(f"/proc/{process_id}/cmdline").read_text().split("\0")
    except OSError:
        return name  # it has ended
    return next((found for module, found in _PROGRAMS.items() if any(module in each for each in arguments)), name)


StartDaemon = Callable[..., Daemon]


def text_of(daemon: Daemon, model: str, prompt: str = "The capital of France is") -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    status, response = daemon.call("/v1/completions", body)
    assert status == 200, response
    return str(response["choices"][0]["text"])


def nodes_of(gateway: Daemon) -> dict[str, Any]:
    """The nodes of its fleet, by name."""
    return {node["name"]: node for node in gateway.call("/fleet/status")[1]["nodes"]}


StartGateway = Callable[..., Daemon]
"""The text of `models.toml` and the nodes by name → the gateway, whose nodes are up. `settings` are lines of its
section `[gateway]`, `sections` further ones; `key` is one of an operator."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of a few hundred kilobytes with a tokenizer of single bytes."""
    return write_model(tmp_path_factory.mktemp("tiny"), inner=128)


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with 60 MB of weights: large enough for a leak to show, and quick to load. Called `WIDE`.

    Its longest response takes far longer than any pause of a test, so that it can be interrupted for certain.
    """
    return write_model(tmp_path_factory.mktemp("wide"), inner=40_000, context_tokens=4096)


def write_model(folder: Path, inner: int, num_layers: int = 2, context_tokens: int = 512) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {"vocab_size": len(alphabet), "intermediate_size": inner, "max_position_embeddings": context_tokens}
    return write_llama(folder, **sizes, num_hidden_layers=num_layers)


@pytest.fixture(scope="session")
def loads_wide(wide_model: Path) -> str:
    """The lines of a `neuron.toml` with which a daemon loads the wide model when it starts."""
    return f'[[default_models]]\nid = "{WIDE}"\nsource = "{wide_model}"'


@pytest.fixture(scope="module")
def start_daemon(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[StartDaemon]:
    with daemons(tmp_path_factory, tiny_model) as start:
        yield start


@contextmanager
def daemons(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[StartDaemon]:
    """Start daemons that know the tiny model; `settings` are lines of their `neuron.toml`.

    With `waits=False` a daemon may not listen yet: several start at the same time. All end with the block. With
    `dtype="float32"` models have the same sizes and greedy responses on every CPU.
    """
    started: list[Daemon] = []

    def start(
        *settings: str,
        listen: str = "",
        key: str = "",
        environment: dict[str, str] | None = None,
        waits: bool = True,
        dtype: str = "auto",
    ) -> Daemon:
        folder = tmp_path_factory.mktemp("daemon")
        listen = listen or f"127.0.0.1:{free_port()}"
        config = [
            f'listen = "{listen}"',
            *([f'keys = ["{key}"]'] if key else []),
            f'model_roots = ["{folder.parent}"]',
            *settings,
            f'[harness.torch]\nhf_cache = "{folder}/hub"\ndtype = "{dtype}"',
            f'[[models]]\nid = "{TINY}"\nsource = "{tiny_model}"',
        ]
        (folder / "neuron.toml").write_text("\n".join(config))
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "cortex.neuron", "--config", str(folder / "neuron.toml")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": PYTHONPATH, **(environment or {})},
            )
        daemon = Daemon(process, f"http://{listen}", log, key)
        started.append(daemon)
        if waits:
            daemon.wait_for("cold", TINY)
        return daemon

    try:
        yield start
    finally:
        for daemon in started:
            if daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait(WAIT_S)


@pytest.fixture(scope="module")
def start_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartGateway]:
    gateways: list[Daemon] = []

    def start(
        models: str, nodes: dict[str, Daemon], *, settings: str = "open = true", sections: str = "", key: str = ""
    ) -> Daemon:
        folder, port = tmp_path_factory.mktemp("gateway"), free_port()
        (folder / "models.toml").write_text(models)
        neurons = "".join(
            f'[[neurons]]\nname = "{name}"\nendpoint = "{node.url}"\nkey_env = "KEY_{number}"\n'
            for number, (name, node) in enumerate(nodes.items())
        )
        (folder / "cortex.toml").write_text(
            f'[gateway]\nlisten = "127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:0"\nmodels = "models.toml"\n'
            f'state = "{folder}/state"\npoll_interval_s = 0.2\n{settings}\n[eviction]\nmin_residency_s = 0\n{neurons}'
            + sections
        )
        keys = {f"KEY_{number}": node.key or "none" for number, node in enumerate(nodes.values())}
        with (folder / "log").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "cortex.gateway", "--config", str(folder / "cortex.toml")],
                stdin=subprocess.DEVNULL,
                stderr=output,
                env={**os.environ, "PYTHONPATH": PYTHONPATH, **keys},
            )
        gateway = Daemon(process, f"http://127.0.0.1:{port}", folder / "log", key)
        gateways.append(gateway)

        def all_are_up() -> bool:
            assert process.poll() is None, gateway.log.read_text()
            try:
                return all(node["up"] for node in nodes_of(gateway).values())
            except OSError:
                return False

        wait_until(all_are_up, "the nodes are not up")
        return gateway

    yield start
    for gateway in gateways:
        gateway.process.kill()
        gateway.process.wait(WAIT_S)
