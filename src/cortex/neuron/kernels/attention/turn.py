"""Rotates heads by cosines and sines that each token has of its own, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.rotate import Rotation
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton

HEADS_AT_ONCE = 16


def turned(x: Tensor, rotation: Rotation) -> Tensor:
    """x: [tokens, heads, dim], strided, each head dense → the same, all heads rotated, dense."""
    tokens, heads, dim = x.shape
    if not has_kernels(x) or rotation.cosines.shape[-1] != dim or x.stride(-1) != 1:
        return rotation(x)
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    block = min(HEADS_AT_ONCE, triton.next_power_of_2(heads))
    _turn_kernel[(tokens, triton.cdiv(heads, block))](
        x,
        out,
        rotation.cosines,
        rotation.sines,
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        DIM=dim,
        HEAD_BLOCK=block,
        DIM_BLOCK=triton.next_power_of_2(dim),
        num_warps=4,
        **launch_options(x.device),
    )
    return out


@jit
def _turn_kernel(
    x,
    out,
    cosines,
    sines,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token and HEAD_BLOCK heads."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIM_BLOCK)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    partner = tl.where(dim < DIM // 2, dim + DIM // 2, dim - DIM // 2)
    inside = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    line = x + token * token_stride + head[:, None] * head_stride
    value = tl.load(line + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(line + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + token * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    sine = tl.load(sines + token * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    result = value * cosine[None, :] + other * sine[None, :]
    where = (token * HEADS + head[:, None]) * DIM + dim[None, :]
    tl.store(out + where, result.to(out.dtype.element_ty), mask=inside)
