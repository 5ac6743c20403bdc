"""The experts of small batches: each pair is a GEMV with the expert's matrices.

Bound by the bytes of the selected matrices, so the norm, the gate, the sum over experts and the residual are fused in.
Two rows with the same expert run side by side and share its bytes through the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activate_reference, activated, activation_number
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.matrix import Prologue
from cortex.neuron.kernels.moe.pairs import ExpertChoice
from cortex.neuron.kernels.norm import rms_norm_reference

TILE_ELEMENTS = 16_384
"""Matrix elements that one program of the second GEMV loads at once."""


def expand_rows(
    hidden: Tensor,
    gate_up: Tensor,
    choice: ExpertChoice,
    norm: Prologue,
    activation: str | None,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """activation(norm(x) Gᵀ) · norm(x) Uᵀ by each row's experts; norm(x) Uᵀ of experts without a gate.

    hidden: [rows, hidden]; gate_up: [experts · (gate and up or up) · inner, hidden]; out: [pairs, inner]
    """
    (num_pairs, inner), size = out.shape, hidden.shape[1]
    block_out = 2
    _expand_kernel[(num_pairs, triton.cdiv(inner, block_out))](
        hidden,
        norm.norm,
        gate_up,
        bias,
        choice.experts,
        out,
        norm.eps,
        HIDDEN=size,
        INNER=inner,
        SLOTS=choice.experts.shape[1],
        ACTIVATION=activation_number(activation),
        BIAS=bias is not None,
        BLOCK_IN=min(2048, triton.next_power_of_2(size)),
        BLOCK_OUT=block_out,
        num_warps=4,
        **launch_options(hidden.device),
    )


def expand_rows_reference(
    hidden: Tensor,
    gate_up: Tensor,
    choice: ExpertChoice,
    norm: Prologue,
    activation: str,
    num_experts: int,
    bias: Tensor | None = None,
) -> Tensor:
    """→ [pairs, inner]"""
    assert norm.norm is not None
    x, experts = rms_norm_reference(hidden, norm.norm, norm.eps), gate_up.chunk(num_experts)
    pairs = [F.linear(row, experts[expert]) for row, chosen in zip(x, choice.experts, strict=True) for expert in chosen]
    y = torch.stack(pairs)
    if bias is not None:
        y += bias.view(num_experts, -1)[choice.experts.flatten().long()]
    return activate_reference(y, activation)


def contract_rows(
    inner: Tensor, down: Tensor, choice: ExpertChoice, residual: Tensor, bias: Tensor | None = None
) -> Tensor:
    """residual + Σ weight · inner Dᵀ over each row's experts.

    inner: [pairs, inner]; down: [experts · hidden, inner] → [rows, hidden]
    """
    (rows, hidden), size, slots = residual.shape, inner.shape[1], choice.experts.shape[1]
    out = torch.empty((rows, hidden), dtype=residual.dtype, device=residual.device)
    slots_block = triton.next_power_of_2(slots)
    block_out = 2
    _contract_kernel[(rows, triton.cdiv(hidden, block_out))](
        inner,
        down,
        bias,
        choice.experts,
        choice.weights,
        residual,
        out,
        HIDDEN=hidden,
        INNER=size,
        SLOTS=slots,
        SLOTS_BLOCK=slots_block,
        BIAS=bias is not None,
        BLOCK_IN=min(triton.next_power_of_2(size), TILE_ELEMENTS // (block_out * slots_block)),
        BLOCK_OUT=block_out,
        num_warps=8,
        **launch_options(residual.device),
    )
    return out


def contract_rows_reference(
    inner: Tensor, down: Tensor, choice: ExpertChoice, residual: Tensor, bias: Tensor | None = None
) -> Tensor:
    experts = down.unflatten(0, (-1, residual.shape[1]))[choice.experts.long()]  # [rows, slots, hidden, inner]
    by_slot = inner.view(*choice.experts.shape, -1)
    parts = torch.einsum("rshi,rsi->rsh", experts, by_slot)
    if bias is not None:
        parts += bias.view(-1, residual.shape[1])[choice.experts.long()]
    return residual + torch.einsum("rs,rsh->rh", choice.weights.to(inner.dtype), parts)


@jit
def _expand_kernel(
    x,
    norm_weight,
    gate_up,
    bias,
    chosen,
    out,
    eps,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SLOTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per pair and BLOCK_OUT of its expert's inner rows."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0)
    expert = tl.load(chosen + pair).to(tl.int64)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    output_inside = output < INNER
    MATRICES: tl.constexpr = 2 if ACTIVATION else 1
    line = gate_up + expert * (MATRICES * INNER * HIDDEN) + output[:, None] * HIDDEN
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    squares = tl.zeros((BLOCK_IN,), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        inside = output_inside[:, None] & (column < HIDDEN)[None, :]
        tile = tl.load(line + column[None, :], mask=inside, other=0.0)
        value = tl.load(x + pair // SLOTS * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        squares += value * value
        value *= tl.load(norm_weight + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * value[None, :]
        if ACTIVATION:
            tile_up = tl.load(line + INNER * HIDDEN + column[None, :], mask=inside, other=0.0)
            total_up += tile_up.to(tl.float32) * value[None, :]
    scale = tl.rsqrt(tl.sum(squares, 0) / HIDDEN + eps)
    y, up = tl.sum(total, 1) * scale, tl.sum(total_up, 1) * scale
    if BIAS:
        own = bias + expert * (MATRICES * INNER) + output
        y += tl.load(own, mask=output_inside, other=0.0).to(tl.float32)
        if ACTIVATION:
            up += tl.load(own + INNER, mask=output_inside, other=0.0).to(tl.float32)
    if ACTIVATION:
        y = activated(y, up, ACTIVATION)
    tl.store(out + pair * INNER + output, y.to(out.dtype.element_ty), mask=output_inside)


@jit
def _contract_kernel(
    inner,
    down,
    bias,
    chosen,
    weights,
    residual,
    out,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and BLOCK_OUT outputs, for all experts of the row: the sum has a fixed order."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    output_inside = output < HIDDEN
    slot = tl.arange(0, SLOTS_BLOCK)
    slot_inside = slot < SLOTS
    pair = row * SLOTS + slot
    expert = tl.load(chosen + pair, mask=slot_inside, other=0).to(tl.int64)
    weight = tl.load(weights + pair, mask=slot_inside, other=0.0)
    line = down + expert[None, :] * (HIDDEN * INNER) + output[:, None] * INNER  # [out, slots]
    line_inside = output_inside[:, None] & slot_inside[None, :]
    total = tl.zeros((BLOCK_OUT, SLOTS_BLOCK, BLOCK_IN), tl.float32)
    for start in tl.static_range(0, INNER, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        column_inside = column < INNER
        inside = line_inside[:, :, None] & column_inside[None, None, :]
        tile = tl.load(line[:, :, None] + column[None, None, :], mask=inside, other=0.0)
        where = pair[:, None] * INNER + column[None, :]
        value = tl.load(inner + where, mask=slot_inside[:, None] & column_inside[None, :], other=0.0)
        total += tile.to(tl.float32) * value.to(tl.float32)[None, :, :]
    by_slot = tl.sum(total, 2)
    if BIAS:
        own = bias + expert[None, :] * HIDDEN + output[:, None]
        by_slot += tl.load(own, mask=line_inside, other=0.0).to(tl.float32)
    y = tl.sum(by_slot * weight[None, :], 1)
    y += tl.load(residual + row * HIDDEN + output, mask=output_inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + output, y.to(out.dtype.element_ty), mask=output_inside)
