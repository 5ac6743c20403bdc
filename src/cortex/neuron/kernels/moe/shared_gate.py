"""How the result of a shared expert that is a block of its own is added: times the sigmoid of a score of its token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton
from cortex.neuron.kernels.norm import rms_norm_reference


def add_gated(part: Tensor, hidden: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, residual: Tensor) -> Tensor:
    """residual + sigmoid(norm(hidden) gateᵀ) · part. gate: [1, hidden]; the others: [tokens, hidden], contiguous"""
    if not has_kernels(part):
        return add_gated_reference(part, hidden, norm_weight, eps, gate, residual)
    (tokens, size), out = hidden.shape, torch.empty_like(residual)
    _add_gated_kernel[(tokens,)](
        part,
        hidden,
        norm_weight,
        gate,
        residual,
        out,
        eps,
        HIDDEN=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8,
        **launch_options(hidden.device),
    )
    return out


def add_gated_reference(
    part: Tensor, hidden: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, residual: Tensor
) -> Tensor:
    return residual + part * torch.sigmoid(F.linear(rms_norm_reference(hidden, norm_weight, eps), gate))


@jit
def _add_gated_kernel(
    part,
    hidden,
    norm_weight,
    gate,
    residual,
    out,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token."""
    if OVERLAP:
        gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    gain *= tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    where = tl.program_id(0).to(tl.int64) * HIDDEN + column
    x = tl.load(hidden + where, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(part + where, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    score = tl.sum(x * gain, 0) * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    tl.store(out + where, (total + y * tl.sigmoid(score)).to(out.dtype.element_ty), mask=inside)
