"""The experts of small batches: each pair is a product of the expert's matrices with one vector.

Bound by the bytes of the selected matrices, so the norm, the gate, the sum over experts and the residual are fused in.
Two rows with the same expert run side by side and share its bytes through the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.routing import ExpertChoice
from cortex.neuron.kernels.norm import rms_norm_reference
from cortex.neuron.kernels.silu import silu_mul_reference

TILE_ELEMENTS = 16_384
"""Matrix elements that one program of the second product loads at once."""


def expand_rows(hidden: Tensor, norm_weight: Tensor, eps: float, choice: ExpertChoice, experts: Experts) -> Tensor:
    """silu(norm(x) Gᵀ) · norm(x) Uᵀ by each row's experts. hidden: [rows, hidden] → [rows, slots, inner]"""
    rows, size = hidden.shape
    out = torch.empty((rows, experts.slots, experts.inner), dtype=hidden.dtype, device=hidden.device)
    block_out = 2
    _expand_kernel[(rows * experts.slots, triton.cdiv(experts.inner, block_out))](
        hidden,
        norm_weight,
        experts.gate_up,
        choice.experts,
        out,
        eps,
        HIDDEN=size,
        INNER=experts.inner,
        SLOTS=experts.slots,
        BLOCK_IN=min(2048, triton.next_power_of_2(size)),
        BLOCK_OUT=block_out,
        num_warps=4,
        **launch_options(hidden.device),
    )
    return out


def expand_rows_reference(
    hidden: Tensor, norm_weight: Tensor, eps: float, choice: ExpertChoice, experts: Experts
) -> Tensor:
    x = rms_norm_reference(hidden, norm_weight, eps)
    rows = [
        torch.stack([silu_mul_reference(F.linear(value, experts.gate_up[expert])) for expert in chosen])
        for value, chosen in zip(x, choice.experts.tolist(), strict=True)
    ]
    return torch.stack(rows)


def contract_rows(inner: Tensor, choice: ExpertChoice, residual: Tensor, experts: Experts) -> Tensor:
    """residual + Σ weight · inner Dᵀ over each row's experts. inner: [rows, slots, inner] → [rows, hidden]"""
    rows, hidden = residual.shape
    out = torch.empty((rows, hidden), dtype=residual.dtype, device=residual.device)
    slots_block = triton.next_power_of_2(experts.slots)
    block_out = 2
    block_in = min(triton.next_power_of_2(experts.inner), TILE_ELEMENTS // (block_out * slots_block))
    _contract_kernel[(rows, triton.cdiv(hidden, block_out))](
        inner,
        experts.down,
        choice.experts,
        choice.weights,
        residual,
        out,
        HIDDEN=hidden,
        INNER=experts.inner,
        SLOTS=experts.slots,
        SLOTS_BLOCK=slots_block,
        BLOCK_IN=block_in,
        BLOCK_OUT=block_out,
        num_warps=8,
        **launch_options(residual.device),
    )
    return out


def contract_rows_reference(inner: Tensor, choice: ExpertChoice, residual: Tensor, experts: Experts) -> Tensor:
    out = residual.clone()
    for row, chosen in enumerate(choice.experts.tolist()):
        for slot, expert in enumerate(chosen):
            out[row] += choice.weights[row, slot] * F.linear(inner[row, slot], experts.down[expert])
    return out


@jit
def _expand_kernel(
    x,
    norm_weight,
    gate_up,
    chosen,
    out,
    eps,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SLOTS: tl.constexpr,
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
    line = gate_up + expert * (2 * INNER * HIDDEN) + output[:, None] * HIDDEN
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    squares = tl.zeros((BLOCK_IN,), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        inside = output_inside[:, None] & (column < HIDDEN)[None, :]
        tile = tl.load(line + column[None, :], mask=inside, other=0.0)
        tile_up = tl.load(line + INNER * HIDDEN + column[None, :], mask=inside, other=0.0)
        value = tl.load(x + pair // SLOTS * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        squares += value * value
        value *= tl.load(norm_weight + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * value[None, :]
        total_up += tile_up.to(tl.float32) * value[None, :]
    scale = tl.rsqrt(tl.sum(squares, 0) / HIDDEN + eps)
    gate = tl.sum(total, 1) * scale
    y = gate * tl.sigmoid(gate) * (tl.sum(total_up, 1) * scale)
    tl.store(out + pair * INNER + output, y.to(out.dtype.element_ty), mask=output_inside)


@jit
def _contract_kernel(
    inner,
    down,
    chosen,
    weights,
    residual,
    out,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,
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
    y = tl.sum(tl.sum(total, 2) * weight[None, :], 1)
    y += tl.load(residual + row * HIDDEN + output, mask=output_inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + output, y.to(out.dtype.element_ty), mask=output_inside)
