"""Memory that silent streams take in a gateway, without the noise of a load: see README.md.

Usage: python bench/gateway/idle_streams.py
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import Config, GatewaySection, NeuronSection
from cortex.gateway.server import Gateway
from cortex.settings import Listen

NUM_STREAMS = 1000
SETTLE_S = 1.5
EVENT = b'data: {"id":"x","model":"m","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
MODELS = b'{"object":"list","data":[{"id":"m"}]}'
BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"' + b"x" * 200 + b'"}]}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A foreign server whose streams are silent after the first event."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
        else:
            await reader.readexactly(len(BODY))
            framed = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(framed)


async def be_client_and_node() -> None:
    """The other process: prints the port of its server, reads that of the gateway, opens the streams and says so."""
    server = await asyncio.start_server(respond, "127.0.0.1", 0, backlog=2 * NUM_STREAMS)
    print(server.sockets[0].getsockname()[1], flush=True)
    port = int(await asyncio.to_thread(sys.stdin.readline))
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_STREAMS)]
    for _, writer in streams:
        writer.write(REQUEST)
    for reader, _ in streams:
        await reader.readuntil(b'"hi"')
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def measure() -> None:
    peer = subprocess.Popen(
        [sys.executable, __file__, "peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    endpoint = f"http://127.0.0.1:{int(peer.stdout.readline())}"
    with tempfile.TemporaryDirectory() as folder:
        section = GatewaySection(listen=Listen("127.0.0.1:0"), metrics_listen=None)
        node = NeuronSection(name="node", endpoint=endpoint, kind="openai")
        gateway = Gateway(Config(gateway=section, neurons=(node,)), Catalogue(), Path(folder))
        _, port = await gateway.start()
        await asyncio.sleep(SETTLE_S)
        gc.collect()
        gc.freeze()
        before_mb = resident_mb()
        print(port, file=peer.stdin, flush=True)
        await asyncio.to_thread(peer.stdout.readline)
        await asyncio.sleep(SETTLE_S)
        after_mb = resident_mb()
        per_stream_kb = (after_mb - before_mb) * 1024 / NUM_STREAMS
        print(f"{before_mb:.1f} MB, with {NUM_STREAMS} streams {after_mb:.1f} MB: {per_stream_kb:.1f} KB a stream")
        peer.kill()
        os._exit(0)  # closing the streams is not measured


if __name__ == "__main__":
    num_files = 4 * NUM_STREAMS
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    asyncio.run(be_client_and_node()) if sys.argv[1:] else uvloop.run(measure())
