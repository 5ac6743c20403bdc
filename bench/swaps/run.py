"""A native model, one of llama.cpp's server and a speech server share the memory of one device and swap by demand.

Usage: python bench/swaps/run.py --gguf FILE --llama-python PYTHON [--swaps 100]

`PYTHON` has `llama-cpp-python[server]`; espeak-ng must be installed. A real node and a real gateway serve requests that
each need the model that was evicted last. Afterwards nothing may be left: processes, ports, descriptors, memory.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
MODELS = ("native", "llama", "speech")
MODEL_MB, LIMIT_MB = 300, 440
"""Two of them do not fit."""
IDLE_S = 90
"""After this long without requests, connections between gateway and node are closed, and the native model's tokenizer
process has ended."""


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def below(process: int) -> list[int]:
    children: list[int] = []
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        children += map(int, tasks.read_text().split())
    return [each for child in children for each in (child, *below(child))]


def resident_mb(process: int) -> float:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def num_files(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def num_listening(processes: list[int]) -> int:
    """Ports that these processes listen on."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    held = {os.readlink(file) for process in processes for file in Path(f"/proc/{process}/fd").iterdir()}
    return len(listening & held)


def request(url: str, body: Any = None, timeout_s: float = 1800) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(sent, timeout=timeout_s) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}: {error.code} {error.read().decode()}") from None


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            if process.poll() is not None:
                raise SystemExit(f"{process.args!r} has ended with {process.returncode}: {log.read_text()}") from None
            time.sleep(0.2)
        else:
            return


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def use(gateway: str, model: str) -> None:
    """One request that only a loaded model can serve."""
    if model == "speech":
        wave = request(f"{gateway}/v1/audio/speech", {"model": model, "input": "one two three"})
        assert wave.startswith(b"RIFF"), wave[:20]
        assert len(wave) > 10_000, len(wave)
    else:
        messages = [{"role": "user", "content": "Say one word."}]
        chat = {"model": model, "messages": messages, "max_tokens": 2}
        reply = json.loads(request(f"{gateway}/v1/chat/completions", chat))
        assert reply["usage"]["completion_tokens"] >= 1, reply


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--gguf", type=Path, required=True)
    arguments.add_argument("--llama-python", type=Path, required=True)
    arguments.add_argument("--swaps", type=int, default=100)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        node_port, gateway_port, metrics_port = free_port(), free_port(), free_port()
        node, gateway = f"http://127.0.0.1:{node_port}", f"http://127.0.0.1:{gateway_port}"
        llama = f"{options.llama_python} -m llama_cpp.server --host 127.0.0.1 --port ${{PORT}} --n_ctx 512"
        (directory / "neuron.toml").write_text(f"""
listen = "127.0.0.1:{node_port}"
[limits]
memory_mb = {LIMIT_MB}
[[harnesses]]
name = "llama-cpp-python"
cmd = "{llama} --model '${{MODEL_PATH}}' --model_alias '${{MODEL_ID}}'"
health = {{ path = "/v1/models" }}
[[harnesses]]
name = "espeak"
cmd = ["{sys.executable}", "{HERE / "speech_server.py"}", "${{PORT}}", "{MODEL_MB}"]
routes = ["/v1/audio/speech"]
[[models]]
id = "native"
source = "{options.gguf}"
context_tokens = 512
memory_mb = {MODEL_MB}
[[models]]
id = "llama"
source = "{options.gguf}"
harness = "llama-cpp-python"
memory_mb = {MODEL_MB}
[[models]]
id = "speech"
harness = "espeak"
memory_mb = {MODEL_MB}
""")
        (directory / "cortex.toml").write_text(f"""
[gateway]
listen = "127.0.0.1:{gateway_port}"
metrics_listen = "127.0.0.1:{metrics_port}"
[eviction]
min_residency_s = 0
[[neurons]]
name = "box"
endpoint = "{node}"
""")
        neuron_log, cortex_log = directory / "neuron.log", directory / "cortex.log"
        neuron_command = [str(BIN / "neuron"), "serve", "-c", str(directory / "neuron.toml")]
        gateway_command = [str(BIN / "cortex"), "serve", "-c", str(directory / "cortex.toml")]
        with (
            running(neuron_command, neuron_log) as neuron,
            running(gateway_command, cortex_log) as cortex,
        ):
            wait_for(f"{node}/health", neuron, neuron_log)
            wait_for(f"{gateway}/ready", cortex, cortex_log)
            result = measure(options.swaps, gateway, node, neuron.pid, cortex.pid)
        print(json.dumps(result))


def measure(num_swaps: int, gateway: str, node: str, neuron: int, cortex: int) -> dict[str, Any]:
    for model in MODELS:  # each once, so that what is made once is there
        use(gateway, model)
    unload_all(node)
    before = facts(neuron, cortex)
    seconds: dict[str, list[float]] = {model: [] for model in MODELS}
    for number in range(num_swaps):
        model = MODELS[number % len(MODELS)]
        began_s = time.monotonic()
        use(gateway, model)
        seconds[model].append(time.monotonic() - began_s)
        listed = json.loads(request(f"{node}/models"))["models"]
        states = {each["id"]: each["state"] for each in listed}
        ready = [name for name in MODELS if states[name] == "ready"]
        assert ready == [model], {each["id"]: (each["state"], each["measured_bytes"]) for each in listed}
        print(f"{number + 1} of {num_swaps}: {model} in {seconds[model][-1]:.1f} s", file=sys.stderr, flush=True)
    unload_all(node)
    after = facts(neuron, cortex)
    for name in ("processes", "listening", "neuron_files", "cortex_files"):
        assert after[name] <= before[name], (name, before, after)
    for name in ("neuron_mb", "cortex_mb"):
        assert after[name] < before[name] + 48, (name, before, after)
    median_s = {model: round(sorted(times)[len(times) // 2], 2) for model, times in seconds.items()}
    return {"swaps": num_swaps, "median_s": median_s, "before": before, "after": after}


def unload_all(node: str) -> None:
    for model in MODELS:
        request(f"{node}/models/unload", {"model_id": model})
    time.sleep(IDLE_S)


def facts(neuron: int, cortex: int) -> dict[str, Any]:
    processes = [neuron, cortex, *below(neuron), *below(cortex)]
    return {
        "processes": len(processes),
        "listening": num_listening(processes),
        "neuron_files": num_files(neuron),
        "cortex_files": num_files(cortex),
        "neuron_mb": round(resident_mb(neuron), 1),
        "cortex_mb": round(resident_mb(cortex), 1),
    }


if __name__ == "__main__":
    main()
