"""Does memory come back? Two models take turns on a real neuron, and what it holds is measured after each pair.

    PYTHONPATH=src python bench/load_cycles.py --cycles 100 MODEL_A MODEL_B

A cycle loads a model, has it answer, and unloads it. On a CPU the number is the memory of the daemon and its workers
that no file backs; on a GPU also what the driver says is in use on the device, so nothing else may run there. The first
pairs warm caches up and do not count. The exit status is 1 when a later pair holds more than `--slack-mb` above them.
"""

from __future__ import annotations

import argparse
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

from cortex.neuron.device.hostmemory import anonymous_bytes

WARM_UP_PAIRS = 2
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Neuron:
    process_id: int
    url: str

    def call(self, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.load(response)
        except urllib.error.HTTPError as refusal:
            sys.exit(f"{path}: {refusal.code} {refusal.read().decode()}")

    def cycle(self, model_id: str) -> None:
        self.call("/models/load", {"model_id": model_id})
        self.call("/v1/completions", {"model": model_id, "prompt": "Once upon a time", "max_tokens": 8})
        self.call("/models/unload", {"model_id": model_id})

    def host_bytes(self) -> int:
        return sum(anonymous_bytes(process_id) for process_id in family(self.process_id))

    def device_bytes(self) -> int:
        """In use on all GPUs, by the driver's own account; 0 where the CPU is the device."""
        if self.call("/discovery")["devices"][0]["kind"] == "cpu":
            return 0
        time.sleep(1.5)  # readings are taken once a second
        return sum(device["total_bytes"] - device["free_bytes"] for device in self.call("/health")["devices"])


def family(process_id: int) -> list[int]:
    """The process and all its descendants."""
    children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    return [process_id, *(each for child in children for each in family(int(child)))]


@contextlib.contextmanager
def neuron(models: dict[str, str]) -> Iterator[Neuron]:
    """A neuron that knows `models` (id → source) and has none of them loaded."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    entries = [f"[[models]]\nid = {json.dumps(name)}\nsource = {json.dumps(path)}" for name, path in models.items()]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "neuron.toml"
        config.write_text("\n".join([f'listen = "127.0.0.1:{port}"', 'log_level = "warning"', *entries]))
        process = subprocess.Popen([sys.executable, "-m", "cortex.neuron", "--config", str(config)])
        try:
            yield wait_for(process, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(60)


def wait_for(process: subprocess.Popen[bytes], url: str) -> Neuron:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/version", timeout=5):
            return Neuron(process.pid, url)
        time.sleep(0.05)
    sys.exit("the neuron did not start")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs=2, metavar="MODEL", help="a hub id, a directory or a GGUF file")
    parser.add_argument("--cycles", type=int, default=100, help="loads and unloads in all")
    parser.add_argument("--slack-mb", type=int, default=32, help="growth that is no leak")
    options = parser.parse_args()
    if options.cycles < 2 * (WARM_UP_PAIRS + 2):
        parser.error(f"--cycles must be at least {2 * (WARM_UP_PAIRS + 2)}")
    first, second = options.models
    held: list[tuple[int, int]] = []
    with neuron({"a": first, "b": second}) as node:
        for pair in range(options.cycles // 2):
            node.cycle("a")
            node.cycle("b")
            held.append((node.host_bytes(), node.device_bytes()))
            host, device = (number / 2**20 for number in held[-1])
            print(f"{2 * pair + 2:4d} cycles: host {host:8.1f} MiB, devices {device:8.1f} MiB", flush=True)
    growth = [max(later) - max(warm) for warm, later in zip(*halves(held), strict=True)]
    print(f"growth: host {growth[0] / 2**20:.1f} MiB, devices {growth[1] / 2**20:.1f} MiB")
    return int(max(growth) > options.slack_mb << 20)


def halves(held: list[tuple[int, int]]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Host and device columns of the pairs that warm up, and of the last two."""
    return list(zip(*held[:WARM_UP_PAIRS], strict=True)), list(zip(*held[-2:], strict=True))


if __name__ == "__main__":
    sys.exit(main())
