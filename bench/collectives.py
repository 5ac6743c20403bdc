"""Messages between the ranks of a divided model: whether they are right, and how long they take.

    python bench/collectives.py --ranks 2 --device cuda --backend nccl    # one GPU per rank
    python bench/collectives.py --ranks 2 --device cuda:0 --backend tcp  # all ranks on one GPU
    python bench/collectives.py --ranks 2 --device cuda:0 --streams       # the same in one process
    python bench/collectives.py --ranks 2 --device cpu --backend tcp

Compares peer memory with the library, one call after the other and captured in a CUDA graph. Processes that share a GPU
take turns on it, milliseconds long, so their times say nothing about links. With `--streams` each rank has a stream of
one process: all ranks compute at the same time, and what is measured is the kernel without a link.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cortex.neuron.engine.parallel.group import PEER_MEMORY, TorchGroup
from cortex.neuron.engine.parallel.peer_memory import PeerMemory
from cortex.neuron.engine.request import RankSpec
from cortex.neuron.kernels.peer_buffer import BUFFER_BYTES, MAX_BYTES, NUM_FLAGS
from cortex.neuron.kernels.peer_exchange import peer_sum_reference
from cortex.neuron.layers.configs import Shard

SIZES = tuple(size << 10 for size in (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024))
CALLS = 50
"""In one graph, and in one round of calls."""
ROUNDS = 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 700), (1, 5), (5, 4096), (64, 333))
TIMEOUT_S = 110.0


class Sums(Protocol):
    """One rank's end."""

    def all_reduce(self, partial: Tensor) -> Tensor: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="of all ranks, or `cuda` for one GPU each")
    parser.add_argument("--backend", choices=["sockets", "nccl"], default="sockets")
    parser.add_argument("--streams", action="store_true", help="all ranks in one process on one GPU, without a library")
    options = parser.parse_args()
    if options.streams:
        measure_streams(options.ranks, torch.device(options.device))
        return
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        for name in (PEER_MEMORY, options.backend):
            (Path(directory) / name).mkdir()
        ranks = [context.Process(target=run_rank, args=(options, rank, directory)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        deadline_s = time.monotonic() + TIMEOUT_S
        for process in ranks:
            process.join(max(0.0, deadline_s - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
    if any(code != 0 for code in codes):
        sys.exit(f"failed, or stuck for {TIMEOUT_S:.0f} s: exit codes {codes}")


def run_rank(options: argparse.Namespace, rank: int, directory: str) -> None:
    device = torch.device(f"cuda:{rank}" if options.device == "cuda" else options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ways = {}
    for name in (PEER_MEMORY, options.backend):
        spec = RankSpec(rank, options.ranks, str(Path(directory) / name), options.backend)
        ways[name] = TorchGroup.join(spec, device, lambda: None, with_peers=name == PEER_MEMORY)
    if not ways[PEER_MEMORY].uses_peers:
        ways.pop(PEER_MEMORY).close()
    for name, group in ways.items():
        errors = check(group, device)
        if rank == 0:
            print(f"{name}: {errors} of {len(SHAPES) * len(DTYPES)} sums and as many gathers are wrong", flush=True)
    for num_bytes in SIZES:
        for name, group in ways.items():
            if name == PEER_MEMORY and num_bytes > MAX_BYTES:
                continue
            part = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
            times = [f"{name:>12} {num_bytes >> 10:>5} KiB: {eager_s(group, part) * 1e6:>10.1f} µs per call"]
            if group.max_captured_bytes >= num_bytes:
                times.append(f"{captured_s(group, part) * 1e6:>10.1f} µs captured")
            if rank == 0:
                print(", ".join(times), flush=True)
    for group in ways.values():
        group.close()


def check(group: TorchGroup, device: torch.device) -> int:
    """The number of wrong results. Peer memory sums in the order of the ranks, so that all bits are known."""
    wrong = 0
    shard = group.shard
    for number, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            parts = [part_of(rank, number, shape, dtype).to(device) for rank in range(shard.size)]
            gathered = group.all_gather(parts[shard.rank].clone())
            summed, expected = group.all_reduce(parts[shard.rank].clone()), peer_sum_reference(parts)
            is_exact = group.uses_peers and expected.nbytes <= MAX_BYTES
            is_right = torch.equal(summed, expected) if is_exact else torch.allclose(summed, expected, atol=0.05)
            wrong += (not is_right) + (not torch.equal(gathered, torch.cat(parts, dim=-1)))
    return wrong


def part_of(rank: int, number: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def eager_s(group: Sums, part: Tensor) -> float:
    """Seconds of one sum, called from the host."""

    def calls() -> None:
        for _ in range(CALLS):
            group.all_reduce(part)

    return fastest_s([calls]) / CALLS


def captured_s(group: Sums, part: Tensor) -> float:
    """Seconds of one sum in a graph."""
    return fastest_s([captured(group, part).replay]) / CALLS


def captured(group: Sums, part: Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            group.all_reduce(part)
    return graph


def fastest_s(runs: list[Callable[[], None]]) -> float:
    """The fastest of several rounds. All ranks make as many; `runs` go to streams of their own if there are several."""
    streams = [torch.cuda.Stream() for _ in runs] if len(runs) > 1 else [None]
    times = []
    for _ in range(ROUNDS):
        synchronize()
        started_s = time.perf_counter()
        for run, stream in zip(runs, streams, strict=True):
            with torch.cuda.stream(stream):
                run()
        synchronize()
        times.append(time.perf_counter() - started_s)
    return min(times)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class OneRank:
    """A rank on a stream of this process."""

    def __init__(self, shard: Shard, buffers: list[Tensor]) -> None:
        self._peers = PeerMemory(shard, buffers)

    def all_reduce(self, partial: Tensor) -> Tensor:
        return self._peers.sum(partial)


def measure_streams(num_ranks: int, device: torch.device) -> None:
    torch.cuda.set_device(device)
    buffers = [torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    ranks = [OneRank(Shard(rank, num_ranks), buffers) for rank in range(num_ranks)]
    for num_bytes in SIZES:
        if num_bytes > MAX_BYTES:
            continue
        # The first time of anything may wait for the device. With all flags up, no rank waits there for another one.
        for buffer in buffers:
            buffer.view(torch.int32)[:NUM_FLAGS] = 1 << 30
        graphs = []
        for rank in ranks:
            part = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
            rank.all_reduce(part)
            graphs.append(captured(rank, part))
            graphs[-1].replay()
            torch.cuda.synchronize()
        for buffer in buffers:
            buffer.zero_()
        seconds = fastest_s([graph.replay for graph in graphs]) / CALLS
        print(f"{num_ranks} ranks on one GPU {num_bytes >> 10:>5} KiB: {seconds * 1e6:>8.1f} µs captured", flush=True)


if __name__ == "__main__":
    main()
