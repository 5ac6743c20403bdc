"""Benchmarks a whole neuron over HTTP, from the files on disk to the last byte of a stream.

    PYTHONPATH=src python bench/neuron.py --shape qwen3-8b --scenarios load,decode-1,cached-16384 --json out.json

Writes a checkpoint of that shape with random weights (16 GB for 8B, into `--folder` or a temporary folder), starts the
daemon as a child, runs the scenarios and stops it. `--checkpoint DIR` uses an existing checkpoint. `--url` uses a
running neuron, which must be able to read that path. The workloads are those of `bench/engine.py`, so that the
difference between the two is the cost of the daemon. The daemon gives a model its weights and the KV of four full
contexts, the engine alone has the whole device: for `requests-N` with the same KV, add `--memory-mb 1000000`.

The daemon needs torch (with triton on a GPU), numpy, safetensors, tokenizers, uvloop, httptools, prometheus_client,
msgspec, jinja2 (with markupsafe) and nvidia-ml-py. Packages that the host lacks can be on PYTHONPATH as unpacked
wheels. Not needed here: click and rich (the commands), llguidance (grammars). The client is `bench/streams.c`, which
the host's C compiler builds.

start     start of the daemon → first token: imports, load and prompt
load      load request → first token; the files are in the page cache
wake      load request for a model that is asleep in host memory → first token
swap      unload request for one model → first token of the other, which has the same files under another name
decode-N  N streams of 512 tokens in and 257 out; tokens after the first / time after the first token
prefill-N, cached-N   time to first token of a prompt of N tokens, not cached and fully cached
requests-N            N concurrent requests, 128 to 1,024 tokens in and 256 out
events-N              N streams of 8 tokens in and 128 out; CPU time of the daemon, without its workers, for each event
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from daemon import Neuron, running_neuron
from random_checkpoint import write_checkpoint
from shapes import SHAPES
from workloads import Prompt, Workloads, table_row

SCENARIOS = (
    "start",
    "load",
    "wake",
    "swap",
    "decode-1",
    "decode-8",
    "decode-32",
    "decode-64",
    "prefill-2048",
    "prefill-16384",
    "cached-16384",
    "requests-512",
    "events-512",
)
CLIENT_SOURCE = Path(__file__).with_name("streams.c")
FIRST, SECOND = "bench/first", "bench/second"


class Run(NamedTuple):
    """What the client reports of streams that all came to their end."""

    seconds: float
    """From the first request to the last byte of all responses."""
    events: int


class Bench:
    """Measures one node."""

    def __init__(self, node: Neuron, pid: int | None, checkpoint: Path, client: Path, settle_s: float) -> None:
        """`pid` is that of the node, if it runs here; `client` the compiled client."""
        self.node = node
        self.pid = pid
        self.checkpoint = checkpoint
        self.client = client
        self.settle_s = settle_s
        config = json.loads((checkpoint / "config.json").read_text())
        vocab_size = int((config.get("text_config") or config)["vocab_size"])
        self.workloads = Workloads(self.run, vocab_size)
        self.has_settled = False

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> float:
        return self._complete_all(FIRST, prompts, max_tokens).seconds

    def _complete_all(self, model_id: str, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """Reads all streams to their ends. An incomplete one ends the program."""
        url = urlsplit(self.node.url)
        requests = b"".join(request_bytes(url.netloc, _body(model_id, prompt, max_tokens)) for prompt in prompts)
        command = [str(self.client), url.hostname or "", str(url.port or 80), f'"completion_tokens":{max_tokens}']
        found = subprocess.run(command, input=requests, capture_output=True, check=True)
        ran = json.loads(found.stdout)
        if ran["complete"] != len(prompts):
            sys.exit(f"{len(prompts) - ran['complete']} of {len(prompts)} responses are incomplete")
        return Run(ran["seconds"], ran["events"])

    def load_and_generate(self, model_id: str) -> None:
        """Returns when the model has generated its first token."""
        self.node.load(model_id, str(self.checkpoint))
        self._complete_all(model_id, [(1, 2, 3)], 1)

    def load(self) -> dict[str, float]:
        weight_bytes = sum(file.stat().st_size for file in self.checkpoint.glob("*.safetensors"))
        return {"s": self._reload_s_after(self.node.unload), "GB": weight_bytes / 1e9}

    def wake(self) -> dict[str, float]:
        return {"s": self._reload_s_after(self.node.put_to_sleep)}

    def _reload_s_after(self, unload: Callable[[str], None]) -> float:
        self.load_and_generate(FIRST)
        seconds = []
        for _ in range(2):
            unload(FIRST)
            seconds.append(_seconds(lambda: self.load_and_generate(FIRST)))
        return min(seconds)

    def swap(self) -> dict[str, float]:
        self.load_and_generate(FIRST)
        there_s = _seconds(lambda: self._swap(FIRST, SECOND))
        back_s = _seconds(lambda: self._swap(SECOND, FIRST))
        return {"s": min(there_s, back_s)}

    def _swap(self, old: str, new: str) -> None:
        self.node.unload(old)
        self.load_and_generate(new)

    def decode(self, streams: int) -> dict[str, float]:
        step_s = self.workloads.decode_step_s(streams)
        return {"tok/s": streams / step_s, "ms": step_s * 1e3}

    def prefill(self, tokens: int) -> dict[str, float]:
        seconds = self.workloads.prefill_s(tokens)
        return {"ms": seconds * 1e3, "tok/s": tokens / seconds}

    def cached(self, tokens: int) -> dict[str, float]:
        return {"ms": self.workloads.cached_s(tokens) * 1e3}

    def requests(self, count: int) -> dict[str, float]:
        return {"tok/s": self.workloads.requests_tokens_per_s(count)}

    def events(self, streams: int) -> dict[str, float]:
        if self.pid is None:
            sys.exit("events-N measures the CPU time of the neuron: it needs one that runs here, without --url")
        prompts = [tuple(range(1 + stream, 9 + stream)) for stream in range(streams)]
        self._complete_all(FIRST, prompts, 8)
        began_s = sum(cpu_s(self.pid))
        ran = self._complete_all(FIRST, prompts, 128)
        used_s = sum(cpu_s(self.pid)) - began_s
        return {"µs/event": used_s / ran.events * 1e6, "events": ran.events, "events/s": ran.events / ran.seconds}

    def measure(self, scenario: str) -> dict[str, float]:
        kind, _, size = scenario.partition("-")
        whole: dict[str, Callable[[], dict[str, float]]] = {"load": self.load, "wake": self.wake, "swap": self.swap}
        if kind in whole:
            self.has_settled = False
            return whole[kind]()
        if not self.has_settled:
            self.load_and_generate(FIRST)
            time.sleep(self.settle_s)
            self.has_settled = True
        sized: dict[str, Callable[[int], dict[str, float]]] = {
            "decode": self.decode,
            "prefill": self.prefill,
            "cached": self.cached,
            "requests": self.requests,
            "events": self.events,
        }
        return sized[kind](int(size))


def _model_entry(checkpoint: Path, memory_mb: int | None) -> str:
    """The model's lines of the configuration, if it may take another amount of memory than by default."""
    if memory_mb is None:
        return ""
    return f'[[models]]\nid = "{FIRST}"\nsource = "{checkpoint.resolve()}"\nmemory_mb = {memory_mb}\n'


