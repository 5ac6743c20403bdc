"""Normalisation over the last dimension: by the root mean square, or to mean 0 and variance 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton

MAX_SMALL_ELEMENTS = 1 << 14
"""Up to this size, a CPU spends more time on launching operations than on the elements."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """x: [..., size], any strides, last dimension contiguous → same shape, contiguous.

    The result is added to `residual`, which is contiguous and of the same shape, and the sum multiplied by `factor`,
    which has one element.
    """
    if not has_kernels(x):
        normed = (rms_norm_small if x.numel() <= MAX_SMALL_ELEMENTS else rms_norm_reference)(x, weight, eps)
        added = normed if residual is None else normed.add_(residual)
        return added if factor is None else added.mul_(factor)
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(len(rows),)](
        rows,
        weight,
        residual,
        factor,
        out,
        rows.stride(0),
        size,
        eps,
        BLOCK=block,
        ADD=residual is not None,
        MULTIPLY=factor is not None,
        num_warps=max(1, min(8, block // 512)),
        **launch_options(x.device),
    )
    return out.view(x.shape)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes in float32. Uses few operations: on a CPU, each operation has a high fixed cost."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps))
    return (x * scale).mul_(weight).to(x.dtype)


def rms_norm_small(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """For small inputs on a CPU: one layer norm replaces five operations. The mean of [x, -x] is zero."""
    if len(x) == 1 and x.dim() == 2 and x.dtype == torch.float32:  # a decode step of one row: no views, no conversions
        mirrored = x * _SIGNS
        return torch.layer_norm(mirrored, mirrored.shape, None, None, eps).narrow(0, 0, 1) * weight
    mirrored = x.float()[..., None, :] * _SIGNS  # float32, so that only the result is rounded
    normed = F.layer_norm(mirrored, mirrored.shape[-2:], eps=eps).select(-2, 0)
    return (normed * weight).to(x.dtype)


_SIGNS = torch.tensor([[1.0], [-1.0]])


@jit
def _rms_norm_kernel(
    x,
    weight,
    residual,
    factor,
    out,
    stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    MULTIPLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    normed = values * scale * gain
    if ADD:
        normed += tl.load(residual + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if MULTIPLY:
        normed *= tl.load(factor).to(tl.float32)
    tl.store(out + row * size + column, normed.to(out.dtype.element_ty), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x: [..., size], contiguous → the same shape"""
    if not has_kernels(x):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    size = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _layer_norm_kernel[(x.numel() // size,)](
        x,
        weight,
        bias,
        out,
        size,
        eps,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        num_warps=max(1, min(8, block // 512)),
        **launch_options(x.device),
    )
    return out


@jit
def _layer_norm_kernel(
    x,
    weight,
    bias,
    out,
    size,
    eps,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    values = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, 0) / size, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / size + eps) * gain
    if HAS_BIAS:
        normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, normed.to(out.dtype.element_ty), mask=inside)
