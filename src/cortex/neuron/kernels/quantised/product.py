"""GEMM with packed matrices.

GEMV: `one_row.py`. Small batches of at most eight rows, and more than four bits: `few_rows.py`.

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

from cortex.neuron.kernels.activations import activated
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, num_processors, tl, triton
from cortex.neuron.kernels.matrix import BARE, Epilogue
from cortex.neuron.kernels.products.small_batch import launch_small_batch, split_sum, store_batch
from cortex.neuron.kernels.quantised.codes import PackedCodes, unpacked
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


def packed_product_reference(x: Tensor, codes: PackedCodes, epilogue: Epilogue = BARE) -> Tensor:
    """Without an activation."""
    bias, residual = epilogue.bias, epilogue.residual
    y = F.linear(x.float(), unpacked(codes), None if bias is None else bias.float())
    return (y if residual is None else y + residual.float()).to(x.dtype)


def packed_rows(codes: PackedCodes, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix's rows with these ids, as an embedding looks them up. rows: [tokens] → [tokens, inputs]"""
    if not has_kernels(rows):
        return unpacked(codes, rows).to(dtype)
    out = torch.empty(len(rows), codes.inputs, dtype=dtype, device=rows.device)
    _dequantise(codes, rows, 0, len(rows), out)
    return out


def dequantise(codes: PackedCodes, first_row: int, num_rows: int, out: Tensor) -> None:
    """A stretch of the matrix's rows. out: [num_rows, inputs], contiguous"""
    _dequantise(codes, None, first_row, num_rows, out)


def _dequantise(codes: PackedCodes, rows: Tensor | None, first_row: int, num_rows: int, out: Tensor) -> None:
    chunks = codes.low.shape[1] // 16
    block_out, block_chunks, warps = 16, 2 - chunks % 2, 1
    _dequantise_kernel[(triton.cdiv(num_rows, block_out), chunks // block_chunks)](
        codes.low,
        codes.high,
        codes.scales,
        rows,
        out,
        first_row,
        num_rows,
        GATHER=rows is not None,
        INPUTS=codes.inputs,
        CHUNKS=chunks,
        BLOCK_OUT=block_out,
        BLOCK_CHUNKS=block_chunks,
        WARPS=warps,
        num_warps=warps,
        **layout_options(codes.layout),
    )


def large_batch_product(x: Tensor, codes: PackedCodes, out: Tensor, epilogue: Epilogue) -> None:
    """See `Matrix.product`; without an activation. `out` may be the residual, to which the library adds."""
    residual = epilogue.residual
    stretch = max(256, _SCRATCH_BYTES // (2 * codes.inputs) // 256 * 256)
    scratch = torch.empty(min(stretch, codes.outputs), codes.inputs, dtype=x.dtype, device=x.device)
    for start in range(0, codes.outputs, stretch):
        end = min(start + stretch, codes.outputs)
        weight = scratch[: end - start]
        dequantise(codes, start, end - start, weight)
        part = out[:, start:end]
        if residual is None:
            torch.mm(x, weight.t(), out=part)
        elif out.data_ptr() == residual.data_ptr():
            part.addmm_(x, weight.t())
        else:
            torch.addmm(residual[:, start:end], x, weight.t(), out=part)
    if epilogue.bias is not None:
        out.add_(epilogue.bias)


def small_batch_product(x: Tensor, codes: PackedCodes, out: Tensor, epilogue: Epilogue) -> None:
    """See `Matrix.product`. x: [at most MAX_SMALL_ROWS, inputs]; `out` may be the residual."""
    rows, inputs = x.shape
    shared = shared_memory(x.device)
    chunks = codes.low.shape[1] // 16
    tiles = small_batch_tiles(rows, chunks, codes.outputs, codes.layout, num_processors(x.device), shared)
    blocks, columns = triton.cdiv(codes.outputs, tiles.outputs), product_columns(rows)
    partial = out
    if tiles.split > 1:  # whole tiles: their places are constants in the machine code, which leaves registers free
        sizes = blocks, tiles.split, tiles.outputs, columns
        partial = torch.empty(sizes, dtype=torch.float32, device=x.device)
    launch_small_batch(
        _small_batch_kernel,
        (blocks, tiles.split),
        (x, codes.low, codes.high, codes.scales),
        epilogue,
        out,
        (partial, codes.counters),
        INPUTS=inputs,
        CHUNKS=chunks,
        ROWS=columns,
        BLOCK_OUT=tiles.outputs,
        BLOCK_CHUNKS=tiles.chunks,
        WARPS=tiles.warps,
        SPLIT=tiles.split,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
        **layout_options(codes.layout),
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
    ACTIVATION: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_OUT rows of the matrix and one of SPLIT stretches of its columns, all rows of x.

    With an ACTIVATION half of those rows are the gate's, the others are up's for the same outputs. A thread has both of
    an output.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    part = tl.program_id(1)
    number = tl.arange(0, BLOCK_OUT)
    outputs_here: tl.constexpr = BLOCK_OUT // 2 if ACTIVATION else BLOCK_OUT
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
            CHUNKS, BLOCK_OUT, BLOCK_CHUNKS, WARPS, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, SCALE_WORDS, PTX,
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
        parts = partial + block.to(tl.int64) * (SPLIT * BLOCK_OUT * ROWS) + number[:, None] * ROWS + row[None, :]
        is_last, total = split_sum(total, parts, BLOCK_OUT * ROWS, part, None, counters + block, SPLIT)
    if is_last:
        result = total
        if ACTIVATION:
            halves = tl.reshape(total, (WARPS, 2, outputs_here // WARPS, ROWS))
            gate, up = tl.split(tl.permute(halves, (0, 2, 3, 1)))
            result = tl.reshape(activated(gate, up, ACTIVATION), (outputs_here, ROWS))
        target = block * outputs_here + operand_row(outputs_here, WARPS)
        store_batch(
            result, bias, residual, out, target, row, rows, outputs, out_stride, residual_stride, BIAS, RESIDUAL
        )  # fmt: skip


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
    BLOCK_CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
):
    """One program per BLOCK_OUT rows and BLOCK_CHUNKS chunks of 128 columns. GATHER: those that `rows` names."""
    block = tl.program_id(0) * BLOCK_OUT
    chunk = tl.program_id(1) * BLOCK_CHUNKS
    loaded = tl.minimum(block + tl.arange(0, BLOCK_OUT), num_rows - 1).to(tl.int64)
    loaded = tl.load(rows + loaded).to(tl.int64) if GATHER else first_row + loaded
    weights = operand(
        low, high, scales, loaded, chunk,
        CHUNKS, BLOCK_OUT, BLOCK_CHUNKS, WARPS, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, SCALE_WORDS, PTX,
    )  # fmt: skip
    output = block + operand_row(BLOCK_OUT, WARPS)
    column = chunk * 128 + tl.arange(0, BLOCK_CHUNKS * 128)
    inside = (output < num_rows)[:, None] & (column < INPUTS)[None, :]
    weights = (weights.to(tl.float32) * RESTORE).to(out.dtype.element_ty)
    tl.store(out + output.to(tl.int64)[:, None] * INPUTS + column[None, :], weights, mask=inside)
