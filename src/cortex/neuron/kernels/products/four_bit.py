"""Four-bit matrices, for the small batches of decode steps on a CPU.

Such a product is bound by the bytes of the matrix, which are a quarter of those in bfloat16. torch implements the
product with vector instructions for some processors only. On the others it is far slower than a dense product.
Therefore `max_four_bit_rows` measures its speed.
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
    """[out, in] as `scale · q + minimum`, with a scale and a minimum per group of inputs and q of four bits.

    A q of eight bits is stored as two planes of four bits, the high halves and then the low halves. Then the matrix
    has twice the inputs, and the row is repeated, so that one sum covers both planes.
    """

    packed: Tensor
    """[out, planes · in / 2] uint8, in the order of torch's kernel"""
    scales: Tensor
    """[planes · in / GROUP, out, 2] bfloat16: the scale of each group, and the value of q = 8"""
    planes: int
    max_rows: int
    """With more rows, a dense product is faster."""

    def put(self, first_row: int, q: Tensor, scale: Tensor, minimum: Tensor) -> None:
        """Writes whole blocks of rows. q: [rows, groups, GROUP] uint8; scale and minimum: [rows, groups, 1] float32"""
        if self.planes == 2:
            q = torch.cat((q >> 4, q & 0x0F), dim=1)
            zeros = torch.zeros_like(minimum)
            scale, minimum = torch.cat((scale * 16, scale), dim=1), torch.cat((minimum, zeros), dim=1)
        rows = slice(first_row, first_row + len(q))
        self.packed[rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.flatten(1).int(), 1)
        self.scales[:, rows] = torch.cat((scale, minimum + 8 * scale), dim=2).transpose(0, 1).to(self.scales.dtype)

    def product(self, x: Tensor) -> Tensor:
        """x: [rows, in] → [rows, out]. Multiplies in bfloat16, accumulates in float32."""
        row = x.to(torch.bfloat16)
        if self.planes == 2:
            row = torch.cat((row, row), dim=1)
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(row.contiguous(), self.packed, GROUP, self.scales)
        return y.to(x.dtype)


@cache
def max_four_bit_rows(dtype: torch.dtype) -> int:
    """The most rows for which a four-bit product is faster than a dense one in `dtype` on this machine.

    0 if it never is, or if torch lacks the operation. Takes tens of milliseconds, once per process. Both products run
    alternately on one thread. Their shortest processor times are compared, so that other load matters little.
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
    for first in range(0, outputs, outputs // 2):  # in two parts, like a matrix of several tensors
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
        return torch.mv(weight, x[0])[None]  # F.linear with one row repacks the matrix on every call
    return F.linear(x, weight)


def shortest_times_s(*candidates: Callable[[], Tensor]) -> list[float]:
    """The shortest processor time of each candidate, in seconds. The candidates run alternately."""
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
