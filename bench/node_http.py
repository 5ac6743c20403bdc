"""Benchmarks the HTTP API of a node without an engine: what a request and an event cost the daemon.

    PYTHONPATH=src python bench/node_http.py --streams 512 --tokens 64

The API runs in a child on one CPU, over a backend that has a token for every stream at each step, `--step-ms` apart, so
that every token is an event of its own. `bench/streams.c`, compiled, reads the streams. Printed is the CPU time of the
child for each event, in its own code and in the kernel, and for each request: two lengths of streams tell them apart.
"""

# ruff: noqa: ARG002 - the backend has the methods that the API calls

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cortex.neuron.engine.request import EngineRequest, StepOutput
from cortex.neuron.node.generation import Generation
from cortex.neuron.node.status import ServedModel
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared, prepare
from cortex.neuron.text.template.prompt import PromptRules
from cortex.neuron.text.tokenizer.local import read_text
from cortex.wire.node.protocol import Discovery, ModelState, ModelStatus
from cortex.wire.node.sampling import SamplingDefaults
from cortex.wire.packed_request import PackedRequest, unpack
from neuron import compiled_client, cpu_s, request_bytes
from random_checkpoint import write_tokenizer

VOCAB = 4096
CONTEXT_TOKENS = 4096


@dataclass
class ScriptedBackend:
    """One model that is always ready, and whose tokens cost nothing."""

    text_model: TextModel
    running: dict[str, tuple[Generation, EngineRequest, int]] = field(default_factory=dict)
    discovery: Discovery = field(default_factory=lambda: Discovery(host="bench", os="linux", version="0", devices=()))
    status: ModelStatus = field(
        default_factory=lambda: ModelStatus(id="bench", state=ModelState.READY, context_tokens=CONTEXT_TOKENS)
    )

    @property
    def texts(self) -> ScriptedBackend:
        return self

    @property
    def pictures(self) -> ScriptedBackend:
        return self  # prompts have none

    def served(self, model_id: str) -> ServedModel:
        return ServedModel(ModelState.READY, CONTEXT_TOKENS, SamplingDefaults())

    def upstream(self, model_id: str) -> None:
        """No harness serves the model."""

    def models(self) -> tuple[ModelStatus, ...]:
        return (self.status,)

    def engine_stats(self) -> dict[str, Any]:
        return {}

    def task_restarts(self) -> dict[str, int]:
        return {}

    async def text(self, model_id: str) -> TextModel:
        return self.text_model

    async def prepare(self, request: PackedRequest, *, principal: str, in_context: bool = True) -> Prepared:
        return prepare(self.text_model, unpack(request.whole), PromptRules(CONTEXT_TOKENS))

    def generate(self, model_id: str, request: EngineRequest) -> Generation:
        generation = Generation(request.id, lambda: self.running.pop(request.id, None) and None)
        self.running[request.id] = (generation, request, 0)
        return generation

    async def step(self, seconds: float) -> None:
        """A token for every stream, again and again."""
        tokens = itertools.cycle(range(300, VOCAB))
        while True:
            await asyncio.sleep(seconds)
            for id, (generation, request, num_tokens) in list(self.running.items()):
                is_last = num_tokens + 1 == request.max_tokens
                cached_tokens = 0 if num_tokens == 0 else None
                output = StepOutput(id, (next(tokens),), (), cached_tokens, "length" if is_last else None)
                if is_last:
                    del self.running[id]
                else:
                    self.running[id] = (generation, request, num_tokens + 1)
                generation.push(output)


async def serve(port: int, step_s: float, folder: Path) -> None:
    from cortex.neuron.api.app import NodeApi
    from cortex.neuron.api.drain_gate import DrainGate

    backend = ScriptedBackend(TextModel.of(*read_text(folder)))
    api = NodeApi(backend, DrainGate())  # type: ignore[arg-type] # the routes that the bench uses need no more
    await api.server.listen("127.0.0.1", port)
    gc.collect()
    gc.freeze()  # as the daemon does
    await backend.step(step_s)


def measure(client: Path, pid: int, port: int, streams: int, tokens: int) -> tuple[float, float, int]:
    """CPU seconds of the API in its own code and in the kernel, and the number of events, for streams of `tokens`."""
    body = {"model": "bench", "prompt": [300, 301], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    request = request_bytes(f"127.0.0.1:{port}", json.dumps(body).encode())
    user_s, kernel_s = cpu_s(pid)
    command = [str(client), "127.0.0.1", str(port), "data: [DONE]"]
    found = json.loads(subprocess.run(command, input=request * streams, capture_output=True, check=True).stdout)
    if found["complete"] != streams:
        sys.exit(f"{streams - found['complete']} of {streams} responses are incomplete")
    after_user_s, after_kernel_s = cpu_s(pid)
    return after_user_s - user_s, after_kernel_s - kernel_s, found["events"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)  # in the child: the port and the tokenizer's folder
    options = parser.parse_args()
    if options.serve:
        import uvloop

        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
        uvloop.run(serve(int(options.serve[0]), options.step_ms / 1000, Path(options.serve[1])))
    with ExitStack() as stack:
        client = compiled_client(stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_tokenizer(VOCAB, folder / "tokenizer.json")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        child = subprocess.Popen(
            [sys.executable, __file__, "--step-ms", str(options.step_ms), "--serve", str(port), str(folder)]
        )
        stack.callback(child.wait)
        stack.callback(child.kill)
        _wait_for(port, child)
        measure(client, child.pid, port, options.streams, 4)  # imports, caches and the first task of each kind
        *short_s, num_short = measure(client, child.pid, port, options.streams, 2)
        *long_s, num_long = measure(client, child.pid, port, options.streams, options.tokens)
        user_us, kernel_us = (
            (ran - less) / (num_long - num_short) * 1e6 for ran, less in zip(long_s, short_s, strict=True)
        )
        request_us = (sum(short_s) * 1e6 - num_short * (user_us + kernel_us)) / options.streams
        print(f"{user_us:.1f} + {kernel_us:.1f} µs/event (own code + kernel)  {request_us:.0f} µs/request")
    return 0


def _wait_for(port: int, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).read()
            return
        except OSError:
            time.sleep(0.1)
    sys.exit("the API did not start within 60 s")


if __name__ == "__main__":
    sys.exit(main())
