"""Benchmarks a node without its computation: what a request and an event cost the daemon and its worker.

    PYTHONPATH=src python bench/node_http.py --streams 512 --tokens 64
    PYTHONPATH=src python bench/node_http.py --first-token 16384
    PYTHONPATH=src python bench/node_http.py --requests 512 --tokens 256
    PYTHONPATH=src python bench/node_http.py --added --streams 200 --step-ms 10

A whole node runs in a child: its HTTP API, a tokenizer process and a worker, whose engine (`bench/scripted_engine.py`)
has a token for every stream at each step, `--step-ms` apart, so that every token is an event of its own. The daemon's
loop has a CPU of its own if there are two. `bench/streams.c`, compiled, reads the streams. Printed is the CPU time of
the daemon and of its worker for each event, in their own code and in the kernel, and that of the daemon for each
request: two lengths of streams tell them apart. With `--first-token N`: the time from the connection to the last byte
of a response of one token to a prompt of N token ids, of one that the engine has at once.

With `--requests N`: which share of the engine's rate N requests at once reach over HTTP, prompts of 128 to 1,024 tokens
and `--tokens` out. The engine is that of `bench/modelled_device.py`, `--slowdown` times slower than the GPU it models.

With `--added`: the time that everything but the engine adds to `--streams` chat completions, which arrive at random, to
the node and through a gateway: from the moment a client sends a request until the engine has it, and from the moment
the engine has a token until the client does. Client, gateway, node and worker need a CPU each.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

import modelled_device
import traffic
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.server import NodeApi
from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.node.dependencies import NodeDependencies
from cortex.neuron.node.node import Node
from cortex.neuron.worker.factory import WorkerFactory
from cortex.wire.node.orders import LoadRequest
from neuron import compiled_client, cpu_s, request_bytes
from random_checkpoint import write_checkpoint
from scripted_engine import CONTEXT_TOKENS, FIRST_WORD, LOG, STEP_MS, VOCAB
from workloads import percentile

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
}


FIRST_TOKEN_RUNS = 25
ARRIVALS_PER_S = 20


async def serve(port: int, num_streams: int, folder: Path, engine: str) -> None:
    """Runs the node until it is killed; writes its worker's process id into `folder` when the model is loaded."""
    limits = {"max_num_seqs": num_streams, "max_queue": num_streams, "kv_host_mb": 0}
    settings = {"models": [{"id": "bench", "source": str(folder / "model")}], "limits": limits}
    config = msgspec.convert(settings, NeuronConfig)
    node = await Node.start(config, NodeDependencies(make_workers=partial(WorkerFactory, f"{engine}:load")))
    await node.load(LoadRequest(model_id="bench"), wait=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])  # the loop's thread, without the worker
    api = NodeApi(node, DrainGate())
    await api.server.listen("127.0.0.1", port)
    gc.collect()
    gc.freeze()  # as the daemon does
    (folder / "worker").write_text(str(node.devices.supervisors[0].process_id))
    await asyncio.Event().wait()


class Spent(NamedTuple):
    """CPU seconds of the daemon in its own code and in the kernel, the same of its worker, and the number of events."""

    daemon_s: float
    daemon_kernel_s: float
    worker_s: float
    worker_kernel_s: float
    num_events: int


