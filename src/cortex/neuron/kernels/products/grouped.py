"""How grouped GEMMs with the experts of large batches are launched, begin and end: each expert's pairs are gathered
into tiles and multiplied with its rows of the matrix on tensor cores. The loops are those of the storages.

The number of tiles of an expert is known only on the device. A launch has programs for the largest possible number;
each finds its tile from the counts of the experts, and programs after the last tile exit. So the grid depends only on
the number of rows, and the launch can be captured in a graph. The matrix is the left operand: its rows fill a tensor
core tile even when there are few tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import activated, activation_number
from cortex.neuron.kernels.expert_pairs import PairLists
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.shared_memory import SharedMemory, loop_over_columns

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


def expert_load(num_pairs: int, num_experts: int) -> int:
    """The average number of pairs per expert and three deviations: with tiles for as many, most experts need one."""
    average = num_pairs / num_experts
    return math.ceil(average + 3 * math.sqrt(average))


def tiling(load: int) -> Tiling:
    """Tiles for this many pairs of an expert."""
    pairs = max(16, min(128, 1 << (load - 1).bit_length()))
    return Tiling(pairs, 64, 128, 4) if pairs < 64 else Tiling(pairs, 128, 64, 8)


def max_tiles(num_pairs: int, num_experts: int, tile_pairs: int) -> int:
    """The largest number of tiles for `num_pairs`, for any distribution over the experts."""
    busy = min(num_pairs, num_experts)
    return busy + (num_pairs - busy) // tile_pairs


def launch_grouped(
    kernel: Any,
    operands: tuple[Tensor | None, ...],
    lists: PairLists,
    out: Tensor,
    *,
    tile_pairs: int,
    block_out: int,
    blocks: int = 1,
    pairs_per_row: int,
    activation: str | None,
    **constants: Any,
) -> None:
    """`operands`: x, what holds the matrix, and its bias. A program takes `blocks` blocks of `block_out` rows of an
    expert and `tile_pairs` of its pairs. See `ExpertMatrix.grouped`."""
    (num_pairs, outputs), num_experts = out.shape, len(lists.counts)
    kernel[(triton.cdiv(outputs, block_out * blocks), max_tiles(num_pairs, num_experts, tile_pairs))](
        *operands,
        lists.weights,
        lists.counts,
        lists.members,
        out,
        lists.members.stride(0),
        OUTPUTS=outputs,
        EXPERTS=num_experts,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        PAIRS_PER_ROW=pairs_per_row,
        ACTIVATION=activation_number(activation),
        BLOCK_PAIRS=tile_pairs,
        BLOCK_OUT=block_out,
        **constants,
        **launch_options(out.device),
    )


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


def combine_reference(parts: Tensor, residual: Tensor) -> Tensor:
    return residual + parts.view(len(residual), -1, residual.shape[1]).sum(1)


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
        gdc_wait()
        gdc_launch_dependents()  # only now: the next kernel may read the lists of pairs at once
    expert, first, count = own_tile(counts, EXPERTS, EXPERTS_BLOCK, BLOCK_PAIRS)
    pair, valid = pairs_from(members, members_stride, expert, first, count, BLOCK_PAIRS)
    return expert, pair, valid


@jit
def own_tile(counts, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, TILE_PAIRS: tl.constexpr):
    """The expert of this program's tile, the tile's first place in the expert's list, and the length of the list."""
    tile_index = tl.program_id(1)
    each = tl.arange(0, EXPERTS_BLOCK)
    count = tl.load(counts + each, mask=each < EXPERTS, other=0)
    tiles = (count + TILE_PAIRS - 1) // TILE_PAIRS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile_index).to(tl.int32), 0)
    is_mine = each == expert
    first = (tile_index - tl.sum(tl.where(is_mine, ends - tiles, 0), 0)) * TILE_PAIRS
    return expert.to(tl.int64), first, tl.sum(tl.where(is_mine, count, 0), 0)


@jit
def pairs_from(members, members_stride, expert, first, count, NUM_PAIRS: tl.constexpr):
    """Pairs of an expert from a place in its list on, and which of them exist."""
    place = first + tl.arange(0, NUM_PAIRS)
    valid = place < count
    return tl.load(members + expert * members_stride + place, mask=valid, other=0), valid


@jit
def store_pairs(
    total,
    total_up,
    bias,
    expert,
    out,
    pair_weights,
    pair,
    valid,
    output,
    OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
):
    """How a grouped kernel ends: with the expert's bias, then the activation or the weight of each pair.
    total: [BLOCK_OUT, BLOCK_PAIRS]"""
    if BIAS:
        own = bias + expert * (2 * OUTPUTS if ACTIVATION else OUTPUTS) + output
        total += tl.load(own, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION:
            total_up += tl.load(own + OUTPUTS, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION:
        total = activated(total, total_up, ACTIVATION)
    else:
        total *= tl.load(pair_weights + pair, mask=valid, other=0.0)[None, :]
    where = pair.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(output < OUTPUTS)[:, None] & valid[None, :])


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
