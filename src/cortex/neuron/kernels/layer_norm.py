"""Normalisation to mean 0 and variance 1 over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton


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
