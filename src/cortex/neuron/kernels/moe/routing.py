"""Routing: the experts and weights of each token. Softmax or sigmoid of the scores, top k, plus the shared experts.

Small batches get the experts by pair, in one
launch from the residual stream on. Large batches get a list of pairs for each expert. The order within a list is not
deterministic, and nothing depends on it: the result of every pair has its own place.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.expert_pairs import ExpertChoice, PairLists
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.norm import rms_norm_reference

MAX_ROWS = 1024
"""Largest number of rows of `choose_rows`."""
ROUTER_BLOCK = 2
"""Scores of one program of `choose_rows`."""


def choose_reference(logits: Tensor, experts: Experts) -> ExpertChoice:
    """logits: [tokens, routed (+ 1)]"""
    routed = logits[:, : experts.num_routed]
    rule = experts.rule
    every = routed.float().sigmoid() if rule.scoring == "sigmoid" else routed.softmax(-1, dtype=torch.float32)
    score = every if experts.bias is None else every + experts.bias
    if rule.groups > rule.kept_groups:
        score = _in_best_groups(score, experts)
    chosen = score.topk(experts.top_k).indices
    weights = every.gather(1, chosen)
    if experts.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * rule.scale
    if experts.scales is not None:
        weights = weights * experts.scales[chosen]
    if experts.num_shared:
        shared = torch.arange(experts.num_routed, experts.num_experts, device=logits.device)
        gate = logits[:, experts.num_routed :].float().sigmoid() if rule.gates_shared else weights.new_ones(1, 1)
        chosen = torch.cat((chosen, shared.expand(len(logits), -1)), dim=1)
        weights = torch.cat((weights, gate.expand(len(logits), experts.num_shared)), dim=1)
    return ExpertChoice(chosen.to(torch.int32), weights)


def _in_best_groups(score: Tensor, experts: Experts) -> Tensor:
    """score: [tokens, routed] → the same, -inf outside each token's groups"""
    grouped: Tensor = score.unflatten(1, (experts.rule.groups, -1))
    best = grouped.topk(1 if experts.bias is None else 2).values.sum(-1).topk(experts.rule.kept_groups).indices
    is_chosen = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=score.device).scatter_(1, best, True)
    return grouped.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)


def choose_rows(hidden: Tensor, norm_weight: Tensor, eps: float, experts: Experts) -> ExpertChoice:
    """Norm, scores and choice of a small batch in one launch. hidden: [rows ≤ MAX_ROWS, hidden]"""
    rows, size = hidden.shape
    scores = torch.empty((rows, len(experts.router)), dtype=torch.float32, device=hidden.device)
    chosen = torch.empty((rows, experts.slots), dtype=torch.int32, device=hidden.device)
    weights = torch.empty((rows, experts.slots), dtype=torch.float32, device=hidden.device)
    _choose_rows_kernel[(triton.cdiv(len(experts.router), ROUTER_BLOCK), rows)](
        hidden,
        norm_weight if experts.router_norm is None else experts.router_norm,
        experts.router,
        experts.router_bias,
        experts.bias,
        experts.scales,
        scores,
        chosen,
        weights,
        _counters(hidden.device),
        eps,
        HIDDEN=size,
        SCORES=len(experts.router),
        ADDED=experts.router_bias is not None,
        BLOCK_IN=triton.next_power_of_2(size),
        BLOCK_OUT=ROUTER_BLOCK,
        num_warps=_router_warps(size),
        **_choice_constants(experts),
        **launch_options(hidden.device),
    )
    return ExpertChoice(chosen, weights)


def _router_warps(hidden: int) -> int:
    """As few as hold a row of the router in registers: within one warp the choice needs no barriers."""
    return 1 if hidden <= 2048 else 2 if hidden <= 4096 else 4


def choose_rows_reference(hidden: Tensor, norm_weight: Tensor, eps: float, experts: Experts) -> ExpertChoice:
    x = rms_norm_reference(hidden, norm_weight if experts.router_norm is None else experts.router_norm, eps)
    return choose_reference(F.linear(x, experts.router, experts.router_bias), experts)


