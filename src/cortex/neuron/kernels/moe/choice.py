"""The choice of one token's experts by its scores, as a part of kernels."""

from __future__ import annotations

from cortex.neuron.kernels.jit import jit, tl, triton
from cortex.neuron.kernels.moe.experts import Experts


def choice_constants(experts: Experts) -> dict[str, float]:
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
def chosen_experts(
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
