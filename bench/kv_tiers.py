"""Measures KV on disk and between nodes: the time to the first token after a restart against computing the prompt.

    PYTHONPATH=src:bench python bench/kv_tiers.py --shape llama-3.1-8b
    PYTHONPATH=src:bench python bench/kv_tiers.py --device cpu --shape tiny --tokens 2048,4096
    PYTHONPATH=src:bench python bench/kv_tiers.py --link
    PYTHONPATH=src:bench python bench/kv_tiers.py --serve & … --fetch PORT     # a link of another limit: `tc qdisc`

Random weights of a named shape. A restart is a new engine with the same weights and empty host memory. The disk is
read as the restart finds it, in part from the page cache, and after its files were dropped from that. The limit of a
fetch is the rate of reading files of the folder with the same threads and without a model, just before.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop

from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Server
from cortex.http.ticker import Ticker
from cortex.neuron.api import responses
from cortex.neuron.api.calls import ApiCall
from cortex.neuron.api.routes.transfers import KvBlocks
from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.host_pages import block_files, tier
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.disk_reads import READ_BYTES, READERS
from cortex.neuron.engine.host_pages.rates import end_of_front, saves_time
from cortex.neuron.engine.host_pages.store import BlockKind
from cortex.neuron.engine.kv.pages import ROOT, page_digests
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, LoadSpec, SamplingParams
from cortex.neuron.engine.roofline.step_work import StepWork
from cortex.neuron.node.memory.kv_exchange import KvExchange
from cortex.wire.node.neighbours import Neighbour
from engine import random_engine
from shapes import SHAPES

SHAPES["tiny"] = SHAPES["llama-3.1-8b"] | {
    **{"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64},
}
RATE_FILES = 64
"""About 4 GB."""
GREEDY = SamplingParams(temperature=0.0)


def text(seed: int, count: int) -> tuple[int, ...]:
    chosen = random.Random(seed)
    return tuple(chosen.randrange(10, 4000) for _ in range(count))


class Restarts:
    """One model, started again and again on the same folder."""

    def __init__(self, shape: str, device: torch.device, longest: int, folder: Path, host_bytes: int) -> None:
        self._shape, self._device, self._folder, self._host_bytes = shape, device, folder, host_bytes
        torch.manual_seed(0)
        probe = random_engine(shape, device, LoadSpec(path="", max_num_seqs=1, context_tokens=64), None)
        info = probe.info
        self.token_bytes = info.kv_bytes / (info.num_pages + 1) / info.page_tokens
        probe.close()
        limit = int(info.weight_bytes + (longest + 8192) * self.token_bytes + (64 << 20))
        self._spec = LoadSpec(
            path="",
            model_id=shape,
            dtype="float32" if device.type == "cpu" else "auto",
            max_num_seqs=8,
            context_tokens=longest + 64,
            memory_bytes=limit if device.type == "cuda" else None,
            kv_disk_dir=str(folder),
            kv_disk_bytes=1 << 40,
        )
        self.engine: Engine
        self.host: DeviceHostMemory
        self._next = 0

    def start(self) -> None:
        torch.manual_seed(0)
        self.engine = random_engine(self._shape, self._device, self._spec, None)
        self.engine.warm_up()
        if self._next == 0 and self._device.type == "cuda":
            self.run(text(98, 12_000))  # compiles what long prompts use
        host = self.engine.keep_pages(None)
        assert host is not None
        host.store.limit(self._host_bytes)
        self.host = host
        self.run(text(99, 512))

    def run(self, prompt: Sequence[int]) -> Asked:
        """Until the first token."""
        self._next += 1
        self._synchronise()
        start = time.perf_counter()
        self.engine.submit(EngineRequest(f"r{self._next}", tuple(prompt), 1, GREEDY))
        cached = 0
        tokens: list[int] = []
        while self.engine.has_work:
            for output in self.engine.step():
                cached += output.cached_tokens or 0
                tokens += output.tokens
        self._synchronise()
        return Asked(time.perf_counter() - start, cached, tokens)

    def forget(self) -> None:
        """Everything that is not on disk, as a restart does."""
        self.engine.forget_pages(lambda _: True)
        self.host.store.limit(0)
        self.host.store.limit(self._host_bytes)

    def save(self) -> tuple[float, float]:
        """Seconds to host memory, and from there to files."""
        start = time.perf_counter()
        self.engine.save_pages()
        copied = time.perf_counter()
        self.host.settle()
        return copied - start, time.perf_counter() - copied

    def close(self) -> None:
        self.engine.close()
        self.host.store.limit(0)
        if self.host.disk is not None:
            self.host.disk.close()
        del self.engine, self.host

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def drop_from_page_cache(folder: Path) -> None:
    for each in block_files.stored(folder):
        fd = os.open(each.path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_rate(folder: Path) -> float:
    """Bytes per second of the files of a folder, checked, without a model."""
    files = [block_files.read_header(each.path) for each in block_files.stored(folder)][:RATE_FILES]
    # Aligned, as reads around the page cache require.
    views = [memoryview(mmap.mmap(-1, READ_BYTES)) for _ in range(2 * READERS)]
    for view in views:
        view[::4096] = bytes(len(view[::4096]))
    start, num_bytes = time.perf_counter(), 0
    with ThreadPoolExecutor(READERS) as readers:
        reads: list[Future[bool]] = []
        for file in files:
            most = max(1, READ_BYTES // file.kind.num_bytes)
            for first in range(0, len(file.digests), most):
                size = min(most, len(file.digests) - first) * file.kind.num_bytes
                num_bytes += size
                view = views[len(reads) % len(views)][:size]
                if len(reads) >= len(views):
                    reads[-len(views)].result()
                reads.append(readers.submit(block_files.read_blocks, file, first, view))
        for read in reads:
            read.result()  # a view that is read into twice fails its check; the rate is the same
    return num_bytes / (time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what became of its prefix."""

    took_s: float
    num_cached: int
    tokens: list[int]


