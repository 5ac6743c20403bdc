"""GEMM with packed matrices.

GEMV: `one_row.py`. Small batches of at most eight rows, and more than four bits: `few_rows.py`.

Small batches: one program reads BLOCK_OUT rows of the matrix once, unpacks them in registers into the left operand of a
tensor-core product, and multiplies all rows of x. Matrices with few rows are cut along their columns as well (SPLIT),
so that every processor has work: the program that finishes last adds the parts in a fixed order.

Large batches: the matrix, or a stretch of a large one, is unpacked into a scratch buffer, and the library multiplies
with that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activated
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, num_processors, tl, triton
from cortex.neuron.kernels.matrix import BARE, Epilogue
from cortex.neuron.kernels.products.small_batch import COUNTED_ROWS, launch_small_batch, split_sum, store_batch
from cortex.neuron.kernels.quantised.codes import PackedCodes, unpacked
from cortex.neuron.kernels.quantised.layout import CHUNK, Layout
from cortex.neuron.kernels.quantised.unpack import (
    RESTORE,
    add_product,
    layout_options,
    operand,
    operand_row,
    restored,
)
from cortex.neuron.kernels.shared_memory import MIN_STAGES, SharedMemory, shared_memory

_RESERVED_BYTES = 1 << 10
"""Shared memory that a device takes for each program."""
_MAX_WARPS = 16
"""On a processor: with more of them a thread has too few registers."""


class PackedTiles(NamedTuple):
    """How a GEMM is cut into programs."""

    outputs: int
    chunks: int
    """Chunks of 128 columns, at a time."""
    warps: int
    stages: int
    split: int
    """Programs that share the columns of one row."""
    registers: int
    """The most registers of a thread: as many programs run on a processor as its shared memory holds."""


def small_batch_tiles(
    rows: int, chunks: int, outputs: int, layout: Layout, processors: int, shared: SharedMemory
) -> PackedTiles:
    """The fastest of a sweep on Hopper.

    Two chunks of a row are at least a line of the cache in four bits and more. With many rows they take so much shared
    memory that a processor runs one program: they are read one at a time where programs are more than that, or few and
    long because single chunks can be split further.
    """
    columns = product_columns(rows)

    def tiles(matrix_rows: int, tile_chunks: int, warps: int) -> PackedTiles:
        programs, split = -(-outputs // matrix_rows), 1

        def at_once(stages: int) -> int:
            num_bytes = program_bytes(matrix_rows, columns, tile_chunks, stages, layout, shared) + _RESERVED_BYTES
            return max(1, min(_MAX_WARPS // warps, shared.num_bytes // num_bytes))

        while split < 8 and chunks % (2 * split * tile_chunks) == 0 and chunks // split > 4:
            if 2 * split * programs > at_once(MIN_STAGES) * processors:
                break
            split *= 2
        stages = max(MIN_STAGES, 6 - matrix_rows * tile_chunks // COUNTED_ROWS)  # the larger, the fewer
        stages = fitting_stages(matrix_rows, columns, tile_chunks, stages, layout, shared)
        while stages > MIN_STAGES and programs * split > at_once(stages) * processors:
            stages -= 1
        registers = min(255, 65536 // (32 * warps * at_once(stages)) // 8 * 8) if shared.copies > 1 else 255
        return PackedTiles(matrix_rows, tile_chunks, warps, stages, split, registers)

    if shared.copies == 1 or chunks % 2 != 0:
        return tiles(COUNTED_ROWS, 1, 4)
    is_long = outputs > 8 * COUNTED_ROWS * processors  # as an output head
    if is_long and 16 < columns <= (64 if layout.bits == 8 else 32):
        return tiles(2 * COUNTED_ROWS, 2, 8)
    lines = tiles(2 * COUNTED_ROWS, 2, 8) if columns > 32 and chunks > 64 else tiles(COUNTED_ROWS, 2, 4)
    programs = -(-outputs // lines.outputs) * lines.split
    few_long = 3 * programs < 2 * processors and chunks // lines.split > 32
    if (columns > 16 and few_long) or (columns > 32 and programs > processors):
        return tiles(COUNTED_ROWS, 1, 4)
    return lines


def product_columns(rows: int) -> int:
    """Columns of the tensor-core product for this many rows of x."""
    return max(16, 1 << (rows - 1).bit_length())


def fitting_stages(
    matrix_rows: int, columns: int, chunks: int, stages: int, layout: Layout, shared: SharedMemory
) -> int:
    """At most `stages`, as the device's shared memory holds."""
    while stages > 2 and not shared.holds(program_bytes(matrix_rows, columns, chunks, stages, layout, shared)):
        stages -= 1
    return stages


def program_bytes(
    matrix_rows: int, columns: int, chunks: int, stages: int, layout: Layout, shared: SharedMemory
) -> int:
    """Shared memory of a loop over `chunks` chunks at a time: the words of `matrix_rows` rows and `columns` columns of
    x, once for each step that is on its way.

    Before Hopper the unpacked weights may take the way through shared memory after all.
    """
    x_bytes = columns * chunks * CHUNK * 2
    unpacked_bytes = matrix_rows * chunks * CHUNK * 2 if shared.copies == 1 else 0
    return (
        (stages - 1) * matrix_rows * layout.num_bytes(1, chunks * CHUNK)
        + (stages - 2 + shared.copies) * x_bytes
        + unpacked_bytes
    )


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