def router_scores(x: Tensor, experts: Experts) -> Tensor:
    """x: [tokens, hidden], normed → [tokens, routed (+ 1)], the scores of a token side by side"""
    if experts.aligned_router is None:
        return F.linear(x, experts.router, experts.router_bias)
    # the gate of shared experts makes the rows odd, for which libraries have only kernels of older devices
    scores = F.linear(x, experts.aligned_router)[:, : len(experts.router)]
    return scores if experts.router_bias is None else scores + experts.router_bias


def list_pairs(logits: Tensor, experts: Experts) -> PairLists:
    """logits: [tokens, routed (+ 1)], the scores of a token side by side"""
    if not has_kernels(logits):
        return list_pairs_reference(logits, experts)
    tokens, device = len(logits), logits.device
    weights = torch.empty((tokens, experts.slots), dtype=torch.float32, device=device)
    counts = torch.zeros(experts.num_experts, dtype=torch.int32, device=device)
    members = torch.empty((experts.num_experts, tokens), dtype=torch.int32, device=device)
    _list_pairs_kernel[(tokens,)](
        logits,
        experts.bias,
        experts.scales,
        weights,
        counts,
        members,
        tokens,
        SCORES_STRIDE=logits.stride(0),
        num_warps=1,
        **_choice_constants(experts),
        **launch_options(device),
    )
    return PairLists(weights, counts, members)


def list_pairs_reference(logits: Tensor, experts: Experts) -> PairLists:
    choice = choose_reference(logits, experts)
    by_pair = choice.experts.flatten()
    members = torch.zeros((experts.num_experts, len(logits)), dtype=torch.int32, device=logits.device)
    for expert in range(experts.num_experts):
        (pairs,) = (by_pair == expert).nonzero(as_tuple=True)
        members[expert, : len(pairs)] = pairs
    counts = torch.bincount(by_pair, minlength=experts.num_experts).to(torch.int32)
    return PairLists(choice.weights, counts, members)


def held_choice(choice: ExpertChoice, experts: Experts) -> ExpertChoice:
    """The choice by the ids of the held experts. An expert that is not held becomes the first one, with weight 0:
    its GEMV is computed and not used, because leaving it out of a small batch would take longer."""
    if experts.slot_of is not None:
        slot = experts.slot_of[choice.experts.long()]
        return ExpertChoice(slot.clamp(min=0), choice.weights.where(slot >= 0, 0.0))
    if experts.num_held == experts.num_routed:
        return choice
    is_shared = choice.experts >= experts.num_routed
    number = choice.experts - experts.first
    is_held = (number >= 0) & (number < experts.num_held)
    number = number.where(is_held, 0).where(~is_shared, choice.experts - experts.num_routed + experts.num_held)
    return ExpertChoice(number.to(torch.int32), choice.weights.where(is_held | is_shared, 0.0))


def held_lists(lists: PairLists, experts: Experts) -> PairLists:
    """The lists of the held experts."""
    if experts.expert_on is not None:
        return PairLists(lists.weights, lists.counts[experts.expert_on], lists.members[experts.expert_on])
    if experts.num_held == experts.num_routed:
        return lists
    parts = (slice(experts.first, experts.first + experts.num_held), slice(experts.num_routed, experts.num_experts))
    counts = torch.cat([lists.counts[part] for part in parts])
    return PairLists(lists.weights, counts, torch.cat([lists.members[part] for part in parts]))


@cache
def _counters(device: torch.device) -> Tensor:
    """The number of finished programs of each row. Every launch resets them to zero, so that launches
    on two streams must not overlap: all models of a worker compute on one."""
    return torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)