def measure(client: Path, daemon: int, worker: int, port: int, streams: int, tokens: int) -> Spent:
    """What `streams` of `tokens` take."""
    body = {"model": "bench", "prompt": [FIRST_WORD], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    request = request_bytes(f"127.0.0.1:{port}", json.dumps(body).encode())
    before = (*cpu_s(daemon), *cpu_s(worker))
    command = [str(client), "127.0.0.1", str(port), "data: [DONE]"]
    found = json.loads(subprocess.run(command, input=request * streams, capture_output=True, check=True).stdout)
    if found["complete"] != streams:
        sys.exit(f"{streams - found['complete']} of {streams} responses are incomplete")
    after = (*cpu_s(daemon), *cpu_s(worker))
    daemon_s, daemon_kernel_s, worker_s, worker_kernel_s = (now - then for now, then in zip(after, before, strict=True))
    return Spent(daemon_s, daemon_kernel_s, worker_s, worker_kernel_s, found["events"])


def first_token(client: Path, port: int, num_tokens: int) -> None:
    """Prints how long single requests take."""
    prompt = [FIRST_WORD + place * 7919 % (VOCAB - FIRST_WORD) for place in range(num_tokens)]
    body = {"model": "bench", "prompt": prompt, "max_tokens": 1, "ignore_eos": True, "stream": True}
    request = request_bytes(f"127.0.0.1:{port}", json.dumps(body).encode())
    command = [str(client), "127.0.0.1", str(port), "data: [DONE]"]
    took_ms = []
    for _ in range(FIRST_TOKEN_RUNS):
        found = json.loads(subprocess.run(command, input=request, capture_output=True, check=True).stdout)
        took_ms.append(found["seconds"] * 1e3)
    print(f"{num_tokens} tokens: median {sorted(took_ms)[len(took_ms) // 2]:.2f} ms, lowest {min(took_ms):.2f} ms")


def compare_rates(client: Path, port: int, num_requests: int, num_tokens: int) -> None:
    """Prints how long requests take in the engine alone and over HTTP."""
    numbers = random.Random(0)
    lengths = [numbers.randrange(128, 1025) for _ in range(num_requests)]
    prompts = [tuple(numbers.randrange(FIRST_WORD, VOCAB) for _ in range(length)) for length in lengths]
    engine, began_s = modelled_device.load(), time.monotonic()
    for number, prompt in enumerate(prompts):
        engine.submit(EngineRequest(str(number), prompt, num_tokens, SamplingParams(temperature=0.0)))
    while engine.has_work:
        engine.step()
    alone_s = time.monotonic() - began_s
    rest = {"model": "bench", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [json.dumps({**rest, "prompt": prompt}).encode() for prompt in prompts]
    sent = b"".join(request_bytes(f"127.0.0.1:{port}", body) for body in bodies)
    command = [str(client), "127.0.0.1", str(port), "data: [DONE]"]
    found = json.loads(subprocess.run(command, input=sent, capture_output=True, check=True).stdout)
    if found["complete"] != num_requests:
        sys.exit(f"{num_requests - found['complete']} of {num_requests} responses are incomplete")
    share = alone_s / found["seconds"]
    print(
        f"{num_requests} requests: engine {alone_s:.2f} s, over HTTP {found['seconds']:.2f} s, {share:.1%} of its rate"
    )


def added(url: str, log: Path, num_requests: int, num_tokens: int) -> None:
    """Prints what lies between the clients and the engine, in milliseconds."""
    log.write_text("")
    server, draw, seeds = traffic.Server(url, "bench"), random.Random(1), range(num_requests)
    arrivals = itertools.accumulate(draw.expovariate(ARRIVALS_PER_S) for _ in seeds)

    async def one(seed: int, due_s: float) -> traffic.Record:
        await asyncio.sleep(due_s)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": num_tokens, "ignore_eos": True}
        return await traffic.exchange(server, {**body, "seed": seed}, traffic.Record(time.monotonic()))

    async def run() -> list[traffic.Record]:
        return await asyncio.gather(*map(one, seeds, arrivals))

    records = asyncio.run(run())
    if errors := {record.error for record in records if record.error}:
        sys.exit(f"{url}: {errors.pop()}")
    engine = {int(seed): times for seed, *times in map(json.loads, log.read_text().splitlines())}
    before = [engine[seed][0] - records[seed].sent_s for seed in seeds]
    after = [
        client_s - engine_s
        for seed in seeds
        for client_s, engine_s in zip(records[seed].events_s, engine[seed][1:], strict=False)
    ]
    both = [wait + records[seed].events_s[0] - engine[seed][1] for seed, wait in zip(seeds, before, strict=True)]
    parts = {"to the engine": before, "to the client": after, "on the first token": both}
    cells = [
        f"{name} {' / '.join(f'{percentile(times, share) * 1e3:.2f}' for share in (0.1, 0.5, 0.99))}"
        for name, times in parts.items()
    ]
    print(f"{url}, p10 / p50 / p99 ms: {', '.join(cells)}", flush=True)


def add_gateway(stack: ExitStack, folder: Path, node_port: int) -> str:
    """The address of a gateway in front of the node, with routing, metrics and accounting."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = folder / "cortex.toml"
    node = f'[[neurons]]\nname = "bench"\nendpoint = "http://127.0.0.1:{node_port}"\n'
    config.write_text(f'[gateway]\nlisten = "127.0.0.1:{port}"\n{node}')
    child = subprocess.Popen([sys.executable, "-m", "cortex.gateway", "--config", str(config)])
    stack.callback(child.wait)
    stack.callback(child.kill)
    url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while time.monotonic() < deadline_s and child.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
            if json.load(response)["data"]:
                return url
        time.sleep(0.1)
    sys.exit("the gateway did not list the model within 60 s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--first-token", type=int, metavar="N", help="time first tokens of prompts of N tokens instead")
    parser.add_argument("--requests", type=int, metavar="N", help="compare the rate of N requests with the engine's")
    parser.add_argument("--added", action="store_true", help="time what node and gateway add to the engine instead")
    parser.add_argument("--slowdown", type=float, default=4.0)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)  # in the child: the port, a folder, an engine
    options = parser.parse_args()
    num_streams = options.requests or options.streams
    if options.serve:
        import uvloop

        uvloop.run(serve(int(options.serve[0]), num_streams, Path(options.serve[1]), options.serve[2]))
    os.environ[STEP_MS] = str(0.0 if options.first_token else options.step_ms)
    os.environ[modelled_device.SLOWDOWN] = str(options.slowdown)
    with ExitStack() as stack:
        client = compiled_client(stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(SHAPE, folder / "model")
        os.environ[LOG] = str(folder / "log") if options.added else ""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        engine = "modelled_device" if options.requests else "scripted_engine"
        served = ["--streams", str(num_streams), "--serve", str(port), str(folder), engine]
        child = subprocess.Popen([sys.executable, __file__, *served])
        stack.callback(child.wait)
        stack.callback(child.kill)
        worker = _wait_for(folder / "worker", child)
        if options.added:
            log = Path(os.environ[LOG])
            for url in (f"http://127.0.0.1:{port}", add_gateway(stack, folder, port)):
                added(url, log, 8, 4)  # imports, caches and the first task of each kind
                added(url, log, options.streams, options.tokens)
            return 0
        if options.requests:
            compare_rates(client, port, options.requests, options.tokens)
            return 0
        if options.first_token:
            for num_tokens in (8, options.first_token):
                first_token(client, port, num_tokens)
            return 0
        run = partial(measure, client, child.pid, worker, port, options.streams)
        run(4)  # imports, caches and the first task of each kind
        short, long = run(2), run(options.tokens)
        num_events = long.num_events - short.num_events
        daemon_us, daemon_kernel_us, worker_us, worker_kernel_us = (
            (ran - less) / num_events * 1e6 for ran, less in zip(long[:4], short[:4], strict=True)
        )
        short_us = (short.daemon_s + short.daemon_kernel_s) * 1e6
        request_us = (short_us - short.num_events * (daemon_us + daemon_kernel_us)) / options.streams
        print(
            f"daemon {daemon_us:.1f} + {daemon_kernel_us:.1f}, worker {worker_us:.1f} + {worker_kernel_us:.1f} µs/event"
            f" (own code + kernel), daemon {request_us:.0f} µs/request"
        )
    return 0


def _wait_for(path: Path, child: subprocess.Popen[bytes]) -> int:
    """The process id that the child writes into `path`."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        if path.exists() and (written := path.read_text()):
            return int(written)
        time.sleep(0.1)
    sys.exit("the node did not start within 120 s")


if __name__ == "__main__":
    sys.exit(main())
