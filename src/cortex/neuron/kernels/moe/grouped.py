"""The experts of large batches: the pairs of each expert, gathered into tiles, times its matrices on tensor cores.

The number of tiles of an expert is known only on the device. A launch has programs for the largest possible number;
each finds its tile from the counts of the experts, and programs after the last tile exit. So the grid depends only on
the number of rows, and the launch can be captured in a graph. The matrix is the left operand: its rows fill a tensor
core tile even when there are few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.routing import PairLists
from cortex.neuron.kernels.shared_memory import SharedMemory, loop_over_columns, shared_memory
from cortex.neuron.kernels.silu import silu_mul_reference

MAX_STAGES = 4


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile of one program: pairs, rows of the matrix, and inputs per iteration."""

    pairs: int
    outputs: int
    inputs: int
    warps: int

    def fitted(self, num_matrices: int, element_bytes: int, shared: SharedMemory) -> tuple[int, int]:
        """Inputs per iteration and pipeline stages that the shared memory of the device allows."""
        column_bytes = (num_matrices * self.outputs + self.pairs) * element_bytes
        return loop_over_columns(self.inputs, MAX_STAGES, column_bytes, shared)


def tiling(num_pairs: int, num_experts: int) -> Tiling:
    """Tiles for about twice the average number of pairs per expert, so that most experts need one tile."""
    wanted = -(-2 * num_pairs // num_experts)
    pairs = max(16, min(128, 1 << (wanted - 1).bit_length()))
    return Tiling(pairs, 64, 128, 4) if pairs < 64 else Tiling(pairs, 128, 64, 8)


def max_tiles(num_pairs: int, num_experts: int, tile_pairs: int) -> int:
    """The largest number of tiles for `num_pairs`, for any distribution over the experts."""
    busy = min(num_pairs, num_experts)
    return busy + (num_pairs - busy) // tile_pairs


def expand_grouped(x: Tensor, lists: PairLists, experts: Experts, tile: Tiling) -> Tensor:
    """silu(x Gᵀ) · x Uᵀ by pair. x: [tokens, hidden], normed → [tokens · slots, inner]"""
    out = torch.empty((len(x) * experts.slots, experts.inner), dtype=x.dtype, device=x.device)
    _launch(x, experts.gate_up, lists, out, tile, pairs_per_row=experts.slots, gated=True)
    return out


def contract_grouped(inner: Tensor, lists: PairLists, experts: Experts, tile: Tiling) -> Tensor:
    """weight · inner Dᵀ by pair. inner: [tokens · slots, inner] → [tokens · slots, hidden]; 0 for experts not held"""
    allocate = torch.empty if experts.num_held == experts.num_routed else torch.zeros
    out = allocate((len(inner), experts.down.shape[1]), dtype=inner.dtype, device=inner.device)
    _launch(inner, experts.down, lists, out, tile, pairs_per_row=1, gated=False)
    return out


def combine(parts: Tensor, residual: Tensor) -> Tensor:
    """residual + the sum of each token's parts, in order. parts: [tokens · slots, hidden] → [tokens, hidden]"""
    tokens, hidden = residual.shape
    out = torch.empty((tokens, hidden), dtype=residual.dtype, device=residual.device)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](
        parts,
        residual,
        out,
        HIDDEN=hidden,
        SLOTS=len(parts) // tokens,
        BLOCK=block,
        num_warps=4,
        **launch_options(residual.device),
    )
    return out


