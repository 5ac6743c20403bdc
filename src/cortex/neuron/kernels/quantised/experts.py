"""Mixtures whose experts stay quantised: products of each pair of a token and one of its experts.

All experts of a layer are one packed matrix whose rows lie below one another, so an expert is a number of rows to skip.
Small batches take each pair on its own, as one vector times a matrix; larger ones gather the pairs of an expert into
tiles for the tensor cores, as the dense kernels do (`moe/grouped.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.grouped import find_tile, max_tiles
from cortex.neuron.kernels.moe.routing import ExpertChoice, PairLists
from cortex.neuron.kernels.quantised.one_row import expert_rows_product
from cortex.neuron.kernels.quantised.packing import PackedMatrix, unpacked
from cortex.neuron.kernels.quantised.product import fitting_stages, layout_options, operand, operand_row
from cortex.neuron.kernels.shared_memory import shared_memory

_BLOCK_OUT = 64
_WARPS = 4
_STAGES = 3
_MAX_TILE_PAIRS = 64


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """What `Experts` says of dense experts, of packed ones. There are no shared experts among them."""

    router: Tensor
    """[experts, hidden]"""
    gate_up: PackedMatrix
    """[held experts · 2 · inner, hidden]: the gate's rows of an expert, then those of up"""
    down: PackedMatrix
    """[held experts · hidden, inner]"""
    top_k: int
    renormalise: bool
    num_shared: int = 0
    first: int = 0
    """The first expert that is held."""

    @property
    def num_held(self) -> int:
        return self.down.outputs // self.gate_up.inputs

    @property
    def num_experts(self) -> int:
        return len(self.router)

    @property
    def num_routed(self) -> int:
        return len(self.router)

    @property
    def slots(self) -> int:
        return self.top_k

    @property
    def inner(self) -> int:
        return self.down.inputs

    def dense(self) -> Experts:
        """The same experts as dense weights, for the reference."""
        kind, hidden = self.router.dtype, self.gate_up.inputs
        return Experts(
            self.router,
            unpacked(self.gate_up).to(kind).view(self.num_held, -1, hidden),
            unpacked(self.down).to(kind).view(self.num_held, hidden, -1),
            self.top_k,
            self.renormalise,
            first=self.first,
        )


def expand_packed_rows(
    hidden: Tensor, norm_weight: Tensor, eps: float, choice: ExpertChoice, experts: PackedExperts
) -> Tensor:
    """silu(norm(x) Gᵀ) · norm(x) Uᵀ by each row's experts. hidden: [rows, hidden] → [pairs, inner]"""
    pairs = len(hidden) * experts.slots
    out = torch.empty((pairs, experts.inner), dtype=hidden.dtype, device=hidden.device)
    expert_rows_product(
        hidden, experts.gate_up, out, choice.experts, None, norm_weight, eps, pairs_per_row=experts.slots
    )
    return out


def contract_packed_rows(inner: Tensor, choice: ExpertChoice, experts: PackedExperts) -> Tensor:
    """weight · inner Dᵀ by pair. inner: [pairs, inner] → [pairs, hidden]"""
    out = torch.empty((len(inner), experts.gate_up.inputs), dtype=inner.dtype, device=inner.device)
    expert_rows_product(inner, experts.down, out, choice.experts, choice.weights, None, 0.0, pairs_per_row=1)
    return out


def expand_packed_grouped(x: Tensor, lists: PairLists, experts: PackedExperts) -> Tensor:
    """silu(x Gᵀ) · x Uᵀ by pair. x: [tokens, hidden], normed → [pairs, inner]"""
    out = torch.empty((len(x) * experts.slots, experts.inner), dtype=x.dtype, device=x.device)
    _launch(x, experts.gate_up, experts.num_held, lists, out, pairs_per_row=experts.slots, gated=True)
    return out


def contract_packed_grouped(inner: Tensor, lists: PairLists, experts: PackedExperts) -> Tensor:
    """weight · inner Dᵀ by pair. inner: [pairs, inner] → [pairs, hidden]; 0 for experts that are not held"""
    allocate = torch.empty if experts.num_held == experts.num_routed else torch.zeros
    out = allocate((len(inner), experts.gate_up.inputs), dtype=inner.dtype, device=inner.device)
    _launch(inner, experts.down, experts.num_held, lists, out, pairs_per_row=1, gated=False)
    return out


