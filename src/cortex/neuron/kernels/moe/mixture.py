"""A whole mixture-of-experts block for any number of rows, and its reference, which CPUs use."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activate_reference, relu_squared_, relu_squared_reference_
from cortex.neuron.kernels.expert_pairs import ExpertChoice, PairLists
from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.matrix import ExpertMatrix, Prologue
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.routing import (
    choose_rows,
    choose_rows_reference,
    held_choice,
    held_lists,
    list_pairs,
    router_scores,
)
from cortex.neuron.kernels.norm import rms_norm, rms_norm_reference
from cortex.neuron.kernels.products.grouped import combine, expert_load

MAX_SINGLE_ROWS = 12
"""With more rows a grouped GEMM is faster, even if all their experts differ."""


def mixture(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    experts: Experts,
    residual: Tensor | None = None,
    inputs: Tensor | None = None,
    held: ExpertChoice | None = None,
) -> Tensor:
    """hidden: [tokens, hidden] → residual + Σ weight · expert(norm(hidden)) over those of each token's experts that are
    held. `residual` is by default `hidden` itself. `inputs`: what the experts take in place of norm(hidden), [tokens,
    width]; then a residual of that width is needed. `held`: the choice by the ids of the held experts,
    where it is known."""
    if not has_kernels(hidden):
        return mixture_reference(hidden, norm_weight, eps, experts, residual, inputs, held)
    if inputs is None and takes_single_pairs(len(hidden), experts.top_k, experts.num_routed, experts.gate_up.max_reads):
        return mixture_of_rows(hidden, norm_weight, eps, experts, residual, held)
    return mixture_grouped(hidden, norm_weight, eps, experts, residual, inputs)


def takes_single_pairs(rows: int, top_k: int, num_experts: int, max_reads: float) -> bool:
    """Whether a GEMV for each pair is faster than a grouped GEMM: it reads an expert again for each of its pairs. Rows
    are taken to choose experts at random. Pure."""
    num_chosen = num_experts * (1 - (1 - top_k / num_experts) ** rows)
    return rows <= MAX_SINGLE_ROWS and rows * top_k <= max_reads * num_chosen


def mixture_of_rows(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    experts: Experts,
    residual: Tensor | None = None,
    held: ExpertChoice | None = None,
) -> Tensor:
    """Each pair on its own, in three or four launches."""
    residual = hidden if residual is None else residual
    choice = held or held_choice(choose_rows(hidden, norm_weight, eps, experts), experts)
    inner = torch.empty(len(hidden) * experts.slots, experts.inner, dtype=hidden.dtype, device=hidden.device)
    activation, norm = experts.activation if experts.gated else None, Prologue(norm_weight, eps)
    experts.gate_up.expand_rows(hidden, choice, norm, activation, inner, experts.gate_up_bias)
    if not experts.gated:
        relu_squared_(inner)
    return experts.down.contract_rows(inner, choice, residual, experts.down_bias)


def mixture_grouped(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    experts: Experts,
    residual: Tensor | None = None,
    inputs: Tensor | None = None,
) -> Tensor:
    """The pairs of each expert together."""
    tokens = len(hidden)
    num_pairs, load = tokens * experts.slots, expert_load(tokens * experts.top_k, experts.num_routed)
    x = rms_norm(hidden, norm_weight, eps)
    scored = x if experts.router_norm is None else rms_norm(hidden, experts.router_norm, eps)
    lists = held_lists(list_pairs(router_scores(scored, experts), experts), experts)
    x = x if inputs is None else inputs
    # pairs of experts that are not held are not written
    allocate = torch.empty if experts.num_held == experts.num_routed else torch.zeros
    parts = allocate(num_pairs, experts.gate_up.inputs, dtype=x.dtype, device=x.device)
    biases = (experts.gate_up_bias, experts.down_bias)
    if not experts.gated or not experts.gate_up.gated_pairs(
        experts.down, x, lists, parts, slots=experts.slots, activation=experts.activation, biases=biases
    ):
        expand_and_contract(x, experts, lists, parts, load)
    return combine(parts, hidden if residual is None else residual)


def expand_and_contract(x: Tensor, experts: Experts, lists: PairLists, parts: Tensor, load: int) -> None:
    """parts[pair] = weight · expert(x), in two products."""
    inner = torch.empty(len(parts), experts.inner, dtype=x.dtype, device=x.device)
    experts.gate_up.grouped(
        x,
        lists if experts.gated else replace(lists, weights=torch.ones_like(lists.weights)),
        inner,
        pairs_per_row=experts.slots,
        activation=experts.activation if experts.gated else None,
        load=load,
        bias=experts.gate_up_bias,
    )
    if not experts.gated:
        relu_squared_(inner)
    experts.down.grouped(inner, lists, parts, pairs_per_row=1, activation=None, load=load, bias=experts.down_bias)


def mixture_reference(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    experts: Experts,
    residual: Tensor | None = None,
    inputs: Tensor | None = None,
    held: ExpertChoice | None = None,
) -> Tensor:
    """Sorts pairs by expert, so that each expert runs once on contiguous memory."""
    x = rms_norm_reference(hidden, norm_weight, eps)
    choice = held or held_choice(choose_rows_reference(hidden, norm_weight, eps, experts), experts)
    by_expert, order = choice.experts.flatten().sort(stable=True)
    x = x if inputs is None else inputs
    gathered = x.index_select(0, order // experts.slots)  # [pairs, hidden]
    parts = torch.empty_like(gathered)
    used, counts = by_expert.unique_consecutive(return_counts=True)
    start = 0
    for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
        span = slice(start, start + count)
        rows = (1 + experts.gated) * experts.inner
        gate_up = _weights(experts.gate_up, expert, rows, x.dtype)
        inner = F.linear(gathered[span], gate_up, _biases(experts.gate_up_bias, expert, rows))
        inner = activate_reference(inner, experts.activation) if experts.gated else relu_squared_reference_(inner)
        torch.mm(inner, _weights(experts.down, expert, x.shape[1], x.dtype).t(), out=parts[span])
        if (down_bias := _biases(experts.down_bias, expert, x.shape[1])) is not None:
            parts[span] += down_bias
        start += count
    by_pair = parts.index_select(0, order.argsort()).view(*choice.weights.shape, -1)  # [tokens, slots, hidden]
    weights = choice.weights.to(parts.dtype)[:, None]
    return (hidden if residual is None else residual) + torch.bmm(weights, by_pair)[:, 0]


def _weights(matrix: ExpertMatrix, expert: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """The rows of one expert. → [num_rows, inputs]"""
    return matrix.values(slice(expert * num_rows, (expert + 1) * num_rows)).to(dtype)


def _biases(bias: Tensor | None, expert: int, num_rows: int) -> Tensor | None:
    return None if bias is None else bias[expert * num_rows : (expert + 1) * num_rows]
