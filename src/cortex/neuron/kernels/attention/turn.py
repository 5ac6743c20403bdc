"""Rotates heads in place by cosines and sines that each token has of its own, in one pass."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.attention.rotate import Rotation
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton


def turn_(x: Tensor, rotation: Rotation) -> Tensor:
    """In place. x: [tokens, parts, heads, dim], strided, each part dense → the same tensor, all heads rotated."""
    if not has_kernels(x):
        return turn_reference_(x, rotation)
    tokens, parts, heads, dim = x.shape
    _turn_kernel[(tokens, parts)](
        x,
        rotation.cosines,
        rotation.sines,
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        DIM=dim,
        HEAD_BLOCK=triton.next_power_of_2(heads),
        DIM_BLOCK=triton.next_power_of_2(dim),
        num_warps=4,
        **launch_options(x.device),
    )
    return x


def turn_reference_(x: Tensor, rotation: Rotation) -> Tensor:
    return x.copy_(rotation(x.flatten(1, 2)).view(x.shape))


@jit
def _turn_kernel(
    x,
    cosines,
    sines,
    token_stride,
    part_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token and part. Reads all of it before it writes: partners lie half a head apart."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, DIM_BLOCK)
    head = tl.arange(0, HEAD_BLOCK)
    partner = tl.where(dim < DIM // 2, dim + DIM // 2, dim - DIM // 2)
    inside = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    line = x + token * token_stride + tl.program_id(1) * part_stride + head[:, None] * DIM
    value = tl.load(line + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(line + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + token * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    sine = tl.load(sines + token * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    tl.debug_barrier()
    turned = value * cosine[None, :] + other * sine[None, :]
    tl.store(line + dim[None, :], turned.to(x.dtype.element_ty), mask=inside)
