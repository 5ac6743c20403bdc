"""Products with matrices of eight-bit floating-point numbers.

One row: its numbers stay as they are, those of the matrix are widened and summed in float32; the norm before and the
addition after are part of the pass. More rows become eight-bit numbers too (`rows.py`), and FP8 tensor cores multiply:
in a kernel that reads each row of the matrix once for small batches, in the library's products for large ones, and
where it has none in the same kernel, a stretch of rows at a time.

These tensor cores add with fewer bits than float32 has. With a scale for each block the sums of 128 columns are added
in float32. Without, they add all columns, which costs far less accuracy than rounding both factors does.

Cards without FP8 tensor cores widen the matrix instead and multiply in the type of the rows.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.float8.layout import GROUP, Float8Layout
from cortex.neuron.kernels.float8.matrix import Float8Matrix, widened
from cortex.neuron.kernels.float8.rows import Float8Rows
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
from cortex.neuron.kernels.norm import rms_norm, rms_norm_reference
from cortex.neuron.kernels.quantised.packing import COUNTED_ROWS
from cortex.neuron.kernels.shared_memory import SharedMemory, shared_memory
from cortex.neuron.kernels.silu import silu_mul_reference

MAX_SMALL_ROWS = 64
"""With more rows the library is faster."""
_LIBRARY_GROUPS = 4
"""It reads the scales of this many blocks of columns at a time."""
_CUDA = tuple(map(int, (torch.version.cuda or "0").split(".")))
_SCRATCH_BYTES = 32 << 20


class OneRowTiles(NamedTuple):
    outputs: int
    inputs: int
    warps: int


class Tiles(NamedTuple):
    """How a product with a small batch is cut into programs of COUNTED_ROWS rows of the matrix."""

    inputs: int
    """Columns at a time: those of a block, or more where there are no blocks."""
    stages: int
    split: int
    """Programs that share the columns of one row."""


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_float8_products(device: torch.device) -> bool:
    """Whether the tensor cores of this device multiply FP8: Ada, Hopper and later."""
    return _capability(device) >= (8, 9)


def has_library_product(
    layout: Float8Layout, inputs: int, capability: tuple[int, int], cuda: tuple[int, ...] = _CUDA
) -> bool:
    """Whether torch multiplies such a matrix: with a scale for each block only on Hopper, from CUDA 12.9 on. There it
    gives wrong results, without an error, if a row of scales is not a multiple of `_LIBRARY_GROUPS`."""
    if layout.block:
        return capability[0] == 9 and cuda >= (12, 9) and inputs % (_LIBRARY_GROUPS * layout.block) == 0
    return capability >= (8, 9)


def one_row_tiles(outputs: int, inputs: int) -> OneRowTiles:
    """The fastest of a sweep on Hopper."""
    if inputs > 8192:
        return OneRowTiles(4, 4096, 8)
    columns = min(2048, triton.next_power_of_2(inputs))
    return OneRowTiles(8 if outputs > 4096 else 4, columns, max(1, columns // 512))


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

    `item_bytes`: of a number of the rows. If it is more than one, the matrix is widened, through shared memory.
    """
    columns = GROUP if is_blocked or outputs > 4096 or inputs % (2 * GROUP) else 2 * GROUP
    programs, split, steps = -(-outputs // COUNTED_ROWS), 1, inputs // columns
    wanted = processors * 7 // 4 if is_blocked or rows <= 32 else processors * 9 // 10
    while programs * split < wanted and split < 8 and steps // split > 4 and steps % (2 * split) == 0:
        split *= 2
    stages = 4 if columns > GROUP or (rows > 32 and not (is_blocked and split > 1)) else 6
    column_bytes = COUNTED_ROWS + max(16, triton.next_power_of_2(rows)) * item_bytes
    widened_bytes = columns * COUNTED_ROWS * item_bytes if item_bytes > 1 else 0
    while stages > 2 and not shared.holds(stages * columns * column_bytes + widened_bytes):
        stages -= 1
    return Tiles(columns, stages, split)


def float8_product(x: Float8Rows, matrix: Float8Matrix, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """x Wᵀ + bias + residual on FP8 tensor cores. residual: [rows, outputs], maybe columns of more → [rows, outputs]"""
    has_library = has_library_product(matrix.layout, matrix.inputs, _capability(matrix.device))
    if x.num_rows <= MAX_SMALL_ROWS or not has_library:
        out = torch.empty(x.num_rows, matrix.outputs, dtype=x.dtype, device=matrix.device)
        for start in range(0, x.num_rows, MAX_SMALL_ROWS):
            rows = slice(start, min(start + MAX_SMALL_ROWS, x.num_rows))
            before = None if residual is None else residual[rows]
            _small_batch(x.codes[rows], x.scales[:, rows], matrix, out[rows], bias, before)
        return out
    is_blocked = matrix.layout.block > 0
    product = torch._scaled_mm(
        x.codes,
        matrix.codes.t(),
        scale_a=x.scales.t(),
        scale_b=matrix.scales.t() if is_blocked else matrix.scales.view(1, -1),
        out_dtype=x.dtype,
        use_fast_accum=not is_blocked,
    )[: x.num_rows]
    if bias is not None:
        product.add_(bias)
    return product if residual is None else product.add_(residual)


def widened_product(x: Tensor, matrix: Float8Matrix, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """The same with the matrix widened to the type of x: [rows, inputs]."""
    if not has_kernels(x):
        _add(F.linear(x.float(), widened(matrix)), out, bias, residual)
        return
    if len(x) <= MAX_SMALL_ROWS:
        _small_batch(x, None, matrix, out, bias, residual)
        return
    stretch = max(GROUP, _SCRATCH_BYTES // (2 * matrix.inputs) // GROUP * GROUP)
    product = torch.empty(len(x), matrix.outputs, dtype=x.dtype, device=x.device)
    for start in range(0, matrix.outputs, stretch):
        rows = slice(start, min(start + stretch, matrix.outputs))
        torch.mm(x, widened(matrix, rows).to(x.dtype).t(), out=product[:, rows])
    _add(product, out, bias, residual)


def float8_product_reference(
    x: Float8Rows, matrix: Float8Matrix, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """What `float8_product` computes, in float32."""
    scales = x.scales.t().repeat_interleave(matrix.inputs // len(x.scales), 1)
    y = F.linear((x.codes.float() * scales)[: x.num_rows], widened(matrix), None if bias is None else bias.float())
    return y if residual is None else y + residual.float()


def float8_embedding(matrix: Float8Matrix, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix's rows of these numbers: [n] → [n, inputs]"""
    return widened(matrix, numbers).to(dtype)


def one_row_float8_product(
    x: Tensor,
    matrix: Float8Matrix,
    out: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *,
    gated: bool = False,
) -> None:
    """out = norm(x) Wᵀ + bias + residual, or with `gated` silu(norm(x) Gᵀ) · norm(x) Uᵀ, where W is G above U.

    x: [1, inputs]; out and residual: [1, outputs]
    """
    if norm_weight is not None and norm_weight.dtype != x.dtype:  # zero-centred norms are kept in float32
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    outputs, is_native = out.shape[1], has_float8_products(x.device)
    tiles = one_row_tiles(outputs, matrix.inputs)
    _one_row_kernel[(triton.cdiv(outputs, tiles.outputs // (2 if gated else 1)),)](
        x,
        matrix.codes if is_native else matrix.codes.view(torch.uint8),
        matrix.scales,
        bias,
        norm_weight,
        residual,
        out,
        outputs,
        eps,
        INPUTS=matrix.inputs,
        BLOCK=matrix.layout.block,
        NATIVE=is_native,
        BIAS=bias is not None,
        NORM=norm_weight is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        BLOCK_OUT=tiles.outputs,
        BLOCK_IN=tiles.inputs,
        num_warps=tiles.warps,
        **launch_options(x.device),
    )


def one_row_reference(
    x: Tensor,
    matrix: Float8Matrix,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *,
    gated: bool = False,
) -> Tensor:
    values = x.float() if norm_weight is None else rms_norm_reference(x.float(), norm_weight.float(), eps)
    y = F.linear(values, widened(matrix))
    y = silu_mul_reference(y) if gated else y
    _add(y, y, bias, residual)
    return y.to(x.dtype)


def _add(product: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """out = product + bias + residual"""
    if bias is not None:
        product = product.add_(bias)
    if residual is not None:
        torch.add(product, residual, out=out)
    elif product is not out:
        out.copy_(product)


def _small_batch(
    x: Tensor,
    x_scales: Tensor | None,
    matrix: Float8Matrix,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    """x_scales: those of eight-bit rows; None: the rows are of another type, to which the matrix is widened."""
    rows, outputs, inputs = len(x), matrix.outputs, matrix.inputs
    is_native = x_scales is not None
    processors, shared = num_processors(x.device), shared_memory(x.device)
    is_blocked = matrix.layout.block > 0 or not is_native  # what is widened takes registers
    tiles = small_batch_tiles(
        rows, outputs, inputs, processors, shared, is_blocked=is_blocked, item_bytes=x.element_size()
    )
    partial = out
    if tiles.split > 1:
        partial = torch.empty(tiles.split * rows * outputs, dtype=torch.float32, device=x.device)
    _small_batch_kernel[(triton.cdiv(outputs, COUNTED_ROWS), tiles.split)](
        x,
        x_scales,
        matrix.codes if is_native else matrix.codes.view(torch.uint8),
        matrix.scales,
        bias,
        residual,
        out,
        partial,
        matrix.counters,
        rows,
        0 if x_scales is None else x_scales.stride(0),
        outputs,
        out.stride(0),
        0 if residual is None else residual.stride(0),
        INPUTS=inputs,
        BLOCK=matrix.layout.block,
        NATIVE=is_native,
        ROWS=max(16, triton.next_power_of_2(rows)),
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK_OUT=COUNTED_ROWS,
        BLOCK_IN=tiles.inputs,
        SPLIT=tiles.split,
        STAGES=tiles.stages,
        num_warps=4,
        num_stages=tiles.stages,
        **launch_options(x.device),
    )


@jit
def _wide(codes, NATIVE: tl.constexpr):
    """Float32 numbers of eight-bit ones. Cards that do not know the type get bytes: shifted, their exponent is 2¹²⁰ too
    small."""
    if NATIVE:
        numbers = codes.to(tl.float32)
    else:
        bits = codes.to(tl.int32)
        shifted = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        numbers = shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return numbers


@jit
def _one_row_kernel(
    x,
    weight,
    scales,
    bias,
    norm_weight,
    residual,
    out,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_OUT rows of the matrix. The next tile is loaded while this one is summed.

    A thread sums sixteen columns, which is what it loads at once. GATED: half of the rows are the gate's.
    """
    if OVERLAP:
        gdc_launch_dependents()
    rows: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    line = tl.arange(0, BLOCK_OUT)
    row = tl.program_id(0) * rows + line % rows
    row_inside = row < outputs
    if GATED:
        row += line // rows * outputs
    where = weight + row.to(tl.int64)[:, None] * INPUTS
    column = tl.arange(0, BLOCK_IN)
    inside = row_inside[:, None] & (column < INPUTS)[None, :]
    tile = tl.load(where + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_wait()
    total = tl.zeros((BLOCK_OUT, BLOCK_IN // 16), tl.float32)
    squares = tl.zeros((BLOCK_IN // 16,), tl.float32)
    for start in tl.static_range(0, INPUTS, BLOCK_IN):
        here = start + column
        value = tl.load(x + here, mask=here < INPUTS, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(value * value, (BLOCK_IN // 16, 16)), 1)
            value *= tl.load(norm_weight + here, mask=here < INPUTS, other=0.0).to(tl.float32)
        if start + BLOCK_IN < INPUTS:
            there = here + BLOCK_IN
            inside = row_inside[:, None] & (there < INPUTS)[None, :]
            next_tile = tl.load(where + there[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        sums = tl.sum(tl.reshape(_wide(tile, NATIVE) * value[None, :], (BLOCK_OUT, BLOCK_IN // 16, 16)), 2)
        if BLOCK > 0:
            part = start // 16 + tl.arange(0, BLOCK_IN // 16)
            scale = scales + (row // BLOCK)[:, None] * (INPUTS // BLOCK) + (part // (BLOCK // 16))[None, :]
            sums *= tl.load(scale, mask=row_inside[:, None] & (part * 16 < INPUTS)[None, :], other=0.0)
        total += sums
        if start + BLOCK_IN < INPUTS:
            tile = next_tile
    y = tl.sum(total, 1)
    if BLOCK == 0:
        y *= tl.load(scales + row, mask=row_inside, other=0.0)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, rows)), (1, 0)))
        y = gate * tl.sigmoid(gate) * up
    output = tl.program_id(0) * rows + tl.arange(0, rows)
    output_inside = output < outputs
    if BIAS:
        y += tl.load(bias + output, mask=output_inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + output, mask=output_inside, other=0.0).to(tl.float32)
    tl.store(out + output, y.to(out.dtype.element_ty), mask=output_inside)


@jit(do_not_specialize=["rows"])
def _small_batch_kernel(
    x,
    x_scales,
    weight,
    scales,
    bias,
    residual,
    out,
    partial,
    counters,
    rows,
    scale_stride,
    outputs,
    out_stride,
    residual_stride,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_OUT rows of the matrix and one of SPLIT stretches of its columns, all rows of x.

    The matrix is the left operand: out = (W xᵀ)ᵀ. The program that finishes last adds the parts in a fixed order.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    part = tl.program_id(1)
    steps: tl.constexpr = INPUTS // BLOCK_IN
    per_part: tl.constexpr = steps // SPLIT
    output = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    output_inside = output < outputs
    line = weight + output.to(tl.int64)[:, None] * INPUTS
    row = tl.arange(0, ROWS)
    row_inside = row < rows
    column = tl.arange(0, BLOCK_IN)
    total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for step in tl.range(part * per_part, (part + 1) * per_part, num_stages=STAGES):
        here = step * BLOCK_IN + column
        tile = tl.load(line + here[None, :], mask=output_inside[:, None], other=0.0)
        value = tl.load(x + row[None, :] * INPUTS + here[:, None], mask=row_inside[None, :], other=0.0)  # [in, rows]
        factor = tile if NATIVE else _wide(tile, False).to(value.dtype)
        if BLOCK > 0:  # BLOCK_IN columns, with the same scale
            scale = tl.load(scales + (block * BLOCK_OUT // BLOCK) * steps + step)
            if NATIVE:
                scale *= tl.load(x_scales + step * scale_stride + row, mask=row_inside, other=0.0)[None, :]
            total += tl.dot(factor, value) * scale
        else:
            total = tl.dot(factor, value, total)
    inside = output_inside[:, None] & row_inside[None, :]
    is_last = True
    if SPLIT > 1:
        place = row[None, :] * outputs + output[:, None]
        tl.store(partial + part * rows * outputs + place, total, mask=inside)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
            for other in tl.static_range(SPLIT):
                stretch = partial + other * rows * outputs
                total += tl.load(stretch + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(counters + block, 0)
    if is_last:
        if BLOCK == 0:
            total *= tl.load(scales + output, mask=output_inside, other=0.0)[:, None]
            if NATIVE:
                total *= tl.load(x_scales + row, mask=row_inside, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias + output, mask=output_inside, other=0.0).to(tl.float32)[:, None]
        if RESIDUAL:
            before = residual + row[None, :] * residual_stride + output[:, None]
            total += tl.load(before, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row[None, :] * out_stride + output[:, None], total.to(out.dtype.element_ty), mask=inside)