def _launch(
    x: Tensor,
    matrix: PackedMatrix,
    num_experts: int,
    lists: PairLists,
    out: Tensor,
    *,
    pairs_per_row: int,
    gated: bool,
) -> None:
    num_pairs, outputs = out.shape
    wanted = -(-2 * num_pairs // num_experts)
    tile_pairs = max(16, min(_MAX_TILE_PAIRS, 1 << (wanted - 1).bit_length()))
    wanted_stages = _STAGES + (gated and num_pairs < num_experts)
    stages = fitting_stages((1 + gated) * _BLOCK_OUT, tile_pairs, wanted_stages, shared_memory(x.device))
    _packed_grouped_kernel[(triton.cdiv(outputs, _BLOCK_OUT), max_tiles(num_pairs, num_experts, tile_pairs))](
        x,
        matrix.low,
        matrix.high,
        matrix.scales,
        lists.weights,
        lists.counts,
        lists.members,
        out,
        lists.members.stride(0),
        INPUTS=matrix.inputs,
        OUTPUTS=outputs,
        EXPERTS=num_experts,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        PAIRS_PER_ROW=pairs_per_row,
        GATED=gated,
        BLOCK_PAIRS=tile_pairs,
        BLOCK_OUT=_BLOCK_OUT,
        CHUNKS=matrix.low.shape[1] // 16,
        WARPS=_WARPS,
        STAGES=stages,
        num_warps=_WARPS,
        num_stages=stages,
        **layout_options(matrix.layout),
        **launch_options(x.device),
    )


@jit(do_not_specialize=["members_stride"])
def _packed_grouped_kernel(
    x,
    low,
    high,
    scales,
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
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    LEVELS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of one expert's pairs and BLOCK_OUT rows of its matrix: out = (W xᵀ)ᵀ.

    GATED has twice OUTPUTS rows, the gate's first; otherwise the product is scaled by the pair's weight.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    expert, first, num_pairs = find_tile(counts, EXPERTS, EXPERTS_BLOCK, BLOCK_PAIRS)
    if expert >= EXPERTS:
        return
    expert = expert.to(tl.int64)
    place = first + tl.arange(0, BLOCK_PAIRS)
    valid = place < num_pairs
    pair = tl.load(members + expert * members_stride + place, mask=valid, other=0)
    source = x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * INPUTS
    matrices: tl.constexpr = 2 if GATED else 1
    block = tl.program_id(0) * BLOCK_OUT
    loaded = expert * (matrices * OUTPUTS) + tl.minimum(block + tl.arange(0, BLOCK_OUT), OUTPUTS - 1)
    total = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        column = chunk * 128 + tl.arange(0, 128)
        inside = valid[None, :] if INPUTS % 128 == 0 else valid[None, :] & (column < INPUTS)[:, None]
        value = tl.load(source + column[:, None], mask=inside, other=0.0)  # [in, pairs]
        weights = operand(
            low, high, scales, loaded, chunk,
            CHUNKS, BLOCK_OUT, 1, WARPS, LOW_BITS, HIGH_BITS, GROUP, ZERO, LEVELS, SCALE_WORDS, PTX,
        )  # fmt: skip
        total = tl.dot(weights.to(value.dtype), value, total)
        if GATED:
            weights_up = operand(
                low, high, scales, loaded + OUTPUTS, chunk,
                CHUNKS, BLOCK_OUT, 1, WARPS, LOW_BITS, HIGH_BITS, GROUP, ZERO, LEVELS, SCALE_WORDS, PTX,
            )  # fmt: skip
            total_up = tl.dot(weights_up.to(value.dtype), value, total_up)
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    else:
        total *= tl.load(pair_weights + pair, mask=valid, other=0.0)[None, :]
    output = block + operand_row(BLOCK_OUT, WARPS)
    where = pair.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(output < OUTPUTS)[:, None] & valid[None, :])
