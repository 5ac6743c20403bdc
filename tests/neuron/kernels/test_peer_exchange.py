"""Sums and gathers over peer memory: on one GPU each rank on a stream of its own, on a CPU each in its own process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.kernels.peer_buffer import BUFFER_BYTES, MAX_BYTES, NUM_FLAGS
from cortex.neuron.kernels.peer_exchange import SUM_DTYPES, peer_gather, peer_sum, peer_sum_reference

Shape = tuple[int, int]
SHAPES: list[Shape] = [(1, 1), (3, 700), (1, 5), (2, 4096), (1, 1024), (7, 333)]
"""Sizes of one call after the other: few programs, many, few again."""
TIMEOUT_S = 300.0


def part_of(rank: int, call: int, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def run_rank(rank: int, buffers: Sequence[Tensor], shapes: Sequence[Shape], results: Sequence[Tensor]) -> None:
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    for call, shape in enumerate(shapes):
        summed = peer_sum(part_of(rank, call, shape), addresses, rank)
        gathered = peer_gather(part_of(rank, call, shape), addresses, rank)
        results[2 * call].copy_(summed)
        results[2 * call + 1].copy_(gathered)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_processes_exchange_their_parts() -> None:
    num_ranks = 3
    context = torch.multiprocessing.get_context("fork")  # imports nothing again
    buffers = [torch.zeros(BUFFER_BYTES, dtype=torch.uint8).share_memory_() for _ in range(num_ranks)]
    results = [
        [
            torch.zeros(rows, columns * (1 if is_sum else num_ranks)).share_memory_()
            for rows, columns in SHAPES
            for is_sum in (True, False)
        ]
        for _ in range(num_ranks)
    ]
    ranks = [
        context.Process(target=run_rank, args=(rank, buffers, SHAPES, results[rank]), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    for rank, (call, shape) in itertools.product(range(num_ranks), enumerate(SHAPES)):
        parts = [part_of(peer, call, shape) for peer in range(num_ranks)]
        assert torch.equal(results[rank][2 * call], peer_sum_reference(parts))
        assert torch.equal(results[rank][2 * call + 1], torch.cat(parts, dim=-1))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_wait_for_a_lost_rank_ends() -> None:
    buffers = [torch.zeros(BUFFER_BYTES, dtype=torch.uint8) for _ in range(2)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    with pytest.raises(Exception, match="another rank did not send its part in time"):
        peer_sum(torch.ones(4), addresses, 0, wait_limit_s=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SUM_DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_streams_exchange_their_parts(num_ranks: int, dtype: torch.dtype) -> None:
    """Also captured as graphs, whose replays continue to count the turns."""
    shapes = [*SHAPES, (MAX_BYTES // dtype.itemsize // 1024, 1024)]
    parts = [
        [part_of(rank, call, shape, dtype).cuda() for call, shape in enumerate(shapes)] for rank in range(num_ranks)
    ]
    buffers = [torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device="cuda") for _ in range(num_ranks)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")
    streams = [torch.cuda.Stream() for _ in range(num_ranks)]

    def run(rank: int) -> list[Tensor]:
        """The sum and the gathered parts of one call after the other."""
        return [
            output
            for part in parts[rank]
            for output in (peer_sum(part.clone(), addresses, rank), peer_gather(part, addresses, rank))
        ]

    # The first time of anything may wait for the device. With all flags up, no rank waits there for another one.
    for buffer in buffers:
        buffer.view(torch.int32)[:NUM_FLAGS] = 1 << 30
    graphs, captured = [], []
    for rank, stream in enumerate(streams):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            run(rank)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.append(run(rank))
        graph.replay()
        graphs.append(graph)
    torch.cuda.synchronize()
    for buffer in buffers:
        buffer.zero_()

    def on_streams(function: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
        torch.cuda.synchronize()
        outputs = []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs.append(function(rank))
        torch.cuda.synchronize()
        return outputs

    def replay(rank: int) -> list[Tensor]:
        graphs[rank].replay()
        return captured[rank]

    each = [[parts[rank][call] for rank in range(num_ranks)] for call in range(len(shapes))]
    expected = [output for call in each for output in (peer_sum_reference(call), torch.cat(call, dim=-1))]
    for function in (run, *[replay] * 20, run):
        for output in itertools.chain(*captured):
            output.zero_()
        for outputs in on_streams(function):
            assert all(map(torch.equal, outputs, expected))
