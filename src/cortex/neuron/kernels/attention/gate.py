"""The gate on attention's output: one launch in place of an activation and a product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton


def gate_heads(heads: Tensor, gate: Tensor, *, softplus: bool) -> Tensor:
    """heads · sigmoid(gate), or heads · softplus(gate). heads: [tokens, heads, dim]; gate: the same or
    [tokens, heads, 1] → [tokens, heads · dim]"""
    if not has_kernels(heads):
        return gate_heads_reference(heads, gate, softplus=softplus)
    tokens, num_heads, dim = heads.shape
    out = torch.empty(tokens, num_heads * dim, dtype=heads.dtype, device=heads.device)
    _gate_kernel[(tokens, triton.cdiv(num_heads * dim, 1024))](
        heads.contiguous(),
        gate,
        out,
        gate.stride(0),
        gate.stride(1),
        gate.stride(2) if gate.shape[2] == dim else 0,
        WIDTH=num_heads * dim,
        DIM=dim,
        SOFTPLUS=softplus,
        BLOCK=1024,
        num_warps=4,
        **launch_options(heads.device),
    )
    return out


def gate_heads_reference(heads: Tensor, gate: Tensor, *, softplus: bool) -> Tensor:
    return (heads * (F.softplus(gate) if softplus else torch.sigmoid(gate))).flatten(1)


@jit
def _gate_kernel(
    heads,
    gate,
    out,
    token_stride,
    head_stride,
    dim_stride,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(heads + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    where = token * token_stride + column // DIM * head_stride + column % DIM * dim_stride
    x = tl.load(gate + where, mask=inside, other=0.0).to(tl.float32)
    factor = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x))) if SOFTPLUS else tl.sigmoid(x)
    tl.store(out + token * WIDTH + column, (value * factor).to(out.dtype.element_ty), mask=inside)
