"""Matrices of codes of any width, multiplied by functions of our own (`native/products.c`).

The memory is [blocks of 16 rows, tiles of 32 columns, bytes of a tile]. A tile has its codes, then a float16 scale per
row and group, then the minimums, if groups have them; `tile_bytes` describes shorter ones. Codes are in the order
[8 steps, 16 rows, 4 columns]. Those of eight bits are bytes. Others are divided into their lowest four bits, two steps
per byte, then two bits, four steps per byte, then one bit, eight steps per byte; whichever of them make up the width.

Inputs are quantised to sixteen bits with one scale per tile, as two planes of eight bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activation_number
from cortex.neuron.kernels.cpu.layout import (
    GROUP,
    ROW_BLOCK,
    TILE_ROWS,
    CpuLayout,
    num_tiles,
    padded_rows,
    tile_bytes,
)
from cortex.neuron.kernels.dense.matrix import dense_product
from cortex.neuron.kernels.matrix import Epilogue, KeptForm, Prologue, StoredMatrix
from cortex.neuron.kernels.native.library import NativeMemory
from cortex.neuron.kernels.native.operations import Lookup, Product, compute, operation
from cortex.neuron.kernels.quantised.quantise import quantised

_DTYPES = (torch.float32, torch.bfloat16)
_MIN_PARALLEL_WEIGHTS = 1 << 18
"""Smaller GEMMs take less time than waking threads."""
_FINE, _COARSE = {(2, 16, True), (3, 16, False), (6, 16, False)}, {(bits, 32) for bits in (4, 5, 8)}
_KERNELS = _FINE | {(*each, has_minimums) for each in _COARSE for has_minimums in (False, True)}
"""Bits, columns of a group, and whether groups have minimums: a function of products.c exists for each."""
_STEPS = 8
_UNIT = 2.0**-8
"""`UNIT` of products.c"""
_TRIES = 4
_TOLERANCE = 0.03
"""Relative to the norm of the exact result: what quantised inputs may add."""


class NativeMatrix(StoredMatrix):
    keeps: ClassVar[KeptForm] = "codes"
    takes_float32: ClassVar[bool] = True

    def __init__(self, layout: CpuLayout, outputs: int, inputs: int, device: torch.device) -> None:
        if (layout.bits, layout.group, layout.zero is None) not in _KERNELS:
            raise NotImplementedError(f"products.c has no function for {layout}")
        super().__init__(outputs, inputs, device)
        self.layout = layout
        shape = (padded_rows(outputs) // TILE_ROWS, num_tiles(layout, inputs), tile_bytes(layout))
        self._packed = torch.empty(shape, dtype=torch.uint8, device=device)
        table = bytes(layout.codebook) if layout.codebook else None
        self._struct = NativeMemory(
            None,
            table,
            outputs,
            inputs // GROUP,
            0 if table else layout.bits,
            layout.zero or 0,
            layout.zero is None,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._packed,)

    def put_values(self, first_row: int, values: Tensor) -> None:
        self.put_codes(first_row, *quantised(values, self.layout.codes))

    def values(self, rows: slice = slice(None)) -> Tensor:
        return self.rows(torch.arange(self.outputs)[rows], torch.float32)

    def gates(self, x: Tensor) -> bool:  # noqa: ARG002
        return False

    def rounds(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        return False

    def fuses(self, prologue: Prologue, x: Tensor) -> bool:  # noqa: ARG002
        return True

    def put_codes(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        layout, missing = self.layout, -len(code) % ROW_BLOCK
        code, scale, minimum = (F.pad(part, (0, 0, 0, missing)) if missing else part for part in (code, scale, minimum))
        if layout.codebook:
            code = torch.searchsorted(torch.tensor(layout.codebook, dtype=torch.uint8), code).to(torch.uint8)
        blocks, tiles = len(code) // TILE_ROWS, self.inputs // GROUP
        steps = code.view(blocks, TILE_ROWS, tiles, _STEPS, 4).permute(0, 2, 3, 1, 4).flatten(3)
        parts = [*_planes(steps, 4 if layout.codebook else layout.bits)]
        grouped = [
            (values / _UNIT).view(blocks, TILE_ROWS, tiles, -1).permute(0, 2, 3, 1)  # [blocks, tiles, groups, 16]
            for values in ((scale,) if layout.zero is not None else (scale, minimum))
        ]
        first = first_row // TILE_ROWS
        if layout.has_short_scales:
            parts = [*(F.pad(part, (0, 0, 0, tiles % 2)) for part in parts), *_short(*grouped)]
        else:
            parts += [_bytes(values.half()) for values in grouped]
        torch.cat(parts, 2, out=self._packed[first : first + blocks])

    def _product(self, x: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor | None) -> Tensor:
        rows, dtype, residual = x.shape[0], x.dtype, epilogue.residual
        if dtype not in _DTYPES:
            wide = epilogue._replace(residual=None if residual is None else residual.float())
            y = self._product(x.float(), prologue, wide, None)
            return y.to(dtype) if out is None else out.copy_(y)
        norm, bias = (
            part if part is None or part.dtype == torch.bfloat16 else part.float()
            for part in (prologue.norm, epilogue.bias)
        )
        if out is None:
            out = torch.empty(rows, self.outputs, dtype=dtype)
            residual = None if residual is None else residual.contiguous()
        elif residual is not None and residual.stride(0) != out.stride(0):  # the function has one stride for both
            return out.copy_(self._product(x, prologue, epilogue, None))
        made = operation(
            Product,
            matrix=self._at_address(),
            activation=activation_number(prologue.activation),
            is_half=dtype == torch.bfloat16,
            is_norm_half=norm is not None and norm.dtype == torch.bfloat16,
            is_bias_half=bias is not None and bias.dtype == torch.bfloat16,
            eps=prologue.eps,
            x=x.contiguous(),
            norm=norm,
            bias=bias,
            residual=residual,
            out=out,
            stride=out.stride(0),
        )
        compute(made, rows, is_small=rows * self.outputs * self.inputs < _MIN_PARALLEL_WEIGHTS)
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype not in _DTYPES:
            return self.rows(ids, torch.float32).to(dtype)
        ids = ids.long().contiguous()
        out = torch.empty(len(ids), self.inputs, dtype=dtype)
        is_half = dtype == torch.bfloat16
        made = operation(Lookup, matrix=self._at_address(), is_half=is_half, ids=ids, out=out)
        try:
            compute(made, len(ids), is_small=True)
        except IndexError:
            message = f"row {int(ids.max())} or {int(ids.min())} of a matrix with {self.outputs} rows"
            raise IndexError(message) from None
        return out

    def _at_address(self) -> NativeMemory:
        """The matrix as C sees it. Its memory may have moved: a sleeping model has none."""
        self._struct.packed = self._packed.data_ptr()
        return self._struct


def _bytes(values: Tensor) -> Tensor:
    """[blocks, tiles, …] → [blocks, tiles, bytes]"""
    return values.contiguous().view(torch.uint8).flatten(2)


def _short(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of four bits, and the units of both, as `tile_bytes` says. Exact if the values are products
    of a float16 and up to 15, as in files. Each: [blocks, tiles, 2, 16]"""
    odd = scale.shape[1] % 2
    (scales, unit), (minimums, other) = (
        _multiples(F.pad(values, (0, 0, 0, 0, 0, odd)).unflatten(1, (-1, 2))) for values in (scale, -minimum)
    )
    multiples = (scales | minimums << 4).flatten(1, 2)
    return _bytes(multiples), _bytes(torch.stack((unit, other), 2).flatten(1, 2))


