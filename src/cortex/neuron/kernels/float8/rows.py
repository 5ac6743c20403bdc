"""Rows of a batch in eight-bit floating point: what FP8 tensor cores multiply a matrix with.

A row has one scale for each 128 columns, or one for all of them, as the product needs it. The norm of the rows, or the
activation between the two halves of a feed-forward block, is part of the same pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import activated, activation_number
from cortex.neuron.kernels.float8.codes import FLOAT8, LARGEST, SMALLEST_SCALE
from cortex.neuron.kernels.float8.layout import GROUP
from cortex.neuron.kernels.jit import constant, gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.matrix import PLAIN, Prologue

ROW_STEP = 16
"""Memory is for a multiple of this many rows, as the library's GEMMs want it."""
_LARGEST = constant(LARGEST)
_SMALLEST_SCALE = constant(SMALLEST_SCALE)
_GROUP = constant(GROUP)


@dataclass(frozen=True, slots=True)
class Float8Rows:
    codes: Tensor
    """[rows up to a multiple of ROW_STEP, inputs] float8; what is beyond `num_rows` is undefined"""
    scales: Tensor
    """[groups of columns or 1, the same rows] float32"""
    num_rows: int
    dtype: torch.dtype
    """The dtype of the values before."""


def float8_rows(x: Tensor, prologue: Prologue = PLAIN, *, grouped: bool) -> Float8Rows:
    """prologue(x). x: [rows, inputs or 2 · inputs], rows contiguous"""
    rows, inputs = len(x), x.shape[1] // (1 if prologue.activation is None else 2)
    capacity = -(-rows // ROW_STEP) * ROW_STEP
    codes = torch.empty(capacity, inputs, dtype=FLOAT8, device=x.device)
    scales = torch.empty(inputs // GROUP if grouped else 1, capacity, device=x.device)
    whole = prologue.norm is not None or not grouped
    block = triton.next_power_of_2(inputs) if whole else 8 * GROUP
    _rows_kernel[(rows, 1 if whole else triton.cdiv(inputs, block))](
        x,
        prologue.norm,
        codes,
        scales,
        x.stride(0),
        capacity,
        prologue.eps,
        INPUTS=inputs,
        BLOCK=block,
        GROUPED=grouped,
        NORM=prologue.norm is not None,
        ACTIVATION=activation_number(prologue.activation),
        num_warps=max(1, min(16, block // 512)),
        **launch_options(x.device),
    )
    return Float8Rows(codes, scales, rows, x.dtype)


def float8_rows_reference(x: Tensor, *, grouped: bool) -> Float8Rows:
    groups = x.float().view(len(x), -1, GROUP if grouped else x.shape[1])
    scales = (groups.abs().amax(-1) / LARGEST).clamp_min_(SMALLEST_SCALE)
    return Float8Rows((groups / scales[..., None]).view_as(x).to(FLOAT8), scales.t().contiguous(), len(x), x.dtype)


@jit
def _rows_kernel(
    x,
    norm_weight,
    codes,
    scales,
    stride,
    capacity,
    eps,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row, or per row and BLOCK columns where groups stand alone."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INPUTS
    if NORM:
        gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION:
        up = tl.load(x + row * stride + INPUTS + column, mask=inside, other=0.0).to(tl.float32)
        values = activated(values, up, ACTIVATION)
    if NORM:
        factor = tl.rsqrt(tl.sum(values * values, 0) / INPUTS + eps)
        values *= factor * gain
    if GROUPED:
        groups: tl.constexpr = BLOCK // _GROUP
        values = tl.reshape(values, (groups, _GROUP))
        scale = tl.maximum(tl.max(tl.abs(values), 1) / _LARGEST, _SMALLEST_SCALE)
        values = tl.reshape(values / scale[:, None], (BLOCK,))
        group = tl.program_id(1) * groups + tl.arange(0, groups)
        tl.store(scales + group * capacity + row, scale, mask=group * _GROUP < INPUTS)
    else:
        scale = tl.maximum(tl.max(tl.abs(values), 0) / _LARGEST, _SMALLEST_SCALE)
        values /= scale
        tl.store(scales + row, scale)
    tl.store(codes + row * INPUTS + column, values.to(codes.dtype.element_ty), mask=inside)
