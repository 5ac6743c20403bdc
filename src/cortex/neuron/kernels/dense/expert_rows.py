"""The experts of small batches: each pair is a GEMV with the expert's matrices.

Bound by the bytes of the selected matrices, so the norm, the gate, the sum over experts and the residual are fused in.
Two rows with the same expert run side by side and share its bytes through the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activate_reference, activated, activation_number
from cortex.neuron.kernels.expert_pairs import ExpertChoice
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.matrix import Prologue
from cortex.neuron.kernels.norm import rms_norm_reference


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
    (rows, hidden), size = residual.shape, inner.shape[1]
    out = torch.empty((rows, hidden), dtype=residual.dtype, device=residual.device)
    slots = choice.experts.shape[1]
    block = contract_block(size, rows, slots)
    _contract_kernel[(rows, triton.cdiv(hidden, block.outputs))](
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
        BIAS=bias is not None,
        BLOCK_IN=block.inputs,
        BLOCK_OUT=block.outputs,
        UNROLLED=block.unrolled,
        num_warps=1,
        **launch_options(residual.device),
    )
    return out


class ContractBlock(NamedTuple):
    """The tile of an expert's matrix that a program of one warp takes in each step."""

    outputs: int
    inputs: int
    unrolled: int
    """Steps that the compiler may put side by side."""


def contract_block(inner: int, rows: int, slots: int) -> ContractBlock:
    """The fastest of a sweep on Hopper. Within one warp the sum needs no barrier, and many programs fit on a processor,
    so that enough bytes are on their way. With one row there are too few programs: each loads for many steps ahead."""
    inputs = 512 if -inner % 512 <= inner // 8 else 256
    inputs = min(inputs, triton.next_power_of_2(inner))
    if rows > 1:
        return ContractBlock(4, inputs, 1)
    steps = slots * triton.cdiv(inner, inputs)
    return ContractBlock(2, inputs, steps if steps <= 16 else 4)


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
    """One program per pair and BLOCK_OUT of its expert's inner rows.

    The kernel that chose the experts lets this one start only after the rows are there. The next one starts only after
    the experts are chosen.
    """
    pair = tl.program_id(0)
    x += pair // SLOTS * HIDDEN
    value, squares = _values(x, norm_weight, 0, HIDDEN, BLOCK_IN)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen + pair).to(tl.int64)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    output_inside = output < INNER
    MATRICES: tl.constexpr = 2 if ACTIVATION else 1
    line = gate_up + expert * (MATRICES * INNER * HIDDEN) + output[:, None] * HIDDEN
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        inside = output_inside[:, None] & (column < HIDDEN)[None, :]
        tile = tl.load(line + column[None, :], mask=inside, other=0.0)
        if start > 0:
            value, more = _values(x, norm_weight, start, HIDDEN, BLOCK_IN)
            squares += more
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
def _values(x, norm_weight, start, HIDDEN: tl.constexpr, BLOCK_IN: tl.constexpr):
    """A row's values times the norm's weights, and their squares without them. Read past the first level of the cache,
    which may hold what the row was before the kernel that wrote it."""
    column = start + tl.arange(0, BLOCK_IN)
    value = tl.load(x + column, mask=column < HIDDEN, other=0.0, cache_modifier=".cg").to(tl.float32)
    gain = tl.load(norm_weight + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    return value * gain, value * value


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
    BIAS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UNROLLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and BLOCK_OUT outputs, for all experts of the row: the sum has a fixed order.

    The kernel that expanded the rows lets this one start only after the experts are chosen, so that the first weights
    are on their way before it ends. Those of each step are loaded one step ahead, the expert's id two.
    """
    if OVERLAP:
        gdc_launch_dependents()
    PARTS: tl.constexpr = (INNER + BLOCK_IN - 1) // BLOCK_IN
    row = tl.program_id(0)
    chosen += row * SLOTS
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    output_inside = output < HIDDEN
    column = tl.arange(0, BLOCK_IN)
    line = down + output[:, None] * INNER + column[None, :]
    expert = tl.load(chosen, cache_modifier=".cg").to(tl.int64)
    following = tl.load(chosen + min(1, SLOTS * PARTS - 1) // PARTS, cache_modifier=".cg").to(tl.int64)
    inside = output_inside[:, None] & (column < INNER)[None, :]
    tile = tl.load(line + expert * (HIDDEN * INNER), mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    added = tl.load(residual + row * HIDDEN + output, mask=output_inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for step in tl.range(0, SLOTS * PARTS, loop_unroll_factor=UNROLLED):
        start = (step + 1) % PARTS * BLOCK_IN
        inside = output_inside[:, None] & (start + column < INNER)[None, :] & (step + 1 < SLOTS * PARTS)
        next_tile = tl.load(line + following * (HIDDEN * INNER) + start, mask=inside, other=0.0)
        later = tl.load(chosen + tl.minimum((step + 2) // PARTS, SLOTS - 1), cache_modifier=".cg").to(tl.int64)
        pair, here = row * SLOTS + step // PARTS, step % PARTS * BLOCK_IN + column
        weight = tl.load(weights + pair)
        value = tl.load(inner + pair * INNER + here, mask=here < INNER, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * (value * weight)[None, :]
        if BIAS:
            own = bias + expert * HIDDEN + output
            added += tl.load(own, mask=output_inside & (step % PARTS == 0), other=0.0).to(tl.float32) * weight
        tile = next_tile
        expert = following
        following = later
    y = tl.sum(total, 1) + added
    tl.store(out + row * HIDDEN + output, y.to(out.dtype.element_ty), mask=output_inside)