def _multiples(values: Tensor) -> tuple[Tensor, Tensor]:
    """As multiples, from 0 to 15, of a unit in float16 that two tiles share: of those by which the largest value is a
    multiple, the one with the smallest error.

    values: [blocks, pairs, 2, groups, 16] → multiples uint8, units [blocks, pairs, 16]
    """
    low, high = values.aminmax(dim=2)
    low, high = low.amin(2), high.amax(2)
    unit = largest = torch.where(low + high < 0, low, high)  # stays if it is not a number that float16 has
    least, multiples = torch.full_like(largest, torch.inf), torch.zeros_like(values)
    for count in range(15, 0, -1):
        tried = (largest / count).half().float()
        spread = tried[:, :, None, None]
        rounded = (values / spread).round().clamp(0, 15).nan_to_num(0)
        error = (rounded * spread - values).abs().amax((2, 3))
        is_better = error < least
        least, unit = torch.where(is_better, error, least), torch.where(is_better, tried, unit)
        multiples = torch.where(is_better[:, :, None, None], rounded, multiples)
    return multiples.to(torch.uint8), unit.half()


def _planes(steps: Tensor, bits: int) -> list[Tensor]:
    """steps: [blocks, tiles, 8, 64] uint8 → [blocks, tiles, bytes] of each kind"""
    if bits == 8:
        return [steps.flatten(2)]
    planes, shift = [], 0
    for width in (4, 2, 1):
        if bits & width:
            per_byte = 8 // width
            digits = ((steps >> shift) & ((1 << width) - 1)).unflatten(2, (-1, per_byte))
            places = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
            planes.append((digits << places).sum(3, dtype=torch.uint8).flatten(2))
            shift += width
    return planes


@cache
def multiplies_codes(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies by codes, and faster than by dense matrices in `dtype`. A decode step is bound by
    the bytes of the matrices; but some processors lack the vector instructions that codes need.

    Takes tens of milliseconds, once per process, and seconds on a host that has not compiled the functions before. The
    products run alternately on one thread. Their shortest processor times are compared, so that other load matters
    little.
    """
    outputs, inputs = 16 * ROW_BLOCK, 1024
    generator = torch.Generator().manual_seed(0)
    code = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scale = torch.full((outputs, inputs // GROUP), 0.125)
    exact = ((code.float() - 8) * 0.125).to(dtype)
    x = torch.randn(1, inputs, generator=generator).to(dtype)
    ids = torch.tensor([0, outputs - 1])
    matrix = NativeMatrix(CpuLayout(4, GROUP, 8), outputs, inputs, torch.device("cpu"))
    with torch.inference_mode(), _one_thread():
        expected = dense_product(x, exact).float()
        try:
            for first in (0, outputs // 2):  # in two parts, like a matrix of several tensors
                part = slice(first, first + outputs // 2)
                matrix.put_codes(first, code[part], scale[part], -8 * scale[part])
            is_right = (matrix.product(x).float() - expected).norm() < _TOLERANCE * expected.norm()
            rows = matrix.rows(ids, torch.float32)
        except (RuntimeError, NotImplementedError):
            return False  # nothing can be compiled on this host
        if not is_right or not torch.allclose(rows, exact[ids].float(), rtol=0.01, atol=0.001):
            return False
        dense_s, packed_s = shortest_times_s(partial(dense_product, x, exact), partial(matrix.product, x))
    return packed_s < dense_s


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
