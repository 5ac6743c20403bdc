"""GEMM with FP8 matrices.

Rows are converted to FP8 too (`rows.py`), and FP8 tensor cores multiply: in a kernel that reads each row of the
matrix once for small batches, in the library's GEMM for large ones, and where it has none in the same kernel, a
stretch of rows at a time. A single row has a kernel of its own (`one_row.py`).

These tensor cores add with fewer bits than float32 has. With a scale for each block the sums of 128 columns are added
in float32. Without, they add all columns, which costs far less accuracy than rounding both factors does.

Cards without FP8 tensor cores widen the matrix instead and multiply in the type of the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from cortex.neuron.kernels.activations import activated
from cortex.neuron.kernels.float8.codes import Float8Codes, widened
from cortex.neuron.kernels.float8.layout import GROUP
from cortex.neuron.kernels.float8.one_row import wide
from cortex.neuron.kernels.float8.rows import ROW_STEP, Float8Rows
from cortex.neuron.kernels.float8.support import capability_of, has_library_product
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, num_processors, tl, triton
from cortex.neuron.kernels.matrix import BARE, Epilogue
from cortex.neuron.kernels.products.small_batch import COUNTED_ROWS, launch_small_batch, split_sum, store_batch
from cortex.neuron.kernels.shared_memory import SharedMemory, shared_memory

MAX_SMALL_ROWS = 64
"""With more rows the library is faster."""
_SCRATCH_BYTES = 32 << 20


class Tiles(NamedTuple):
    """How a small-batch GEMM is cut into programs of COUNTED_ROWS rows of the matrix."""

    inputs: int
    """Columns at a time: those of a block, or more where there are no blocks."""
    stages: int
    split: int
    """Programs that share the columns of one row."""


def small_batch_tiles(
    rows: int,
    outputs: int,
    inputs: int,
    processors: int,
    shared: SharedMemory,
    *,
    is_blocked: bool,
    item_bytes: int = 1,
) -> Tiles:
    """The fastest of a sweep on Hopper, with as many stages as the device's shared memory holds.

    `item_bytes`: the size of a row's elements. If it is more than one, the matrix is widened, through shared memory.
    """
    columns = GROUP if is_blocked or outputs > 4096 or inputs % (2 * GROUP) else 2 * GROUP
    programs, split, steps = -(-outputs // COUNTED_ROWS), 1, inputs // columns
    wanted = processors * 7 // 4 if is_blocked or rows <= 32 else processors * 9 // 10
    while programs * split < wanted and split < 8 and steps // split > 4 and steps % (2 * split) == 0:
        split *= 2
    are_many = split == 1 if is_blocked else programs * split > 2 * processors  # with fewer, two fit with six stages
    stages = 4 if columns > GROUP or (rows > 32 and are_many) else 6
    column_bytes = COUNTED_ROWS + max(16, triton.next_power_of_2(rows)) * item_bytes
    widened_bytes = columns * COUNTED_ROWS * item_bytes if item_bytes > 1 else 0
    while stages > 2 and not shared.holds(stages * columns * column_bytes + widened_bytes):
        stages -= 1
    return Tiles(columns, stages, split)


def float8_product(x: Float8Rows, codes: Float8Codes, epilogue: Epilogue, out: Tensor | None = None) -> Tensor:
    """x Wᵀ with the epilogue, on FP8 tensor cores. An activation takes at most MAX_SMALL_ROWS rows, and a scale for
    each row of the matrix."""
    has_library = codes.outputs % ROW_STEP == 0 and has_library_product(
        codes.layout, codes.inputs, capability_of(codes.codes.device)
    )
    if x.num_rows <= MAX_SMALL_ROWS or not has_library:
        if out is None:
            outputs = codes.outputs if epilogue.activation is None else codes.outputs // 2
            out = torch.empty(x.num_rows, outputs, dtype=x.dtype, device=codes.codes.device)
        for start in range(0, x.num_rows, MAX_SMALL_ROWS):
            rows = slice(start, min(start + MAX_SMALL_ROWS, x.num_rows))
            before = None if epilogue.residual is None else epilogue.residual[rows]
            _small_batch(x.codes[rows], x.scales[:, rows], codes, out[rows], epilogue._replace(residual=before))
        return out
    is_blocked = codes.layout.block > 0
    product = F.scaled_mm(
        x.codes,
        codes.codes.t(),
        x.scales.t(),
        ScalingType.BlockWise1x128 if is_blocked else ScalingType.RowWise,
        codes.scales.t() if is_blocked else codes.scales.view(1, -1),
        ScalingType.BlockWise128x128 if is_blocked else ScalingType.RowWise,
        output_dtype=x.dtype,
        use_fast_accum=not is_blocked,
    )[: x.num_rows]
    return _added(product, epilogue, out)


def widened_product(x: Tensor, codes: Float8Codes, epilogue: Epilogue, out: Tensor | None = None) -> Tensor:
    """x Wᵀ with the epilogue but for an activation, and the matrix widened to the type of x: [rows, inputs]."""
    if not has_kernels(x):
        return _added(F.linear(x.float(), widened(codes)), epilogue, out, x.dtype)
    if len(x) <= MAX_SMALL_ROWS:
        if out is None:
            out = torch.empty(len(x), codes.outputs, dtype=x.dtype, device=x.device)
        _small_batch(x, None, codes, out, epilogue)
        return out
    stretch = max(GROUP, _SCRATCH_BYTES // (2 * codes.inputs) // GROUP * GROUP)
    product = torch.empty(len(x), codes.outputs, dtype=x.dtype, device=x.device)
    for start in range(0, codes.outputs, stretch):
        rows = slice(start, min(start + stretch, codes.outputs))
        torch.mm(x, widened(codes, rows).to(x.dtype).t(), out=product[:, rows])
    return _added(product, epilogue, out)


def float8_product_reference(x: Float8Rows, codes: Float8Codes, epilogue: Epilogue = BARE) -> Tensor:
    """What `float8_product` computes, in float32 and without an activation."""
    bias, residual = epilogue.bias, epilogue.residual
    scales = x.scales.t().repeat_interleave(codes.inputs // len(x.scales), 1)
    y = F.linear((x.codes.float() * scales)[: x.num_rows], widened(codes), None if bias is None else bias.float())
    return y if residual is None else y + residual.float()


def _added(product: Tensor, epilogue: Epilogue, out: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """product + bias + residual"""
    for part in (epilogue.bias, epilogue.residual):
        if part is not None:
            product = product.add_(part)
    return product.to(dtype or product.dtype) if out is None else out.copy_(product)


def _small_batch(x: Tensor, x_scales: Tensor | None, codes: Float8Codes, out: Tensor, epilogue: Epilogue) -> None:
    """x_scales: those of eight-bit rows; None: the rows are of another type, to which the matrix is widened."""
    rows, outputs, inputs = len(x), codes.outputs, codes.inputs
    is_native = x_scales is not None
    processors, shared = num_processors(x.device), shared_memory(x.device)
    is_blocked = codes.layout.block > 0 or not is_native  # what is widened takes registers
    tiles = small_batch_tiles(
        rows, outputs, inputs, processors, shared, is_blocked=is_blocked, item_bytes=x.element_size()
    )
    partial = out
    if tiles.split > 1:
        partial = torch.empty(tiles.split * rows * outputs, dtype=torch.float32, device=x.device)
    launch_small_batch(
        _small_batch_kernel,
        (triton.cdiv(outputs, COUNTED_ROWS), tiles.split),
        (
            x,
            x_scales,
            0 if x_scales is None else x_scales.stride(0),
            codes.codes if is_native else codes.codes.view(torch.uint8),
            codes.scales,
        ),
        epilogue,
        out,
        (partial, codes.counters),
        INPUTS=inputs,
        BLOCK=codes.layout.block,
        NATIVE=is_native,
        ROWS=max(16, triton.next_power_of_2(rows)),
        BLOCK_OUT=COUNTED_ROWS,
        BLOCK_IN=tiles.inputs,
        SPLIT=tiles.split,
        STAGES=tiles.stages,
        num_warps=4,
        num_stages=tiles.stages,
    )


@jit(do_not_specialize=["rows"])
def _small_batch_kernel(
    x,
    x_scales,
    scale_stride,
    weight,
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
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_OUT rows of the matrix and one of SPLIT stretches of its columns, all rows of x.

    The matrix is the left operand: out = (W xᵀ)ᵀ. The program that finishes last adds the parts in a fixed order.
    With an ACTIVATION the matrix has twice `outputs` rows, the gate's first; a program takes as many of either, without
    bias and residual.
    """
    if OVERLAP:
        gdc_launch_dependents()
    block = tl.program_id(0)
    part = tl.program_id(1)
    steps: tl.constexpr = INPUTS // BLOCK_IN
    per_part: tl.constexpr = steps // SPLIT
    matrices: tl.constexpr = 2 if ACTIVATION else 1
    height: tl.constexpr = BLOCK_OUT // matrices
    output = block * height + tl.arange(0, BLOCK_OUT) % height
    output_inside = output < outputs
    if ACTIVATION:
        output += tl.arange(0, BLOCK_OUT) // height * outputs  # the row of the matrix
    line = weight + output.to(tl.int64)[:, None] * INPUTS
    row = tl.arange(0, ROWS)
    row_inside = row < rows
    inside = output_inside[:, None] & row_inside[None, :]
    # What the end of the program needs is loaded at its start: there, nothing would hide the latency.
    if BLOCK == 0:
        output_scale = tl.load(scales + output, mask=output_inside, other=0.0)
    if BIAS:
        output_bias = tl.load(bias + output, mask=output_inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    if BLOCK == 0 and NATIVE:
        row_scale = tl.load(x_scales + row, mask=row_inside, other=0.0)
    if RESIDUAL:
        before = tl.load(residual + row[None, :] * residual_stride + output[:, None], mask=inside, other=0.0)
    column = tl.arange(0, BLOCK_IN)
    total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for step in tl.range(part * per_part, (part + 1) * per_part, num_stages=STAGES):
        here = step * BLOCK_IN + column
        tile = tl.load(line + here[None, :], mask=output_inside[:, None], other=0.0)
        value = tl.load(x + row[None, :] * INPUTS + here[:, None], mask=row_inside[None, :], other=0.0)  # [in, rows]
        factor = tile if NATIVE else wide(tile).to(value.dtype)
        if BLOCK > 0:  # BLOCK_IN columns, with the same scale
            scale = tl.load(scales + (block * BLOCK_OUT // BLOCK) * steps + step)
            if NATIVE:
                scale *= tl.load(x_scales + step * scale_stride + row, mask=row_inside, other=0.0)[None, :]
            total += tl.dot(factor, value) * scale
        else:
            total = tl.dot(factor, value, total)
    is_last = True
    if SPLIT > 1:
        parts = partial + row[None, :] * (outputs * matrices) + output[:, None]
        stride = rows * (outputs * matrices)
        is_last, total = split_sum(total, parts, stride, part, inside, counters + block, SPLIT)
    if is_last:
        if BLOCK == 0:
            total *= output_scale[:, None]
            if NATIVE:
                total *= row_scale[None, :]
        if BIAS:
            total += output_bias[:, None]
        if RESIDUAL:
            total += before.to(tl.float32)
        if ACTIVATION:
            gate, up = tl.split(tl.permute(tl.reshape(total, (2, height, ROWS)), (1, 2, 0)))
            store_batch(
                activated(gate, up, ACTIVATION), bias, residual, out, block * height + tl.arange(0, height), row,
                rows, outputs, out_stride, residual_stride, False, False,
            )  # fmt: skip
        else:
            store_batch(
                total, bias, residual, out, output, row, rows, outputs, out_stride, residual_stride, False, False
            )  # fmt: skip