def reads_everything(first: int, *_: object) -> int:
    """An `end_of_front` that computes nothing meanwhile."""
    return first


def measure(restarts: Restarts, folder: Path, lengths: Sequence[int]) -> None:
    """Prints a line for each length. "by the rule": with the front computed while the rest is read, or all of it
    computed if that is expected to be faster. "read": everything is read."""
    restarts.start()
    lines: list[list[str]] = []
    computed: dict[int, Asked] = {}
    for length in lengths:
        computed[length] = asked = restarts.run(text(length, length))
        _, disk_s = restarts.save()
        size = length * restarts.token_bytes
        lines.append([f"{length}", f"{size / 1e9:.2f}", f"{asked.took_s:.2f}", f"{size / max(disk_s, 1e-9) / 1e9:.1f}"])
    restarts.close()
    restarts.start()

    def after_restart(state: str, length: int, line: list[str]) -> Asked:
        asked = restarts.run(text(length, length))
        line += [
            f"{asked.took_s:.2f}",
            f"{asked.took_s / computed[length].took_s:.2f}",
            f"{asked.num_cached / length:.0%}",
        ]
        if asked.tokens != computed[length].tokens:
            print(f"{length} tokens, {state}: another token than computed", flush=True)
        restarts.forget()
        return asked

    for length, line in zip(lengths, lines, strict=True):  # before any file is dropped from it
        after_restart("page cache", length, line)
        with forced_reads(restarts):
            after_restart("page cache, read", length, line)
    for length, line in zip(lengths, lines, strict=True):
        drop_from_page_cache(folder)
        alone = read_rate(folder)
        drop_from_page_cache(folder)
        after_restart("cold, by the rule", length, line)
        drop_from_page_cache(folder)
        with forced_reads(restarts):
            asked = after_restart("cold, read", length, line)
        rate = asked.num_cached * restarts.token_bytes / asked.took_s
        line += [f"{rate / 1e9:.2f}", f"{alone / 1e9:.2f}", f"{rate / alone:.0%}"]
    restarts.close()
    by_state = [
        f"{state}{column}" for state in ("cached ", "c. read ", "rule ", "read ") for column in ("s", "ratio", "kept")
    ]
    header = ["tokens", "GB", "compute s", "written GB/s", *by_state, "read GB/s", "files GB/s", "share"]
    for cells in (header, *lines):
        print("  ".join(cell.rjust(len(name)) for cell, name in zip(cells, header, strict=True)), flush=True)


@contextmanager
def forced_reads(restarts: Restarts) -> Iterator[None]:
    """All that is on disk is read, even if computing is expected to be faster."""
    loaded = restarts.engine.tier
    setattr(tier, "saves_time", lambda *_, **__: True)  # noqa: B010 - it is imported there
    setattr(loaded, "_end_of_front", reads_everything)  # noqa: B010
    yield
    setattr(tier, "saves_time", saves_time)  # noqa: B010
    setattr(loaded, "_end_of_front", end_of_front)  # noqa: B010


BURST_S = 0.01


