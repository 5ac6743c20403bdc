"""A neuron that runs for the length of a benchmark, and how one speaks to it."""

from __future__ import annotations

import contextlib
import json
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

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Neuron:
    url: str

    def call(self, path: str, body: Any = None) -> Any:
        """The JSON of one exchange, a POST when there is a body; a refusal ends the program."""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.load(response)
        except urllib.error.HTTPError as refusal:
            sys.exit(f"{path}: {refusal.code} {refusal.read().decode()}")

    def load(self, model_id: str, source: str) -> None:
        """Returns when the model is ready."""
        self.call("/models/load", {"model_id": model_id, "source": source})

    def unload(self, model_id: str) -> None:
        """Returns when its memory is back."""
        self.call("/models/unload", {"model_id": model_id})

    def park(self, model_id: str) -> None:
        """Returns when its weights are in host memory and nothing of it is on the device."""
        told = self.call("/models/unload", {"model_id": model_id, "sleep": True})
        if told["state"] != "asleep":
            sys.exit(f"{model_id} is {told['state']} and not asleep; give it room, as in NEURON_LIMITS__SLEEP_MB=40000")


@contextlib.contextmanager
def running_neuron() -> Iterator[tuple[Neuron, int]]:
    """A neuron without models that listens already, and its process id; it ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "neuron.toml"
        config.write_text(f'listen = "127.0.0.1:{port}"\nlog_level = "warning"\ndrain_s = 1.0\n')
        process = subprocess.Popen([sys.executable, "-m", "cortex.neuron", "--config", str(config)])
        try:
            yield _wait_for(process, f"http://127.0.0.1:{port}"), process.pid
        finally:
            process.terminate()
            process.wait(60)


def _wait_for(process: subprocess.Popen[bytes], url: str) -> Neuron:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/version", timeout=5):
            return Neuron(url)
        time.sleep(0.02)
    sys.exit("the neuron did not start")
