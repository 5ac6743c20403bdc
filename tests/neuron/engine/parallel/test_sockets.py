"""Ranks on threads that send each other tensors through sockets."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from cortex.neuron.engine.errors import LoadCancelled
from cortex.neuron.engine.parallel.group import MAX_DIRECT_BYTES, Sockets
from cortex.neuron.layers.configs import Shard

from ....waiting import WAIT_S

T = TypeVar("T")

BUFFERED_BYTES = 16 << 20
"""More than a connection holds."""


def on_ranks(num_ranks: int, call: Callable[[int, Sockets], T]) -> list[T]:
    barrier = threading.Barrier(num_ranks)

    def run(rank: int) -> T:
        def wait_for_all() -> None:
            barrier.wait(WAIT_S)

        sockets = Sockets.connect(Shard(rank, num_ranks), directory, wait_for_all, lambda: None)
        try:
            return call(rank, sockets)
        finally:
            sockets.abort()

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("num_bytes", "dtype"),
    [(2, torch.bfloat16), (MAX_DIRECT_BYTES + 2, torch.bfloat16), (BUFFERED_BYTES, torch.float32)],
    ids=str,
)
def test_every_rank_gets_the_same_sum_and_all_parts(num_ranks: int, num_bytes: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_bytes)
    parts = torch.randint(-9, 10, (num_ranks, 1, num_bytes // dtype.itemsize), generator=generator).to(dtype)

    def compute(rank: int, sockets: Sockets) -> tuple[list[Tensor], Tensor]:
        return sockets.all_parts(parts[rank]), sockets.all_reduce(parts[rank].clone())

    expected = parts.sum(0)
    for gathered, total in on_ranks(num_ranks, compute):
        assert torch.equal(torch.stack(gathered), parts)
        assert torch.equal(total, expected)


def test_sum_is_made_in_the_order_of_the_ranks() -> None:
    """Otherwise ranks would have different bits, and could choose different experts."""
    for size in (3, MAX_DIRECT_BYTES):
        parts = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
        for total in on_ranks(3, lambda rank, sockets, parts=parts: sockets.all_reduce(parts[rank].clone())):  # type: ignore[misc]
            assert torch.equal(total, parts[0] + parts[1] + parts[2])


def test_tensors_of_the_first_rank_and_of_a_neighbour_arrive_in_order() -> None:
    def compute(rank: int, sockets: Sockets) -> list[list[int]]:
        token, hidden = torch.full((2,), rank), torch.full((3,), float(rank))
        sockets.broadcast(token)
        if rank == 0:
            sockets.send(hidden, 1)
        sockets.receive(hidden, (rank - 1) % 3)
        if rank:
            sockets.send(hidden, (rank + 1) % 3)
        sockets.broadcast(empty := torch.empty(0, dtype=torch.int64))
        return [token.tolist(), hidden.tolist(), empty.tolist()]

    assert on_ranks(3, compute) == [[[0, 0], [0.0, 0.0, 0.0], []]] * 3


def test_rank_that_is_gone_ends_the_calls_of_the_others() -> None:
    def compute(rank: int, sockets: Sockets) -> str:
        if rank == 2:
            return "gone"
        for num_floats in (1, BUFFERED_BYTES // 4):
            with pytest.raises(OSError, match=r"rank 2 has closed|reset|Broken pipe"):
                sockets.all_reduce(torch.ones(num_floats))
        return "failed"

    assert on_ranks(3, compute) == ["failed", "failed", "gone"]


def test_rank_that_never_connects_fails_the_others_in_time(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        Sockets.connect(Shard(0, 2), str(tmp_path), lambda: None, lambda: None, deadline_s=0.0)


def test_wait_for_a_rank_that_does_not_connect_ends_when_the_load_is_cancelled(tmp_path: Path) -> None:
    polls = iter(range(3))

    def poll() -> None:
        if next(polls, None) is None:
            raise LoadCancelled("cancelled")

    with pytest.raises(LoadCancelled):
        Sockets.connect(Shard(0, 2), str(tmp_path), lambda: None, poll)
