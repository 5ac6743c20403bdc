"""The whole block for any number of rows, and its reference, which CPUs use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.grouped import combine, contract_grouped, expand_grouped, tiling
from cortex.neuron.kernels.moe.routing import choose_reference, choose_rows, list_pairs
from cortex.neuron.kernels.moe.rows import contract_rows, expand_rows
from cortex.neuron.kernels.norm import rms_norm, rms_norm_reference
from cortex.neuron.kernels.quantised.experts import (
    PackedExperts,
    contract_packed_grouped,
    contract_packed_rows,
    expand_packed_grouped,
    expand_packed_rows,
)
from cortex.neuron.kernels.silu import silu_mul_reference

SMALL_BATCH_ROWS = 8
"""Up to this many rows most of the selected experts differ, and one product per pair reads few bytes twice."""


def mixture(hidden: Tensor, norm_weight: Tensor, eps: float, experts: Experts | PackedExperts) -> Tensor:
    """hidden: [tokens, hidden] → hidden + Σ weight · expert(norm(hidden)) over each token's experts"""
    if not has_kernels(hidden):
        dense = experts.dense() if isinstance(experts, PackedExperts) else experts
        return mixture_reference(hidden, norm_weight, eps, dense)
    if len(hidden) <= SMALL_BATCH_ROWS:
        return mixture_of_rows(hidden, norm_weight, eps, experts)
    return mixture_grouped(hidden, norm_weight, eps, experts)


def mixture_of_rows(hidden: Tensor, norm_weight: Tensor, eps: float, experts: Experts | PackedExperts) -> Tensor:
    """Each pair on its own, in three launches."""
    choice = choose_rows(hidden, norm_weight, eps, experts)
    if isinstance(experts, PackedExperts):
        inner = expand_packed_rows(hidden, norm_weight, eps, choice, experts)
        return combine(contract_packed_rows(inner, choice, experts), hidden)
    inner = expand_rows(hidden, norm_weight, eps, choice, experts)
    return contract_rows(inner, choice, hidden, experts)


def mixture_grouped(hidden: Tensor, norm_weight: Tensor, eps: float, experts: Experts | PackedExperts) -> Tensor:
    """The pairs of each expert together."""
    x = rms_norm(hidden, norm_weight, eps)
    lists = list_pairs(F.linear(x, experts.router), experts)
    if isinstance(experts, PackedExperts):
        return combine(contract_packed_grouped(expand_packed_grouped(x, lists, experts), lists, experts), hidden)
    tile = tiling(len(hidden) * experts.top_k, experts.num_routed)
    inner = expand_grouped(x, lists, experts, tile)
    return combine(contract_grouped(inner, lists, experts, tile), hidden)


def mixture_reference(hidden: Tensor, norm_weight: Tensor, eps: float, experts: Experts) -> Tensor:
    """Sorts pairs by expert, so that each expert runs once on contiguous memory."""
    x = rms_norm_reference(hidden, norm_weight, eps)
    choice = choose_reference(F.linear(x, experts.router), experts)
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
    return hidden + torch.bmm(weights, by_pair)[:, 0]