@jit
def _choose_rows_kernel(
    x,
    norm_weight,
    router,
    router_bias,
    bias,
    scales,
    scores,
    chosen,
    weights,
    counters,
    eps,
    HIDDEN: tl.constexpr,
    SCORES: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    ROUTED: tl.constexpr,
    ROUTED_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE: tl.constexpr,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and BLOCK_OUT scores. The last program of a row to finish makes the choice.

    The next kernel starts only after the rows are there, so that it may read them at once.
    """
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(1)
    column = tl.arange(0, BLOCK_IN)
    column_inside = column < HIDDEN
    inside = (output < SCORES)[:, None] & column_inside[None, :]
    tile = tl.load(router + output[:, None] * HIDDEN + column[None, :], mask=inside, other=0.0)
    gain = tl.load(norm_weight + column, mask=column_inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * HIDDEN + column, mask=column_inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    score = tl.sum(tile.to(tl.float32) * (value * gain)[None, :], 1) * scale
    if ADDED:
        score += tl.load(router_bias + output, mask=output < SCORES, other=0.0).to(tl.float32)
    tl.store(scores + row * SCORES + output, score, mask=output < SCORES)
    tl.debug_barrier()
    done = tl.atomic_add(counters + row, 1, sem="acq_rel")
    if done < tl.num_programs(0) - 1:
        return

    tl.store(counters + row, 0)
    expert, weight = _chosen_experts(
        scores + row * SCORES,
        bias,
        scales,
        ROUTED,
        ROUTED_BLOCK,
        TOP_K,
        SLOTS,
        SLOTS_BLOCK,
        RENORMALISE,
        SIGMOID,
        BIASED,
        SCALED,
        SCALE,
        GATED,
        GROUPS,
        KEPT_GROUPS,
    )
    slot = tl.arange(0, SLOTS_BLOCK)
    tl.store(chosen + row * SLOTS + slot, expert, mask=slot < SLOTS)
    tl.store(weights + row * SLOTS + slot, weight, mask=slot < SLOTS)


@jit(do_not_specialize=["tokens"])
def _list_pairs_kernel(
    logits,
    bias,
    scales,
    weights,
    counts,
    members,
    tokens,
    SCORES_STRIDE: tl.constexpr,
    ROUTED: tl.constexpr,
    ROUTED_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE: tl.constexpr,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token. The list of a shared expert has every token in order."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    expert, weight = _chosen_experts(
        logits + token.to(tl.int64) * SCORES_STRIDE,
        bias,
        scales,
        ROUTED,
        ROUTED_BLOCK,
        TOP_K,
        SLOTS,
        SLOTS_BLOCK,
        RENORMALISE,
        SIGMOID,
        BIASED,
        SCALED,
        SCALE,
        GATED,
        GROUPS,
        KEPT_GROUPS,
    )
    slot = tl.arange(0, SLOTS_BLOCK)
    pair = token * SLOTS + slot
    place = tl.atomic_add(counts + expert, 1, mask=slot < TOP_K, sem="relaxed")
    if SLOTS > TOP_K:
        is_shared = (slot >= TOP_K) & (slot < SLOTS)
        place = tl.where(is_shared, token, place)
        if token == 0:
            tl.store(counts + expert, tokens, mask=is_shared)
    tl.store(weights + pair, weight, mask=slot < SLOTS)
    tl.store(members + expert.to(tl.int64) * tokens + place, pair, mask=slot < SLOTS)


def _choice_constants(experts: Experts) -> dict[str, float]:
    return {
        "ROUTED": experts.num_routed,
        "ROUTED_BLOCK": triton.next_power_of_2(experts.num_routed),
        "TOP_K": experts.top_k,
        "SLOTS": experts.slots,
        "SLOTS_BLOCK": triton.next_power_of_2(experts.slots),
        "RENORMALISE": experts.renormalise,
        "SIGMOID": experts.rule.scoring == "sigmoid",
        "BIASED": experts.bias is not None,
        "SCALED": experts.scales is not None,
        "SCALE": experts.rule.scale,
        "GATED": experts.rule.gates_shared,
        "GROUPS": experts.rule.groups,
        "KEPT_GROUPS": experts.rule.kept_groups,
    }


@jit
def _kept(
    score,
    expert,
    ROUTED: tl.constexpr,
    ROUTED_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The scores, -inf outside the best groups. PAIRS: a group counts by its two best experts, else by the best."""
    group = expert // (ROUTED // GROUPS)
    of_group = tl.full((ROUTED_BLOCK,), -float("inf"), tl.float32)  # of each expert's group
    for number in tl.static_range(GROUPS):
        own = tl.where(group == number, score, -float("inf"))
        best = tl.max(own, 0)
        if PAIRS:
            index = tl.min(tl.where(own == best, expert, ROUTED_BLOCK), 0)
            best += tl.max(tl.where(expert == index, -float("inf"), own), 0)
        of_group = tl.where(group == number, best, of_group)
    is_chosen = group < 0
    for _ in tl.static_range(KEPT_GROUPS):
        left = tl.where(is_chosen, -float("inf"), of_group)
        index = tl.min(tl.where((left == tl.max(left, 0)) & (is_chosen == 0), group, ROUTED_BLOCK), 0)
        is_chosen = is_chosen | (group == index)
    return tl.where(is_chosen & (expert < ROUTED), score, -float("inf"))


@jit
def _in_order(bits):
    """The bits of floats as integers in the same order, and back: reductions of integers take one instruction."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _chosen_experts(
    scores,
    bias,
    scales,
    ROUTED: tl.constexpr,
    ROUTED_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE: tl.constexpr,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
):
    """The experts and weights of one token, [slots] each. The experts are distinct and valid for any scores, NaN
    too."""
    expert = tl.arange(0, ROUTED_BLOCK)
    slot = tl.arange(0, SLOTS_BLOCK)
    score = tl.load(scores + expert, mask=expert < ROUTED, other=0.0, cache_modifier=".cg").to(tl.float32)
    # A NaN compares false and would select no expert. The output is NaN anyway, through the values of the token.
    score = tl.where(score > -1.0e30, score, -1.0e30)
    score = tl.where(expert < ROUTED, score, -float("inf"))
    highest = tl.max(score, 0)
    every = tl.sigmoid(score) if SIGMOID else tl.exp(score - highest)
    total = 1.0 if SIGMOID else tl.sum(every, 0)
    if BIASED:  # the choice is by another order than that of the scores
        score = every / total + tl.load(bias + expert, mask=expert < ROUTED, other=0.0)
        score = tl.where(expert < ROUTED, score, -float("inf"))
    if GROUPS > KEPT_GROUPS:
        score = _kept(score, expert, ROUTED, ROUTED_BLOCK, GROUPS, KEPT_GROUPS, BIASED)
    key = _in_order(score.to(tl.int32, bitcast=True))
    chosen = tl.zeros((SLOTS_BLOCK,), tl.int32)
    keys = tl.zeros((SLOTS_BLOCK,), tl.int32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        index = tl.min(tl.where(key == best, expert, ROUTED_BLOCK), 0)
        chosen = tl.where(slot == rank, index, chosen)
        keys = tl.where(slot == rank, best, keys)
        key = tl.where(expert == index, -2147483648, key)
    if BIASED:
        own = tl.load(scores + chosen, mask=slot < TOP_K, other=0.0, cache_modifier=".cg").to(tl.float32)
        own = tl.where(own > -1.0e30, own, -1.0e30)
    else:
        own = _in_order(keys).to(tl.float32, bitcast=True)
    weight = tl.where(slot < TOP_K, tl.sigmoid(own) if SIGMOID else tl.exp(own - highest), 0.0)
    if RENORMALISE:
        total = tl.sum(weight, 0)
    weight *= SCALE / total
    if SCALED:
        weight *= tl.load(scales + chosen, mask=slot < TOP_K, other=0.0)
    if SLOTS > TOP_K:
        gate = tl.sigmoid(tl.load(scores + ROUTED, cache_modifier=".cg").to(tl.float32)) if GATED else 1.0
        chosen = tl.where(slot >= TOP_K, ROUTED + slot - TOP_K, chosen)
        weight = tl.where(slot >= TOP_K, gate, weight)
    return chosen, weight
