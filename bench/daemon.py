"""A neuron that runs as a child for the length of a benchmark, and a small client for it."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Neuron:
    url: str

    def call(self, path: str, body: Any = None) -> Any:
        """The JSON response of one request, a POST when there is a body. An error response ends the program."""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            sys.exit(f"{path}: {error.code} {error.read().decode()}")

    def load(self, model_id: str, source: str) -> None:
        """Returns when the model is ready. Random models repeat themselves: drafts would measure themselves."""
        self.call("/models/load", {"model_id": model_id, "source": source, "speculation": "off"})

    def unload(self, model_id: str) -> None:
        """Returns when its memory is free."""
        self.call("/models/unload", {"model_id": model_id})

    def put_to_sleep(self, model_id: str) -> None:
        """Returns when the model is asleep: its weights are in host memory, its device memory is free."""
        status = self.call("/models/unload", {"model_id": model_id, "sleep": True})
        if status["state"] != "asleep":
            sys.exit(f"{model_id} is {status['state']}, not asleep; allow host memory: NEURON_LIMITS__SLEEP_MB=40000")


@contextlib.contextmanager
def running_neuron(options: str = "") -> Iterator[tuple[Neuron, int]]:
    """A neuron without models that already listens, and its process id. The neuron ends with the block. `options`:
    lines of its configuration."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "neuron.toml"
        config.write_text(
            f'listen = "127.0.0.1:{port}"\nlog_level = "warning"\ndrain_s = 1.0\nmodel_roots = ["/"]\n{options}'
        )
        process = subprocess.Popen([sys.executable, "-m", "cortex.neuron", "--config", str(config)])
        try:
            yield _wait_for(process, f"http://127.0.0.1:{port}"), process.pid
        finally:
            process.terminate()
            process.wait(600)


def _free_port() -> int:
    """A port below those that the kernel gives to clients: one of them could take it before the neuron listens."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _wait_for(process: subprocess.Popen[bytes], url: str) -> Neuron:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/version", timeout=START_TIMEOUT_S):
            return Neuron(url)
        time.sleep(0.02)
    sys.exit(f"the neuron did not start within {START_TIMEOUT_S:.0f} s; see its log above")
