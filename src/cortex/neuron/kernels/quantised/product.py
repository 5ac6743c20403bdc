"""Products with packed matrices.

At most eight rows, and more than four bits: `few_rows.py`.

Small batches: one program reads BLOCK_OUT rows of the matrix once, unpacks them in registers into the left operand of a
tensor-core product, and multiplies all rows of x. Matrices with few rows are cut along their columns as well (SPLIT),
so that every processor has work: the program that finishes last adds the parts in a fixed order.

Large batches: the matrix, or a stretch of a large one, is unpacked into a scratch buffer, and the library multiplies
with that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import (
    gdc_launch_dependents,
    gdc_wait,
    has_kernels,
    jit,
    launch_options,
    num_processors,
    tl,
    triton,
)
from cortex.neuron.kernels.quantised.few_rows import few_rows_product, max_few_rows
from cortex.neuron.kernels.quantised.packing import PackedMatrix, unpacked
from cortex.neuron.kernels.quantised.tiles import product_columns, small_batch_tiles
from cortex.neuron.kernels.quantised.unpack import (
    RESTORE,
    add_product,
    layout_options,
    operand,
    operand_row,
    restored,
)
from cortex.neuron.kernels.shared_memory import shared_memory

MAX_SMALL_ROWS = 64
"""With more rows the library is faster, by measurements."""
_SCRATCH_BYTES = 112 << 20
"""Most matrices at once: few launches are worth more than a buffer that stays in the L2 cache."""


def packed_product(
    x: Tensor,
    matrix: PackedMatrix,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """out = x Wᵀ + bias + residual. x: [rows, inputs]; out and residual: [rows, outputs], maybe columns of more.

    `out` may be `residual` itself.
    """
    if not has_kernels(x):
        out.copy_(packed_product_reference(x, matrix, bias, residual))
    elif 1 < len(x) <= max_few_rows(matrix.layout):
        few_rows_product(x, matrix, out, bias, None, 0.0, residual)
    elif len(x) <= MAX_SMALL_ROWS:
        small_batch_product(x, matrix, out, bias, residual)
    else:
        _large_batch(x, matrix, out, bias, residual)


def packed_product_reference(x: Tensor, matrix: PackedMatrix, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    y = F.linear(x.float(), unpacked(matrix), None if bias is None else bias.float())
    return (y if residual is None else y + residual.float()).to(x.dtype)


def packed_rows(matrix: PackedMatrix, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix's rows of these numbers, as an embedding looks them up. rows: [tokens] → [tokens, inputs]"""
    if not has_kernels(rows):
        return unpacked(matrix, rows).to(dtype)
    out = torch.empty(len(rows), matrix.inputs, dtype=dtype, device=rows.device)
    _dequantise(matrix, rows, 0, len(rows), out)
    return out


def dequantise(matrix: PackedMatrix, first_row: int, num_rows: int, out: Tensor) -> None:
    """A stretch of the matrix's rows. out: [num_rows, inputs], contiguous"""
    _dequantise(matrix, None, first_row, num_rows, out)


