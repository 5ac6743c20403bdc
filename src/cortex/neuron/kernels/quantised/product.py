"""Products with packed matrices.

At most eight rows, and more than four bits: `few_rows.py`.

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
from cortex.neuron.kernels.quantised.layout import Q4, Layout
from cortex.neuron.kernels.quantised.packing import COUNTED_ROWS, PackedMatrix, unpacked
from cortex.neuron.kernels.quantised.unpack import (
    RESTORE,
    add_product,
    layout_options,
    operand,
    operand_row,
    restored,
)
from cortex.neuron.kernels.shared_memory import MIN_STAGES, SharedMemory, shared_memory

MAX_SMALL_ROWS = 64
"""With more rows the library is faster, by measurements."""
_SCRATCH_BYTES = 112 << 20
"""Most matrices at once: few launches are worth more than a buffer that stays in the L2 cache."""


class PackedTiles(NamedTuple):
    """How a product is cut into programs."""

    outputs: int
    chunks: int
    """Of 128 columns, at a time."""
    warps: int
    stages: int
    split: int
    """Programs that share the columns of one row."""


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
    partial = out
    if tiles.split > 1:
        partial = torch.empty(tiles.split * rows * matrix.outputs, dtype=torch.float32, device=x.device)
    _small_batch_kernel[(triton.cdiv(matrix.outputs, tiles.outputs), tiles.split)](
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
        ROWS=max(16, triton.next_power_of_2(rows)),
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
        **layout_options(matrix.layout),
        **launch_options(x.device),
    )


def small_batch_tiles(
    rows: int, chunks: int, outputs: int, layout: Layout, processors: int, shared: SharedMemory
) -> PackedTiles:
    """The fastest of a sweep on Hopper, with as many stages as the device's shared memory holds.

    The columns are cut until there are enough programs, and there are few enough stages that all of them run at once.
    """
    columns = max(16, triton.next_power_of_2(rows))
    lines = _line_tiles(columns, chunks, outputs, processors, shared) if layout == Q4 else None
    if lines is not None:
        return lines
    is_long = outputs > 8 * COUNTED_ROWS * processors  # as an output head
    matrix_rows = 2 * COUNTED_ROWS if is_long else COUNTED_ROWS
    warps = 8 if is_long and rows > 32 else 4
    programs, split = -(-outputs // matrix_rows), 1
    while split < 8 and chunks % (2 * split) == 0 and chunks // split > (8 if rows > 32 else 4):
        if programs * split >= _programs_wanted(rows, layout.bits, split) * processors:
            break
        split *= 2
    planes = 1 + (layout.low_bits == 8 or layout.high_bits > 0) + layout.scale_words
    registers = 72 + 41 * max(0, columns - 16) // 48  # of a thread: 72 with 16 columns, 113 with 64
    stages = fitting_stages(matrix_rows, columns, 5 if layout.bits < 8 else 4, shared)
    while stages > MIN_STAGES:
        program_bytes = (stages - 1) * planes * matrix_rows * 64 + stages * columns * 256
        at_once = min(shared.num_bytes // program_bytes, 65536 // (registers * 32 * warps))
        if programs * split <= at_once * processors:
            break
        stages -= 1
    return PackedTiles(matrix_rows, 1, warps, stages, split)


def _line_tiles(columns: int, chunks: int, outputs: int, processors: int, shared: SharedMemory) -> PackedTiles | None:
    """Tiles of two chunks, which in four bits are a whole line of the cache; None: one at a time is faster.

    That takes so much memory that all programs have to run at once, and they have to be many. Long parts of many rows
    are as fast with one chunk, because more stages fit.
    """

    def at_once(stages: int) -> int:
        program_bytes = (stages - 1) * COUNTED_ROWS * (128 + 32) + stages * columns * 512 + 1024
        registers = 76 + 38 * columns // 16  # of a thread
        return min(shared.num_bytes // program_bytes, 65536 // (registers * 128)) * processors

    programs, split = -(-outputs // COUNTED_ROWS), 1
    while split < 8 and chunks % (4 * split) == 0 and chunks // split > 4 and 2 * programs * split <= at_once(3):
        split *= 2
    fills = programs * split <= at_once(3) <= 3 * programs * split
    if shared.copies == 1 or chunks % 2 != 0 or not fills or (columns > 32 and chunks > 64):
        return None
    stages = 4 if columns <= 32 and programs * split <= at_once(4) else 3
    return PackedTiles(COUNTED_ROWS, 2, 4, stages, split)


def _programs_wanted(rows: int, bits: int, split: int) -> float:
    """For each processor, where the columns are cut `split` times: the parts of many rows are long to add."""
    if rows > 32:
        return 4 / 3
    if split == 1:
        return 4 if bits < 8 else 2.5
    return 3 if split == 2 or (rows <= 16 and bits < 8) else 2


def fitting_stages(matrix_rows: int, columns: int, stages: int, shared: SharedMemory) -> int:
    """How many chunks may be on their way at once: the words of `matrix_rows` rows and `columns` columns of x each.

    Before Hopper the unpacked weights may take the way through shared memory after all.
    """
    chunk_bytes = matrix_rows * 16 * (4 + 4 + 4 + 4) + triton.next_power_of_2(columns) * 128 * 2
    unpacked_bytes = matrix_rows * 128 * 2 if shared.copies == 1 else 0
    while stages > 2 and not shared.holds(chunk_bytes * (stages - 2 + shared.copies) + unpacked_bytes):
        stages -= 1
    return stages


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
    output, loaded = _tile_rows(block, tl.arange(0, BLOCK_OUT), outputs, BLOCK_OUT, GATED)
    loaded = tl.where(output < outputs, loaded, 0).to(tl.int64)
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
    output, matrix_row = _tile_rows(block, operand_row(BLOCK_OUT, WARPS), outputs, BLOCK_OUT, GATED)
    inside = (output < outputs)[:, None] & row_inside[None, :]
    is_last = True
    if SPLIT > 1:
        matrix_rows = 2 * outputs if GATED else outputs
        place = row[None, :] * matrix_rows + matrix_row[:, None]
        tl.store(partial + part * rows * matrix_rows + place, total, mask=inside)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
            for other in tl.static_range(SPLIT):
                stretch = partial + other * rows * matrix_rows
                total += tl.load(stretch + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(counters + block, 0)
    if is_last:
        if GATED:
            half: tl.constexpr = BLOCK_OUT // 2
            halves = tl.reshape(total, (WARPS, 2, half // WARPS, ROWS))
            gate, up = tl.split(tl.permute(halves, (0, 2, 3, 1)))
            result = tl.reshape(gate * tl.sigmoid(gate) * up, (half, ROWS))
            target = block * half + operand_row(half, WARPS)
        else:
            result, target = total, output
        there = (target < outputs)[:, None] & row_inside[None, :]
        if BIAS:
            result += tl.load(bias + target, mask=target < outputs, other=0.0).to(tl.float32)[:, None]
        if RESIDUAL:
            before = residual + row[None, :] * residual_stride + target[:, None]
            result += tl.load(before, mask=there, other=0.0).to(tl.float32)
        tl.store(out + row[None, :] * out_stride + target[:, None], result.to(out.dtype.element_ty), mask=there)


@jit
def _tile_rows(block, number, outputs, BLOCK_OUT: tl.constexpr, GATED: tl.constexpr):
    """The output and the row of the matrix that belong to each of these rows of a program's tile."""
    if GATED:
        output = block * (BLOCK_OUT // 2) + number % (BLOCK_OUT // 2)
        return output, output + number // (BLOCK_OUT // 2) * outputs
    output = block * BLOCK_OUT + number
    return output, output


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
