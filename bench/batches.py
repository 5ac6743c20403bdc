"""What batches cost interactive requests, and what they get done: any gateway with `/v1/batches`.

    python bench/batches.py --url http://127.0.0.1:31313 --model MODEL --rates 2 --seconds 60
    PYTHONPATH=src:bench TMPDIR=/dev/shm python bench/batches.py --shape llama-3.1-8b --rates 1 4 --seconds 20

`--shape` starts a node and a gateway of its own, which serve random weights. At each of `--rates` there are three
phases with the same interactive requests, which arrive at random:

alone     nothing else runs
batches   a batch runs beside them, through `/v1/batches`: the gateway decides how many lines run
flood     the same lines as ordinary requests, `--flood` of them at once: what nobody holds back

Each phase begins with `--settle` seconds of the same traffic that are not measured: the gateway learns how fast
requests are without lines, and then how many lines may run. The table has times to the first token and between events
of interactive requests, and the output tokens per second of batch lines. The last lines compare with the aim: TTFT p99
at most 1.5 times and gaps p99 at most 1.2 times those alone, at 70 % of the throughput of the flood.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traffic import Record, Server, calibrated, exchange
from workloads import percentile

BOUNDARY = "cortex-bench-batches"
SETTLE_S = 2.0
PREPARE_S = 90.0


@dataclass(slots=True)
class Phase:
    """What was measured."""

    records: list[Record]
    line_tokens_per_s: float = 0.0
    num_lines: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        served = [each for each in self.records if not each.error and each.events_s]
        gaps = [
            later - earlier for each in served for earlier, later in zip(each.events_s, each.events_s[1:], strict=False)
        ]
        for name, values in (("ttft", [each.first_s for each in served]), ("gap", gaps)):
            for share in (0.5, 0.9, 0.99):
                self.figures[f"{name}_p{round(share * 100)}_ms"] = 1000 * percentile(values, share)
        self.figures |= {"requests": len(served), "failed": len(self.records) - len(served)}


class Gateway:
    """The routes of files and batches. Blocks."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._base = server.url.rstrip("/").removesuffix("/v1")

    def call(self, path: str, body: bytes | None = None, content_type: str = "application/json") -> Any:
        headers = {"content-type": content_type} if body is not None else {}
        if self._server.key:
            headers["authorization"] = f"Bearer {self._server.key}"
        request = urllib.request.Request(self._base + path, body, headers)
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)

    def submit(self, bodies: list[dict[str, Any]]) -> str:
        """The id of a batch with these requests."""
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            for number, body in enumerate(bodies)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        part = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name="
        form = f'{part}"purpose"\r\n\r\nbatch\r\n{part}"file"; filename="a"\r\n\r\n{content}\r\n--{BOUNDARY}--\r\n'
        file = self.call("/v1/files", form.encode(), f"multipart/form-data; boundary={BOUNDARY}")
        fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self.call("/v1/batches", json.dumps(fields).encode())["id"])


def interactive(
    server: Server, options: argparse.Namespace, rate: float, seed: int
) -> list[tuple[float, dict[str, Any]]]:
    """When each request is due, and its body; the same in every phase but for the words."""
    draw, at, found = random.Random(options.seed), 0.0, []
    words = random.Random(seed)
    while (at := at + draw.expovariate(rate)) < options.settle + options.seconds:
        found.append((at, body_of(server, words, options.prompt, options.response)))
    return found