class PacedRelay:
    """Forwards one node's port at the rate of a link."""

    def __init__(self, target: tuple[str, int], bits_per_s: float) -> None:
        self._target, self._bytes_per_s = target, bits_per_s / 8

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        await asyncio.gather(self._forward(reader, back), self._forward(there, writer), return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        free_s = time.perf_counter()
        while chunk := await reader.read(1 << 18):
            # A sleep that is too long is made up for, as by the buffer of a network card.
            free_s = max(free_s, time.perf_counter() - BURST_S) + len(chunk) / self._bytes_per_s
            writer.write(chunk)
            await writer.drain()
            if (wait_s := free_s - time.perf_counter()) > 0.002:
                await asyncio.sleep(wait_s)
        writer.close()

    async def close(self) -> None:
        self._server.close()


class _Offer:
    """The part of a node that the route for blocks needs."""

    def __init__(self, kv: KvExchange) -> None:
        self.kv = kv


KIND = BlockKind(bytes(16), 0, 4 << 20)
"""As pages of an 8B have."""
INFO = EngineInfo(
    "f", "d", 1 << 20, 100, 1, 1, 32, 128, work=StepWork(1, weights_per_token=1), kv_name=KIND.model.hex()
)


class Link:
    """One node's blocks and another node that fetches them."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder = folder
        self._prompt = tuple(range(32 * (num_bytes // KIND.num_bytes)))

    async def serve(self) -> tuple[Server, tuple[str, int]]:
        digests = page_digests(ROOT, self._prompt, 32)
        for first in range(0, len(digests), 16):
            names = digests[first : first + 16]
            pieces = [memoryview(os.urandom(KIND.num_bytes)) for _ in names]
            block_files.write_file(self._folder / "a", KIND, "m", names, pieces)
        handler = _handler(KvBlocks(_Offer(KvExchange(self._folder / "a", 1 << 40, []))))  # type: ignore[arg-type]
        server = Server(handler, responses.rejection, Ticker(asyncio.get_running_loop()))
        return server, await server.listen("127.0.0.1", 0)

    async def fetch(self, exchange: KvExchange, url: str, compute_s: float) -> tuple[int, float]:
        """Bytes, and seconds. `compute_s`: what computing the prompt is expected to take."""
        shutil.rmtree(self._folder / "b", ignore_errors=True)
        start, stats = time.perf_counter(), EngineStats(prompt_token_s=compute_s / len(self._prompt))
        request = EngineRequest("r", self._prompt, 1)
        received = await exchange.fetch("m", INFO, stats, request, Neighbour(name="a", url=url))
        return received, time.perf_counter() - start

    def exchange(self) -> KvExchange:
        return KvExchange(self._folder / "b", 1 << 40, [])


async def measure_link(folder: Path, num_bytes: int, bits_per_s: float) -> None:
    """Over a paced link: the rate, and at which prompt speed the rule takes blocks after a first transfer."""
    link = Link(folder, num_bytes)
    server, address = await link.serve()
    relay = PacedRelay(address, bits_per_s)
    url = await relay.start()
    try:
        exchange, before_s = link.exchange(), time.process_time()
        received, took_s = await link.fetch(exchange, url, 1e6)
        cpu_s, limit = time.process_time() - before_s, bits_per_s / 8
        print(
            f"{bits_per_s / 1e9:.0f} Gbit/s: {received / 1e9:.2f} GB in {took_s:.2f} s, "
            f"{received / took_s / 1e9:.3f} GB/s, {received / took_s / limit:.0%} of the link, "
            f"{cpu_s / received * 1e9:.2f} s of CPU per GB for both ends and the relay",
            flush=True,
        )
        for faster in (0.5, 0.8, 1.25, 2.0):
            received, _ = await link.fetch(exchange, url, took_s * faster)
            print(f"  computing takes {faster:.2f} of the transfer: the rule {'fetches' if received else 'computes'}")
    finally:
        await relay.close()
        await server.close(0.0)


async def serve_link(folder: Path, num_bytes: int) -> None:
    _, (_, port) = await Link(folder, num_bytes).serve()
    print(port, flush=True)
    await asyncio.Event().wait()


async def fetch_link(folder: Path, num_bytes: int, port: int) -> None:
    link = Link(folder, num_bytes)
    for _ in range(3):
        before_s = time.process_time()
        received, took_s = await link.fetch(link.exchange(), f"http://127.0.0.1:{port}", 1e6)
        cpu_s = time.process_time() - before_s
        print(
            f"{received / 1e9:.2f} GB in {took_s:.2f} s, {received / took_s * 8e-9:.2f} Gbit/s, "
            f"{cpu_s / received * 1e9:.2f} s of CPU per GB",
            flush=True,
        )


def _handler(blocks: KvBlocks) -> Any:
    async def respond(exchange: Exchange) -> None:
        await blocks.send(ApiCall(exchange, {}))

    tasks: set[asyncio.Task[None]] = set()

    def handle(exchange: Exchange) -> None:
        task = asyncio.create_task(respond(exchange))
        exchange.on_disconnect(lambda: _cancel(task))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return handle


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", default="32768,65536,122880")
    parser.add_argument("--folder", type=Path, help="On the disk to measure. [default: a temporary one]")
    parser.add_argument("--host-mb", type=int, default=20_000)
    parser.add_argument("--link", action="store_true", help="Measure two nodes with a paced link instead.")
    parser.add_argument("--serve", action="store_true", help="Serve blocks on the port that is printed.")
    parser.add_argument("--fetch", type=int, metavar="PORT", help="Fetch the blocks that another process serves.")
    arguments = parser.parse_args()
    lengths = [int(each) for each in arguments.tokens.split(",")]
    folder = Path(tempfile.mkdtemp(prefix="kv-tiers-", dir=arguments.folder))
    try:
        if arguments.link:
            for bits_per_s in (1e9, 1e10):
                uvloop.run(measure_link(folder / f"{bits_per_s:.0f}", 512 << 20, bits_per_s))
            return
        if arguments.serve or arguments.fetch:
            one_end = serve_link(folder, 1 << 30) if arguments.serve else fetch_link(folder, 1 << 30, arguments.fetch)
            uvloop.run(one_end)
            return
        device = torch.device(arguments.device)
        restarts = Restarts(arguments.shape, device, max(lengths), folder, arguments.host_mb << 20)
        measure(restarts, folder, lengths)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
