"""The norm and gate of every output head of a gated delta net: norm(x) · silu(gate)."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.delta.rules import DeltaRules
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton


def gated_norm(mixed: Tensor, gate: Tensor, rules: DeltaRules, out: Tensor, count: Tensor | None = None) -> None:
    """mixed and out: [tokens, value size], contiguous; gate: the same, each token dense. With a count, [1] int32, the
    tokens from it on become zeros."""
    _gated_norm_kernel[(len(mixed),)](
        mixed,
        gate,
        rules.norm_weight,
        count,
        out,
        rules.eps,
        gate.stride(0),
        HEADS=rules.value_heads,
        HEAD_BLOCK=triton.next_power_of_2(rules.value_heads),
        DIM=rules.value_dim,
        DIM_BLOCK=triton.next_power_of_2(rules.value_dim),
        COUNTED=count is not None,
        num_warps=8,
        **launch_options(mixed.device),
    )


@jit(do_not_specialize_on_alignment=["count"])
def _gated_norm_kernel(
    mixed,
    gate,
    weight,
    count,
    out,
    eps,
    gate_stride,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, HEAD_BLOCK), tl.arange(0, DIM_BLOCK)
    inside = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    where = head[:, None] * DIM + dim[None, :]
    computed = head < (tl.where(token < tl.load(count), HEADS, 0) if COUNTED else HEADS)
    x = tl.load(mixed + token * HEADS * DIM + where, mask=inside & computed[:, None], other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    x *= tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)[None, :]
    g = tl.load(gate + token * gate_stride + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HEADS * DIM + where, (x * g * tl.sigmoid(g)).to(out.dtype.element_ty), mask=inside)
