"""How small-batch GEMMs are launched, add the parts of their sums, and end. The matrix is the left operand of a
tensor-core product: out = (W xᵀ)ᵀ. The loops are those of the storages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cortex.neuron.kernels.activations import activation_number
from cortex.neuron.kernels.jit import jit, launch_options, tl
from cortex.neuron.kernels.matrix import Epilogue

COUNTED_ROWS = 64
"""The fewest rows that a program of a split GEMM takes: each block of them has a counter."""


def launch_small_batch(
    kernel: Any,
    grid: tuple[int, ...],
    operands: tuple[Tensor | int | None, ...],
    epilogue: Epilogue,
    out: Tensor,
    scratch: tuple[Tensor, ...] = (),
    **constants: Any,
) -> None:
    """`operands`: x and what holds the matrix. `scratch`: for the parts of split sums, and their counters."""
    residual = epilogue.residual
    kernel[grid](
        *operands,
        epilogue.bias,
        residual,
        out,
        *scratch,
        len(out),
        out.shape[1],
        out.stride(0),
        0 if residual is None else residual.stride(0),
        BIAS=epilogue.bias is not None,
        RESIDUAL=residual is not None,
        ACTIVATION=activation_number(epilogue.activation),
        **constants,
        **launch_options(out.device),
    )


@jit
def split_sum(total, parts, stride, part, inside, counter, SPLIT: tl.constexpr):
    """Stores this program's part of a sum. → (whether all parts are done, and then their sum in a fixed order)

    parts: where the first part of each element is, the others `stride` apart. inside: which elements exist; None: all.
    """
    tl.store(parts + part * stride, total, mask=inside)
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        total = tl.zeros_like(total)
        for other in tl.static_range(SPLIT):
            total += tl.load(parts + other * stride, mask=inside, cache_modifier=".cg")
        tl.store(counter, 0)
    return is_last, total


@jit
def store_batch(
    total,
    bias,
    residual,
    out,
    output,
    row,
    rows,
    outputs,
    out_stride,
    residual_stride,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Adds what comes after the product and stores it. total: [BLOCK_OUT, ROWS]"""
    inside = (output < outputs)[:, None] & (row < rows)[None, :]
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL:
        before = residual + row[None, :] * residual_stride + output[:, None]
        total += tl.load(before, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row[None, :] * out_stride + output[:, None], total.to(out.dtype.element_ty), mask=inside)