def _dequantise(matrix: PackedMatrix, rows: Tensor | None, first_row: int, num_rows: int, out: Tensor) -> None:
    block_out, warps = 16, 1
    _dequantise_kernel[(triton.cdiv(num_rows, block_out), matrix.low.shape[1] // 16)](
        matrix.low,
        matrix.high,
        matrix.scales,
        rows,
        out,
        first_row,
        num_rows,
        GATHER=rows is not None,
        INPUTS=matrix.inputs,
        CHUNKS=matrix.low.shape[1] // 16,
        BLOCK_OUT=block_out,
        WARPS=warps,
        num_warps=warps,
        **layout_options(matrix.layout),
    )


def _large_batch(x: Tensor, matrix: PackedMatrix, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    stretch = max(256, _SCRATCH_BYTES // (2 * matrix.inputs) // 256 * 256)
    scratch = torch.empty(min(stretch, matrix.outputs), matrix.inputs, dtype=x.dtype, device=x.device)
    for start in range(0, matrix.outputs, stretch):
        end = min(start + stretch, matrix.outputs)
        weight = scratch[: end - start]
        dequantise(matrix, start, end - start, weight)
        part = out[:, start:end]
        if residual is None:
            torch.mm(x, weight.t(), out=part)
        elif out.data_ptr() == residual.data_ptr():
            part.addmm_(x, weight.t())
        else:
            torch.addmm(residual[:, start:end], x, weight.t(), out=part)
    if bias is not None:
        out.add_(bias)


def gated_product(x: Tensor, gate_up: PackedMatrix) -> Tensor:
    """silu(x Gᵀ) · x Uᵀ. x: [at most MAX_SMALL_ROWS, inputs]; gate_up: [2 · outputs, inputs] → [rows, outputs]"""
    out = torch.empty(len(x), gate_up.outputs // 2, dtype=x.dtype, device=x.device)
    small_batch_product(x, gate_up, out, None, None, gated=True)
    return out


def small_batch_product(
    x: Tensor,
    matrix: PackedMatrix,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    gated: bool = False,
) -> None:
    """`packed_product` for at most MAX_SMALL_ROWS rows, or `gated_product`."""
    rows, inputs = x.shape
    shared = shared_memory(x.device)
    chunks = matrix.low.shape[1] // 16
    tiles = small_batch_tiles(rows, chunks, matrix.outputs, matrix.layout, num_processors(x.device), shared)
    blocks, columns = triton.cdiv(matrix.outputs, tiles.outputs), product_columns(rows)
    partial = out
    if tiles.split > 1:  # whole tiles: their places are constants in the machine code, which leaves registers free
        sizes = blocks, tiles.split, tiles.outputs, columns
        partial = torch.empty(sizes, dtype=torch.float32, device=x.device)
    _small_batch_kernel[(blocks, tiles.split)](
        x,
        matrix.low,
        matrix.high,
        matrix.scales,
        bias,
        residual,
        out,
        partial,
        matrix.counters,
        rows,
        out.shape[1],
        out.stride(0),
        0 if residual is None else residual.stride(0),
        INPUTS=inputs,
        CHUNKS=chunks,
        ROWS=columns,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        BLOCK_OUT=tiles.outputs,
        BLOCK_CHUNKS=tiles.chunks,
        WARPS=tiles.warps,
        SPLIT=tiles.split,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
        **layout_options(matrix.layout),
        **launch_options(x.device),
    )


@jit(do_not_specialize=["rows"])
def _small_batch_kernel(
    x,
    low,
    high,
    scales,
    bias,
    residual,
    out,
    partial,
    counters,
    rows,
    outputs,
    out_stride,
    residual_stride,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    LEVELS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_OUT rows of the matrix and one of SPLIT stretches of its columns, all rows of x.

    GATED: half of those rows are the gate's, the others are up's for the same outputs. A thread has both of an output.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    part = tl.program_id(1)
    number = tl.arange(0, BLOCK_OUT)
    outputs_here: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    output = block * outputs_here + number % outputs_here
    loaded = tl.where(output < outputs, output + number // outputs_here * outputs, 0).to(tl.int64)
    row = tl.arange(0, ROWS)
    row_inside = row < rows
    per_part: tl.constexpr = CHUNKS // SPLIT
    column = tl.arange(0, BLOCK_CHUNKS * 128)
    source = x + row[None, :] * INPUTS + column[:, None]
    total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for start in tl.range(part * per_part, (part + 1) * per_part, BLOCK_CHUNKS, num_stages=STAGES):
        weights = operand(
            low, high, scales, loaded, start,
            CHUNKS, BLOCK_OUT, BLOCK_CHUNKS, WARPS, LOW_BITS, HIGH_BITS, GROUP, ZERO, LEVELS, SCALE_WORDS, PTX,
        )  # fmt: skip
        if INPUTS % (BLOCK_CHUNKS * 128) == 0:
            inside = row_inside[None, :]
        else:
            inside = row_inside[None, :] & (start * 128 + column < INPUTS)[:, None]
        values = tl.load(source + start * 128, mask=inside, other=0.0)  # [in, rows]
        total = add_product(total, weights, values)
    total = restored(total, x.dtype.element_ty)
    is_last = True
    if SPLIT > 1:
        place = number[:, None] * ROWS + row[None, :]
        parts = partial + block.to(tl.int64) * (SPLIT * BLOCK_OUT * ROWS) + place
        tl.store(parts + part * (BLOCK_OUT * ROWS), total)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
            for other in tl.static_range(SPLIT):
                total += tl.load(parts + other * (BLOCK_OUT * ROWS), cache_modifier=".cg")
            tl.store(counters + block, 0)
    if is_last:
        result = total
        if GATED:
            halves = tl.reshape(total, (WARPS, 2, outputs_here // WARPS, ROWS))
            gate, up = tl.split(tl.permute(halves, (0, 2, 3, 1)))
            result = tl.reshape(gate * tl.sigmoid(gate) * up, (outputs_here, ROWS))
        target = block * outputs_here + operand_row(outputs_here, WARPS)
        there = (target < outputs)[:, None] & row_inside[None, :]
        if BIAS:
            result += tl.load(bias + target, mask=target < outputs, other=0.0).to(tl.float32)[:, None]
        if RESIDUAL:
            before = residual + row[None, :] * residual_stride + target[:, None]
            result += tl.load(before, mask=there, other=0.0).to(tl.float32)
        tl.store(out + row[None, :] * out_stride + target[:, None], result.to(out.dtype.element_ty), mask=there)


@jit(do_not_specialize=["first_row", "num_rows"])
def _dequantise_kernel(
    low,
    high,
    scales,
    rows,
    out,
    first_row,
    num_rows,
    GATHER: tl.constexpr,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WARPS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    LEVELS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
):
    """One program per BLOCK_OUT rows and one chunk of 128 columns. GATHER: those that `rows` names."""
    block = tl.program_id(0) * BLOCK_OUT
    chunk = tl.program_id(1)
    loaded = tl.minimum(block + tl.arange(0, BLOCK_OUT), num_rows - 1).to(tl.int64)
    loaded = tl.load(rows + loaded).to(tl.int64) if GATHER else first_row + loaded
    weights = operand(
        low, high, scales, loaded, chunk,
        CHUNKS, BLOCK_OUT, 1, WARPS, LOW_BITS, HIGH_BITS, GROUP, ZERO, LEVELS, SCALE_WORDS, PTX,
    )  # fmt: skip
    output = block + operand_row(BLOCK_OUT, WARPS)
    column = chunk * 128 + tl.arange(0, 128)
    inside = (output < num_rows)[:, None] & (column < INPUTS)[None, :]
    weights = (weights.to(tl.float32) * RESTORE).to(out.dtype.element_ty)
    tl.store(out + output.to(tl.int64)[:, None] * INPUTS + column[None, :], weights, mask=inside)