def _body(model_id: str, prompt: Prompt, max_tokens: int) -> bytes:
    return json.dumps(
        {
            "model": model_id,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def request_bytes(host: str, body: bytes) -> bytes:
    """As the client takes it: its length, then its bytes."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    sent = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    return struct.pack("<I", len(sent)) + sent


def compiled_client(stack: ExitStack) -> Path:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    subprocess.run(["cc", "-O2", "-o", folder / "streams", CLIENT_SOURCE], check=True)
    return folder / "streams"


def cpu_s(pid: int) -> tuple[float, float]:
    """The CPU time of a process, without its children: in its own code, and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks_per_s, int(fields[12]) / ticks_per_s


def _seconds(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--folder", type=Path, help="where to write and keep the random checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="a model directory, instead of a random one")
    parser.add_argument("--url", help="a running neuron, instead of a child")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--memory-mb", type=int, help="`memory_mb` of the model, of a child: at most all that is free")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--settle-s",
        type=float,
        default=8.0,
        help="time for the idle engine to build graphs and plans before throughput is measured",
    )
    options = parser.parse_args()
    if options.url and options.memory_mb is not None:
        parser.error("--memory-mb is for a neuron that starts here, not for one at --url")
    scenarios: list[str] = options.scenarios.split(",")
    results: dict[str, dict[str, float]] = {}

    def report_row(scenario: str, figures: dict[str, float]) -> None:
        results[scenario] = figures
        print(table_row(scenario, figures), flush=True)

    with ExitStack() as stack:
        client = compiled_client(stack)
        checkpoint: Path = options.checkpoint or _random_checkpoint(stack, options.shape, options.folder)
        began_s = time.perf_counter()
        if options.url:
            node, pid = Neuron(options.url.rstrip("/")), None
        else:
            node, pid = stack.enter_context(running_neuron(_model_entry(checkpoint, options.memory_mb)))
        bench = Bench(node, pid, checkpoint, client, options.settle_s)
        discovery: dict[str, Any] = node.call("/discovery")
        device = discovery["devices"][0]["name"]
        print(f"{device}, neuron {discovery['version']}, {options.checkpoint or options.shape}", flush=True)
        if "start" in scenarios and not options.url:
            bench.load_and_generate(FIRST)
            report_row("start", {"s": time.perf_counter() - began_s})
        for scenario in scenarios:
            if scenario != "start":
                report_row(scenario, bench.measure(scenario))
    if options.json:
        report = {"model": str(options.checkpoint or options.shape), "device": device, "results": results}
        options.json.write_text(json.dumps(report, indent=1))
    return 0


def _random_checkpoint(stack: ExitStack, shape: str, folder: Path | None) -> Path:
    """The path of the random checkpoint. Writes it unless an earlier run did."""
    place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neuron-bench-")))
    if not (place / "model.safetensors.index.json").exists():
        took_s = _seconds(lambda: write_checkpoint(SHAPES[shape], place))
        print(f"checkpoint written in {took_s:.1f} s", flush=True)
    return place


if __name__ == "__main__":
    sys.exit(main())