def expand_grouped_reference(x: Tensor, lists: PairLists, experts: Experts) -> Tensor:
    out = torch.empty((len(x) * experts.slots, experts.inner), dtype=x.dtype, device=x.device)
    for gate_up, pairs in zip(experts.gate_up, _pairs(lists), strict=True):
        out[pairs] = silu_mul_reference(F.linear(x[pairs // experts.slots], gate_up))
    return out


def contract_grouped_reference(inner: Tensor, lists: PairLists, experts: Experts) -> Tensor:
    out = torch.empty((len(inner), experts.down.shape[1]), dtype=inner.dtype, device=inner.device)
    weights = lists.weights.flatten()
    for down, pairs in zip(experts.down, _pairs(lists), strict=True):
        out[pairs] = F.linear(inner[pairs], down) * weights[pairs, None]
    return out


def combine_reference(parts: Tensor, residual: Tensor) -> Tensor:
    return residual + parts.view(len(residual), -1, residual.shape[1]).sum(1)


def _pairs(lists: PairLists) -> list[Tensor]:
    """The pairs of each expert."""
    return [members[:count].long() for members, count in zip(lists.members, lists.counts.tolist(), strict=True)]


def _launch(
    x: Tensor, weight: Tensor, lists: PairLists, out: Tensor, tile: Tiling, *, pairs_per_row: int, gated: bool
) -> None:
    num_pairs, outputs = out.shape
    inputs = x.shape[1]
    num_experts = len(weight)
    block_in, stages = tile.fitted(1 + gated, x.element_size(), shared_memory(x.device))
    _grouped_kernel[(triton.cdiv(outputs, tile.outputs), max_tiles(num_pairs, num_experts, tile.pairs))](
        x,
        weight,
        lists.weights,
        lists.counts,
        lists.members,
        out,
        lists.members.stride(0),
        INPUTS=inputs,
        OUTPUTS=outputs,
        EXPERTS=num_experts,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        PAIRS_PER_ROW=pairs_per_row,
        GATED=gated,
        BLOCK_PAIRS=tile.pairs,
        BLOCK_OUT=tile.outputs,
        BLOCK_IN=max(16, min(block_in, triton.next_power_of_2(inputs))),
        num_warps=tile.warps,
        num_stages=stages,
        **launch_options(x.device),
    )


@jit
def own_pairs(
    counts,
    members,
    members_stride,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """How a grouped kernel begins: its tile's expert, pairs, and which of the pairs exist. The program's second
    coordinate counts the tiles of all experts; the expert is EXPERTS or more where there is no such tile."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tile_index = tl.program_id(1)
    each = tl.arange(0, EXPERTS_BLOCK)
    count = tl.load(counts + each, mask=each < EXPERTS, other=0)
    tiles = (count + BLOCK_PAIRS - 1) // BLOCK_PAIRS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile_index).to(tl.int32), 0)
    is_mine = each == expert
    first = (tile_index - tl.sum(tl.where(is_mine, ends - tiles, 0), 0)) * BLOCK_PAIRS
    place = first + tl.arange(0, BLOCK_PAIRS)
    valid = place < tl.sum(tl.where(is_mine, count, 0), 0)
    pair = tl.load(members + expert.to(tl.int64) * members_stride + place, mask=valid, other=0)
    return expert.to(tl.int64), pair, valid


@jit
def store_pairs(total, total_up, out, pair_weights, pair, valid, output, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """How a grouped kernel ends: with the gate, or the weight of each pair. total: [BLOCK_OUT, BLOCK_PAIRS]"""
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    else:
        total *= tl.load(pair_weights + pair, mask=valid, other=0.0)[None, :]
    where = pair.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(output < OUTPUTS)[:, None] & valid[None, :])


@jit(do_not_specialize=["members_stride"])
def _grouped_kernel(
    x,
    weight,
    pair_weights,
    counts,
    members,
    out,
    members_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of one expert's pairs and BLOCK_OUT rows of its matrix: out = (W xᵀ)ᵀ.

    GATED has twice OUTPUTS rows, the gate's first; otherwise the product is scaled by the pair's weight.
    """
    expert, pair, valid = own_pairs(counts, members, members_stride, EXPERTS, EXPERTS_BLOCK, BLOCK_PAIRS, OVERLAP)
    if expert >= EXPERTS:
        return
    row = (pair // PAIRS_PER_ROW).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    output_inside = output < OUTPUTS
    MATRICES: tl.constexpr = 2 if GATED else 1
    line = weight + expert * (MATRICES * OUTPUTS * INPUTS) + output[:, None] * INPUTS
    source = x + row[None, :] * INPUTS
    total = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
    for start in range(0, INPUTS, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        if INPUTS % BLOCK_IN == 0:
            inside = output_inside[:, None]
            x_inside = valid[None, :]
        else:
            inside = output_inside[:, None] & (column < INPUTS)[None, :]
            x_inside = valid[None, :] & (column < INPUTS)[:, None]
        tile = tl.load(line + column[None, :], mask=inside, other=0.0)
        value = tl.load(source + column[:, None], mask=x_inside, other=0.0)  # [in, pairs]
        total = tl.dot(tile, value, total)
        if GATED:
            tile_up = tl.load(line + OUTPUTS * INPUTS + column[None, :], mask=inside, other=0.0)
            total_up = tl.dot(tile_up, value, total_up)
    store_pairs(total, total_up, out, pair_weights, pair, valid, output, OUTPUTS, GATED)


@jit
def _combine_kernel(
    parts, residual, out, HIDDEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.load(residual + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        total += tl.load(parts + (token * SLOTS + slot) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)
