"""A whole mixture-of-experts block for any number of rows, and its reference, which CPUs use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.grouped import combine, contract_grouped, expand_grouped, tiling
from cortex.neuron.kernels.moe.quantised import (
    PackedExperts,
    contract_packed_grouped,
    contract_packed_rows,
    expand_packed_grouped,
    expand_packed_rows,
)
from cortex.neuron.kernels.moe.routing import choose_reference, choose_rows, held_choice, held_lists, list_pairs
from cortex.neuron.kernels.moe.rows import contract_rows, expand_rows
from cortex.neuron.kernels.norm import rms_norm, rms_norm_reference
from cortex.neuron.kernels.silu import silu_mul_reference

SMALL_BATCH_ROWS = 8
"""Up to this many rows most of the selected experts differ, and one product per pair reads few bytes twice."""


def mixture(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    experts: Experts | PackedExperts,
    residual: Tensor | None = None,
) -> Tensor:
    """hidden: [tokens, hidden] → residual + Σ weight · expert(norm(hidden)) over those of each token's experts that are
    held. `residual` is by default `hidden` itself."""
    if not has_kernels(hidden):
        dense = experts.dense() if isinstance(experts, PackedExperts) else experts
        return mixture_reference(hidden, norm_weight, eps, dense, residual)
    if len(hidden) <= SMALL_BATCH_ROWS:
        return mixture_of_rows(hidden, norm_weight, eps, experts, residual)
    return mixture_grouped(hidden, norm_weight, eps, experts, residual)


def mixture_of_rows(
    hidden: Tensor, norm_weight: Tensor, eps: float, experts: Experts | PackedExperts, residual: Tensor | None = None
) -> Tensor:
    """Each pair on its own, in three launches."""
    residual = hidden if residual is None else residual
    choice = held_choice(choose_rows(hidden, norm_weight, eps, experts), experts)
    if isinstance(experts, PackedExperts):
        inner = expand_packed_rows(hidden, norm_weight, eps, choice, experts)
        return combine(contract_packed_rows(inner, choice, experts), residual)
    inner = expand_rows(hidden, norm_weight, eps, choice, experts)
    return contract_rows(inner, choice, residual, experts)


def mixture_grouped(
    hidden: Tensor, norm_weight: Tensor, eps: float, experts: Experts | PackedExperts, residual: Tensor | None = None
) -> Tensor:
    """The pairs of each expert together."""
    residual = hidden if residual is None else residual
    x = rms_norm(hidden, norm_weight, eps)
    lists = held_lists(list_pairs(F.linear(x, experts.router), experts), experts)
    if isinstance(experts, PackedExperts):
        return combine(contract_packed_grouped(expand_packed_grouped(x, lists, experts), lists, experts), residual)
    tile = tiling(len(hidden) * experts.top_k, experts.num_routed)
    inner = expand_grouped(x, lists, experts, tile)
    return combine(contract_grouped(inner, lists, experts, tile), residual)


def mixture_reference(
    hidden: Tensor, norm_weight: Tensor, eps: float, experts: Experts, residual: Tensor | None = None
) -> Tensor:
    """Sorts pairs by expert, so that each expert runs once on contiguous memory."""
    x = rms_norm_reference(hidden, norm_weight, eps)
    choice = held_choice(choose_reference(F.linear(x, experts.router), experts), experts)
    by_expert, order = choice.experts.flatten().sort(stable=True)
    gathered = x.index_select(0, order // experts.slots)  # [pairs, hidden]
    parts = torch.empty_like(gathered)
    used, counts = by_expert.unique_consecutive(return_counts=True)
    start = 0
    for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
        span = slice(start, start + count)
        inner = silu_mul_reference(F.linear(gathered[span], experts.gate_up[expert]))
        torch.mm(inner, experts.down[expert].t(), out=parts[span])
        start += count
    by_pair = parts.index_select(0, order.argsort()).view(*choice.weights.shape, -1)  # [tokens, slots, hidden]
    weights = choice.weights.to(parts.dtype)[:, None]
    return (hidden if residual is None else residual) + torch.bmm(weights, by_pair)[:, 0]
