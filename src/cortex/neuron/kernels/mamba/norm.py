"""The norm of a Mamba-2 layer's output: over groups of consecutive values, each with weights of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton


def group_norm(x: Tensor, weight: Tensor, size: int, eps: float, dtype: torch.dtype) -> Tensor:
    """x: [tokens, values] float32, contiguous → the same in `dtype`. weight: [values]; `size` divides values"""
    if not has_kernels(x):
        return group_norm_reference(x, weight, size, eps, dtype)
    tokens, values = x.shape
    out = torch.empty((tokens, values), dtype=dtype, device=x.device)
    _group_norm_kernel[(tokens, values // size)](
        x,
        weight,
        out,
        eps,
        VALUES=values,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
        **launch_options(x.device),
    )
    return out


def group_norm_reference(x: Tensor, weight: Tensor, size: int, eps: float, dtype: torch.dtype) -> Tensor:
    normed = F.rms_norm(x.unflatten(-1, (-1, size)), (size,), eps=eps).flatten(1)
    return (normed * weight.float()).to(dtype)


@jit
def _group_norm_kernel(
    x, weight, out, eps, VALUES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """One program per token and group."""
    if OVERLAP:
        gdc_launch_dependents()
    place = tl.arange(0, BLOCK)
    inside = place < SIZE
    column = tl.program_id(1) * SIZE + place
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    where = tl.program_id(0).to(tl.int64) * VALUES + column
    value = tl.load(x + where, mask=inside, other=0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * gain
    tl.store(out + where, value.to(out.dtype.element_ty), mask=inside)
