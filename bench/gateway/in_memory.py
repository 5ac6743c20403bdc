"""The gateway's own CPU time per request, event and stream: client and node are in memory, so no socket is used.

The figures do not depend on the network stack and hardly on what else runs on the machine, so that two versions can be
compared on a busy one: `--against` runs blocks of both in turns, each in its process, and prints the median ratio of
blocks that followed each other. See README.md.

Usage: python bench/gateway/in_memory.py [--rounds N] [--dialect openai | anthropic | ollama] [--against SRC]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from cortex.gateway import config as configuration
from cortex.gateway.configuration_files import load_catalogue
from cortex.gateway.server import Gateway
from cortex.http.server.connection import ClientConnection

CONFIGURATION = """
[gateway]
listen = "127.0.0.1:0"
metrics_listen = "127.0.0.1:0"

[[neurons]]
name = "bench"
kind = "openai"
endpoint = "http://127.0.0.1:1"
"""

COUNTS = {"whole response": 2000, "stream": 1000, "event": 20_000}
BLOCKS = 10
"""A block of two versions in turns is this part of a round."""


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def request(path: bytes, body: bytes) -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nHost: 127.0.0.1:31313\r\nContent-Type: application/json\r\n"
        b"Accept: */*\r\nUser-Agent: cortex-bench\r\nAuthorization: Bearer bench\r\nContent-Length: %d\r\n\r\n%b"
        % (path, len(body), body)
    )


DIALECTS = {"openai": b"/v1/chat/completions", "anthropic": b"/v1/messages", "ollama": b"/api/chat"}
"""The node speaks the first: the others are translated."""
CONVERSATION = b'"max_tokens":64,"model":"bench","messages":[{"role":"user","content":"Is anybody there?"}]'
MODELS = whole(b'{"object":"list","data":[{"id":"bench","object":"model","created":1,"owned_by":"bench"}]}')
RESPONSE = whole(
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"bench","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"All is quiet in memory this morning."},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":11,"completion_tokens":10,"total_tokens":21}}'
)
EVENT = chunk(
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bench",'
    b'"choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FIRST_EVENT = STREAM_HEAD + EVENT
LAST_EVENT = (
    chunk(
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"bench",'
        b'"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":64,"total_tokens":75}}\n\ndata: [DONE]\n\n'
    )
    + b"0\r\n\r\n"
)


class MemoryTransport(asyncio.Transport):
    """Takes everything and passes it to `on_write`."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        super().__init__()
        self.write = on_write  # type: ignore[assignment,method-assign]

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        raise RuntimeError("the gateway paused reading: the benchmark sends more than it should")

    def resume_reading(self) -> None:
        """Never paused."""

    def abort(self) -> None:
        raise RuntimeError("the gateway aborted a connection: the benchmark speaks wrong HTTP")

    close = abort


class MemoryNode:
    """A node in memory. Polls get their response at once, other requests when the benchmark sends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.waiting: list[asyncio.Protocol] = []
        """Connections whose request has no response yet."""

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], *_: object, **__: object
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """In place of `loop.create_connection`."""
        connection = factory()

        def receive(data: bytes) -> None:
            if data.startswith(b"GET"):
                self._loop.call_soon(connection.data_received, MODELS)
            else:
                self.waiting.append(connection)

        transport = MemoryTransport(receive)
        connection.connection_made(transport)
        return transport, connection


class Bench:
    """One client connection to a gateway whose node is in memory."""

    def __init__(self, gateway: Gateway, node: MemoryNode, path: bytes) -> None:
        self._whole = request(path, b'{"stream":false,%b}' % CONVERSATION)
        self._stream = request(path, b'{"stream":true,%b}' % CONVERSATION)
        self._waiting = node.waiting
        self.num_client_bytes = 0
        self._client = ClientConnection(gateway.server, asyncio.get_running_loop())
        self._client.connection_made(MemoryTransport(self._receive))

    def _receive(self, data: bytes) -> None:
        self.num_client_bytes += len(data)

    async def warm_up(self) -> None:
        """Open the connection to the node."""
        self._client.data_received(self._whole)
        while not self._waiting:
            await asyncio.sleep(0)
        self._waiting.pop().data_received(RESPONSE)
        for run in (self.whole_responses, self.streams, self.events):
            run(500)

    def whole_responses(self, count: int) -> None:
        for _ in range(count):
            self._client.data_received(self._whole)
            self._waiting.pop().data_received(RESPONSE)

    def streams(self, count: int) -> None:
        """Streams of one event, besides the last."""
        for _ in range(count):
            self._client.data_received(self._stream)
            node = self._waiting.pop()
            node.data_received(FIRST_EVENT)
            node.data_received(LAST_EVENT)

    def events(self, count: int) -> None:
        """Events of one stream."""
        self._client.data_received(self._stream)
        node = self._waiting.pop()
        node.data_received(FIRST_EVENT)
        for _ in range(count):
            node.data_received(EVENT)
        node.data_received(LAST_EVENT)


def cpu_us(run: Callable[[int], None], count: int) -> float:
    start = time.process_time()
    run(count)
    return (time.process_time() - start) * 1e6 / count


async def main(rounds: int, path_of_dialect: bytes, *, serves: bool) -> None:
    loop = asyncio.get_running_loop()
    node = MemoryNode(loop)
    loop.create_connection = node.connect  # type: ignore[method-assign,assignment]
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as name:
        path = Path(name) / "cortex.toml"
        path.write_text(CONFIGURATION)
        config = configuration.load(path, {})
        gateway = Gateway(config, load_catalogue(config, path), path.parent)
        await gateway.start()
        bench = Bench(gateway, node, path_of_dialect)
        await bench.warm_up()
        gc.collect()
        gc.freeze()
        runs = {"whole response": bench.whole_responses, "stream": bench.streams, "event": bench.events}
        if serves:
            for label in map(str.strip, sys.stdin):
                print(cpu_us(runs[label], COUNTS[label] // BLOCKS), flush=True)
        else:
            for label, run in runs.items():
                measured = [cpu_us(run, COUNTS[label]) for _ in range(rounds)]
                print(f"{label}: {min(measured):.2f} µs, median {statistics.median(measured):.2f}")
    sys.stdout.flush()
    os._exit(0)  # transports in memory cannot be closed in order


def compare(sources: list[Path], rounds: int, dialect: str) -> None:
    """Blocks of both sources in turns."""
    command = [sys.executable, __file__, "--serve", "--dialect", dialect]
    children = [
        subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(each)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in sources
    ]
    for label in COUNTS:
        measured: list[list[float]] = [[], []]
        for _ in range(rounds * BLOCKS):
            for child, found in zip(children, measured, strict=True):
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write(f"{label}\n")
                child.stdin.flush()
                found.append(float(child.stdout.readline()))
        ratio = statistics.median(this / other for other, this in zip(*measured, strict=True))
        print(f"{label}: {statistics.median(measured[1]):.2f} µs, {ratio:.3f} of {statistics.median(measured[0]):.2f}")
    for child in children:
        child.communicate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the gateway's own CPU time, without sockets.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dialect", choices=DIALECTS, default="openai")
    parser.add_argument("--against", type=Path, metavar="SRC", help="the sources of another version")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.against is not None and not (options.against / "cortex").is_dir():
        parser.error(f"{options.against} has no folder cortex")
    if options.against is not None:
        compare([options.against, Path(__file__).parents[2] / "src"], options.rounds, options.dialect)
    else:
        uvloop.run(main(options.rounds, DIALECTS[options.dialect], serves=options.serve))