def body_of(server: Server, draw: random.Random, prompt: int, response: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": server.words(draw, prompt)}]
    return {"messages": messages, "max_tokens": response, "ignore_eos": True, "temperature": 0.7}


async def _send(server: Server, start_s: float, due: list[tuple[float, dict[str, Any]]]) -> list[Record]:
    async def one(at: float, body: dict[str, Any]) -> Record:
        await asyncio.sleep(max(0.0, start_s + at - time.monotonic()))
        return await exchange(server, body, Record(start_s + at))

    return list(await asyncio.gather(*(one(*each) for each in due)))


@asynccontextmanager
async def batch(gateway: Gateway, bodies: list[dict[str, Any]], model: str) -> AsyncIterator[Callable[[], Any]]:
    """Runs a batch inside of it; what is called says how many output tokens and lines are done."""
    id = await asyncio.to_thread(gateway.submit, [{"model": model, **body} for body in bodies])
    path = f"/v1/batches/{id}"

    def done() -> tuple[int, int]:
        found = gateway.call(path)
        return found["usage"]["output_tokens"], found["request_counts"]["completed"]

    try:
        yield done
    finally:
        await asyncio.to_thread(gateway.call, f"{path}/cancel", b"{}")
        while (await asyncio.to_thread(gateway.call, path))["status"] in ("in_progress", "cancelling", "finalizing"):
            await asyncio.sleep(0.2)


@asynccontextmanager
async def flood(server: Server, bodies: list[dict[str, Any]], at_once: int) -> AsyncIterator[Callable[[], Any]]:
    """The same without anybody who holds the lines back."""
    waiting, counts = iter(bodies), [0, 0]

    async def work() -> None:
        for body in waiting:
            record = await exchange(server, body, Record(time.monotonic()))
            counts[0] += record.completion_tokens
            counts[1] += not record.error

    tasks = [asyncio.create_task(work()) for _ in range(at_once)]
    try:
        yield lambda: tuple(counts)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measured(name: str, server: Server, options: argparse.Namespace, rate: float) -> Phase:
    seed = {"alone": 1, "batches": 2, "flood": 3}[name] + options.seed
    due = interactive(server, options, rate, seed)
    draw = random.Random(seed + 100)
    bodies = [body_of(server, draw, options.line_prompt, options.line_response) for _ in range(options.lines)]
    start_s = time.monotonic() + 0.5
    if name == "alone":
        return _phase(await _send(server, start_s, due), start_s + options.settle)
    runs = batch(Gateway(server), bodies, server.model) if name == "batches" else flood(server, bodies, options.flood)
    async with runs as done:

        async def settled() -> tuple[float, tuple[int, int]]:
            await asyncio.sleep(start_s + options.settle - time.monotonic())
            return time.monotonic(), await asyncio.to_thread(done)

        before = asyncio.create_task(settled())
        records = await _send(server, start_s, due)
        began_s, (tokens, lines) = await before
        more_tokens, more_lines = await asyncio.to_thread(done)
        took_s = time.monotonic() - began_s
    if more_lines >= options.lines:
        print(f"{name}: all lines were done before the phase ended; use more --lines", file=sys.stderr)
    return _phase(records, start_s + options.settle, (more_tokens - tokens) / took_s, more_lines - lines)


def _phase(records: list[Record], from_s: float, line_tokens_per_s: float = 0.0, num_lines: float = 0.0) -> Phase:
    return Phase([each for each in records if each.due_s >= from_s], line_tokens_per_s, num_lines)


@contextmanager
def own_fleet(shape: str) -> Iterator[str]:
    """The address of a gateway before a node with random weights of this shape, named like it."""
    # Not needed where the fleet exists.
    from daemon import running_neuron
    from node_http import add_gateway
    from random_checkpoint import write_checkpoint
    from shapes import SHAPES

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(SHAPES[shape], folder / "model")
        neuron, _ = stack.enter_context(running_neuron())
        neuron.load(shape, str(folder / "model"))
        _await_graphs(neuron.url)
        yield add_gateway(stack, folder, int(neuron.url.rpartition(":")[2]))


def _await_graphs(url: str) -> None:
    """A node captures steps while it is idle. Returns when it has captured no further one for a while."""
    deadline_s, known, since_s = time.monotonic() + PREPARE_S, "", time.monotonic()
    while time.monotonic() < min(deadline_s, since_s + SETTLE_S):
        with urllib.request.urlopen(f"{url}/metrics", timeout=600) as response:
            lines = response.read().decode().splitlines()
        found = "".join(line for line in lines if "graphs{" in line)
        if found != known:
            known, since_s = found, time.monotonic()
        time.sleep(0.2)


async def run(options: argparse.Namespace) -> dict[str, dict[str, Phase]]:
    """The phases by rate, whose tables are printed as they are known."""
    server = await calibrated(Server(options.url, options.model, options.key))
    found: dict[str, dict[str, Phase]] = {}
    for rate in options.rates:
        phases = found[f"{rate:g}"] = {}
        for name in options.phases.split(","):
            phases[name] = await measured(name, server, options, rate)
            await asyncio.sleep(SETTLE_S)
        print(f"{rate:g} requests/s", *table(phases), sep="\n", flush=True)
    return found


def table(found: dict[str, Phase]) -> list[str]:
    columns = ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p90_ms", "gap_p99_ms")
    lines = [f"{'phase':10}" + "".join(f"{name:>14}" for name in (*columns, "failed")) + f"{'line tokens/s':>16}"]
    for name, phase in found.items():
        cells = "".join(f"{phase.figures[column]:>14.1f}" for column in columns)
        lines.append(f"{name:10}{cells}{phase.figures['failed']:>14.0f}{phase.line_tokens_per_s:>16.1f}")
    alone = found.get("alone")
    for name, phase in found.items():
        if alone is None or name == "alone":
            continue
        ratios = [phase.figures[f"{what}_p99_ms"] / alone.figures[f"{what}_p99_ms"] for what in ("ttft", "gap")]
        line = f"{name}: TTFT p99 {ratios[0]:.2f}x, gaps p99 {ratios[1]:.2f}x of those alone"
        if name == "batches" and "flood" in found and found["flood"].line_tokens_per_s:
            line += f", {phase.line_tokens_per_s / found['flood'].line_tokens_per_s:.0%} of the flood's throughput"
        lines.append(line)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:31313")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model")
    what.add_argument("--shape", help="serve random weights of this shape (bench/shapes.py)")
    parser.add_argument("--key", default="")
    parser.add_argument("--phases", default="alone,batches,flood")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="interactive requests per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured length of a phase")
    parser.add_argument("--settle", type=float, default=15.0, help="seconds before that")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of an interactive prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of an interactive response")
    parser.add_argument("--lines", type=int, default=4000, help="lines of the batch: more than it gets done")
    parser.add_argument("--line-prompt", type=int, default=400)
    parser.add_argument("--line-response", type=int, default=128)
    parser.add_argument("--flood", type=int, default=64, help="lines at once where nobody holds them back")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.shape is not None:
            options.url, options.model = stack.enter_context(own_fleet(options.shape)), options.shape
        found = asyncio.run(run(options))
    if options.json is not None:
        figures = {
            rate: {
                name: phase.figures | {"line_tokens_per_s": phase.line_tokens_per_s, "lines": phase.num_lines}
                for name, phase in phases.items()
            }
            for rate, phases in found.items()
        }
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "rates": figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
