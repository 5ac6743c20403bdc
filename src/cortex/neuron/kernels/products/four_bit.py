"""Matrices in numbers of four bits, for the few rows of a decode step on a CPU.

Such a product is bound by the bytes of the matrix, and these are a quarter of bfloat16's. torch brings it, with vector
code for some processors and without for others, where it is far slower than a dense one; what it is worth here is
therefore measured (`max_four_bit_rows`), never assumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.products.four_bit_size import GROUP

_CANDIDATE_ROWS = (1, 2, 4, 8, 16)
_TRIES = 4


@dataclass(frozen=True, slots=True)
class FourBitMatrix:
    """[out, in] as `scale · q + minimum` in groups of inputs, q of four bits.

    A q of eight bits is two planes of four, the high halves and then the low ones: the matrix has twice the inputs and
    the row is multiplied twice, in one sum.
    """

    packed: Tensor
    """[out, planes · in / 2] uint8, in torch's own order"""
    scales: Tensor
    """[planes · in / GROUP, out, 2] bfloat16: a group's scale, and the number that q = 8 stands for"""
    planes: int
    max_rows: int
    """With more rows than this a dense product is faster."""

    def put(self, first_row: int, q: Tensor, scale: Tensor, minimum: Tensor) -> None:
        """Fills whole blocks of rows. q: [rows, groups, GROUP] uint8; scale and minimum: [rows, groups, 1] float32"""
        if self.planes == 2:
            q = torch.cat((q >> 4, q & 0x0F), dim=1)
            zeros = torch.zeros_like(minimum)
            scale, minimum = torch.cat((scale * 16, scale), dim=1), torch.cat((minimum, zeros), dim=1)
        rows = slice(first_row, first_row + len(q))
        self.packed[rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.flatten(1).int(), 1)
        self.scales[:, rows] = torch.cat((scale, minimum + 8 * scale), dim=2).transpose(0, 1).to(self.scales.dtype)

    def product(self, x: Tensor) -> Tensor:
        """x: [rows, in] → [rows, out]; multiplied in bfloat16, summed in float32."""
        row = x.to(torch.bfloat16)
        if self.planes == 2:
            row = torch.cat((row, row), dim=1)
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(row.contiguous(), self.packed, GROUP, self.scales)
        return y.to(x.dtype)


@cache
def max_four_bit_rows(dtype: torch.dtype) -> int:
    """Up to how many rows a product in four bits beats a dense one in `dtype` on this machine; 0: never, or not there.

    Takes some tens of milliseconds, once in a process: both in turns, on one thread, by the processor time of the best
    try, so that what else the machine does matters little.
    """
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return 0
    outputs, inputs = 1024, 1024
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (outputs, inputs // GROUP, GROUP), dtype=torch.uint8, generator=generator)
    scale = torch.full((outputs, inputs // GROUP, 1), 0.125)
    matrix = FourBitMatrix(
        torch.empty(outputs, inputs // 2, dtype=torch.uint8),
        torch.empty(inputs // GROUP, outputs, 2, dtype=torch.bfloat16),
        planes=1,
        max_rows=0,
    )
    for first in range(0, outputs, outputs // 2):  # in two parts, as a matrix of several tensors is
        part = slice(first, first + outputs // 2)
        matrix.put(first, q[part], scale[part], -8 * scale[part])
    dense = ((q.float() - 8) * scale).flatten(1).to(dtype)
    max_rows = 0
    with torch.inference_mode(), _one_thread():
        for rows in _CANDIDATE_ROWS:
            x = torch.randn(rows, inputs, generator=generator).to(dtype)
            packed_s, dense_s = shortest_times_s(partial(matrix.product, x), partial(dense_product, x, dense))
            agrees = torch.allclose(matrix.product(x), dense_product(x, dense), atol=0.5, rtol=0.02)
            if packed_s >= dense_s or not agrees:
                break
            max_rows = rows
    return max_rows


def dense_product(x: Tensor, weight: Tensor) -> Tensor:
    """x: [rows, in], weight: [out, in] → [rows, out]"""
    if len(x) == 1:
        return torch.mv(weight, x[0])[None]  # a product with one row would repack the matrix every time
    return F.linear(x, weight)


def shortest_times_s(*candidates: Callable[[], Tensor]) -> list[float]:
    """Each candidate's shortest processor time in seconds."""
    best = [float("inf")] * len(candidates)
    for _ in range(_TRIES):
        for index, candidate in enumerate(candidates):
            start = time.thread_time()
            candidate()
            best[index] = min(best[index], time.thread_time() - start)
    return best


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
