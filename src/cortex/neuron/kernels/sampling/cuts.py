"""Top-k and top-p without a sort: the last token that each row keeps is found by selection.

Tokens are ordered by their logit, equal ones by their id. A token's place in this order is one integer, its composite;
a row keeps the tokens from one composite on, its cut. Three steps find it:

1. a sample of the row's tokens says between which two logits the cut lies, almost surely;
2. one pass counts and weighs what is above, and lists what is between;
3. the cut is found in the list, two bits of the composite at a time. If it is not there, or the list was too
   long, it is found among all tokens.

Weights are integers, so that their sum does not depend on the order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import constant, gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.sampling.rows import (
    CUT,
    EDITED,
    FLAGS,
    INDEX,
    PENALISED,
    ROW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WIDTH,
    Draws,
    RowTables,
    adjusted,
    adjusted_arguments,
    float_option,
    number,
    of_draw,
)

MAX_LISTED = 32768
SAMPLE = 4096
_PART = 2048
MAX_VOCAB = 1 << 20
_TOKEN_BITS = constant(20)
_LAST_TOKEN = constant(MAX_VOCAB - 1)
_LOWEST_KEY = constant(-(1 << 31))
_HIGHEST_KEY = constant((1 << 31) - 1)
_ONE = constant(float(1 << 40))
"""The weight of the top token. Those of a million tokens are below 2**60."""
_MARGIN = constant(4.0)
"""Standard deviations of a sample between the estimate of a cut and the limits of its list."""

# Per draw: what the second step counts.
_NUM_ABOVE = constant(0)
_MASS_ABOVE = constant(1)
_MASS_LISTED = constant(2)
_MASS_BELOW = constant(3)
_NUM_LISTED = constant(4)
_NUM_COUNTS = constant(5)
KEEPS_ALL = constant(-(1 << 63))


def cut_vocabulary(
    logits: Tensor, draws: Draws, tables: RowTables, highest: Tensor, figures: Tensor, *, adjusts: bool
) -> Tensor:
    """The cut of each draw whose row has one: [draws] int64.

    `highest`: the top adjusted logit of each draw. `figures`: those of the first pass over the logits, by part."""
    device, count, vocab = logits.device, len(draws), tables.vocab
    assert vocab <= MAX_VOCAB, f"cuts are made for up to {MAX_VOCAB} tokens"
    max_listed = min(MAX_LISTED, max(1024, triton.next_power_of_2(vocab) // 8))
    limits = torch.empty((count, 2), dtype=torch.int32, device=device)
    counts = torch.empty((count, number(_NUM_COUNTS)), dtype=torch.int64, device=device)
    listed = torch.empty((count, max_listed), dtype=torch.int64, device=device)
    cuts = torch.empty(count, dtype=torch.int64, device=device)
    given = adjusted_arguments(draws, tables)
    source = (logits, logits.stride(0))
    launch = launch_options(device)
    num_figures, num_parts = figures.shape[1:]
    _limits_kernel[(count,)](
        *source, *given, highest, figures, num_figures, num_parts, limits, counts,
        ADJUSTS=adjusts, BLOCK=triton.next_power_of_2(num_parts), SAMPLE=SAMPLE, MAX_LISTED=max_listed,
        num_warps=8, **launch,
    )  # fmt: skip
    shared = {"ADJUSTS": adjusts, "PART": _PART, "MAX_LISTED": max_listed, **launch}
    _list_kernel[(triton.cdiv(vocab, _PART), count)](
        *source, *given, highest, limits, counts, listed, num_warps=8, **shared
    )
    _cut_kernel[(count,)](*source, *given, highest, limits, counts, listed, cuts, num_warps=8, **shared)
    return cuts


@jit
def key_shift(logits, flags):
    """Bits of a key that say nothing: logits of 16 bits that no option changes need no more."""
    shift = 0
    if logits.dtype.element_ty == tl.bfloat16:
        shift = tl.where((flags & (EDITED | PENALISED)) == 0, 16, 0)
    return shift


@jit
def _key(x, shift):
    """An integer in the order of `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@jit
def composite(x, token, shift, vocab):
    """The place of each token in its row's order, highest first."""
    return (_key(x, shift).to(tl.int64) << _TOKEN_BITS) + (vocab - 1 - token)


@jit
def _weight(x, highest, temperature):
    return (tl.exp((x - highest) / temperature) * _ONE).to(tl.int64)


@jit
def _count_limits(keys, fewest, most):
    """The highest keys that at least `most` and at least `fewest` of `keys` reach; the lowest one if so many are not
    there."""
    low = tl.full((), _LOWEST_KEY, tl.int64)
    high = tl.full((), _LOWEST_KEY, tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(32):
        reach_low = tl.sum((keys >= (low + step).to(tl.int32)).to(tl.int32), 0)
        reach_high = tl.sum((keys >= (high + step).to(tl.int32)).to(tl.int32), 0)
        low = tl.where(reach_low >= most, low + step, low)
        high = tl.where(reach_high >= fewest, high + step, high)
        step = step >> 1
    return low.to(tl.int32), high.to(tl.int32)


@jit
def _mass_limits(keys, weights, limit):
    """The highest keys below which the weights surely do not, and probably do not, exceed `limit`: the standard error
    of their sum is added, and subtracted, `_MARGIN` times."""
    low = tl.full((), _LOWEST_KEY, tl.int64)
    high = tl.full((), _LOWEST_KEY, tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(32):
        below_low = tl.where(keys < (low + step).to(tl.int32), weights, 0.0)
        below_high = tl.where(keys < (high + step).to(tl.int32), weights, 0.0)
        most = tl.sum(below_low, 0) + _MARGIN * tl.sqrt(tl.sum(below_low * below_low, 0))
        least = tl.sum(below_high, 0) - _MARGIN * tl.sqrt(tl.sum(below_high * below_high, 0))
        low = tl.where(most <= limit, low + step, low)
        high = tl.where(least <= limit, high + step, high)
        step = step >> 1
    return low.to(tl.int32), high.to(tl.int32)


@jit
def _limits_kernel(
    logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    highest, figures, num_figures, num_parts, limits, counts,
    ADJUSTS: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr, MAX_LISTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per draw: the lowest and the highest key that are listed."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    draw = tl.program_id(0).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    if flags & CUT:
        for which in range(_NUM_COUNTS):
            tl.store(counts + draw * _NUM_COUNTS + which, 0)
        low = tl.full((), _LOWEST_KEY, tl.int32)
        high = tl.full((), _HIGHEST_KEY, tl.int32)
        if vocab > MAX_LISTED:
            sample = tl.arange(0, SAMPLE)
            token = (sample.to(tl.int64) * vocab // SAMPLE).to(tl.int32)
            is_token = token < vocab
            shift = key_shift(logits, flags)
            x = tl.load(logits + of_draw(draws, draw, INDEX) * stride + token).to(tl.float32)
            x = adjusted(
                x, token, is_token, draw, row, flags,
                draws, mask, table, edits, allowed, tally, history, capacity, context, vocab, ADJUSTS,
            )  # fmt: skip
            keys = _key(x, shift)
            top_k = tl.load(table + row * WIDTH + TOP_K).to(tl.int32)
            if top_k < vocab:
                # Where both apply, the cut of top-p lies among the tokens that top-k keeps.
                expected = top_k.to(tl.float32) * SAMPLE / vocab
                margin = _MARGIN * tl.sqrt(expected) + 4
                fewest = (expected - margin).to(tl.int32)
                low, top = _count_limits(keys, fewest, (expected + margin).to(tl.int32))
                if (fewest > 0) & (float_option(table, row, TOP_P) >= 1):
                    high = top
            else:
                temperature = float_option(table, row, TEMPERATURE)
                first = tl.load(highest + draw)
                part = tl.arange(0, BLOCK)
                own = figures + draw * num_figures * num_parts + part
                parts = tl.load(own + 2 * num_parts, mask=part < num_parts, other=float("-inf"))
                masses = tl.load(own + 3 * num_parts, mask=part < num_parts, other=0.0)
                mass = tl.sum(tl.where(masses > 0, masses * tl.exp((parts - first) / temperature), 0.0), 0)
                weights = tl.exp((x - first) / temperature)
                limit = (1 - float_option(table, row, TOP_P)) * mass * SAMPLE / vocab
                low, high = _mass_limits(keys, weights, limit)
        tl.store(limits + draw * 2, low)
        tl.store(limits + draw * 2 + 1, high)


@jit
def _list_kernel(
    logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    highest, limits, counts, listed,
    ADJUSTS: tl.constexpr, PART: tl.constexpr, MAX_LISTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per PART tokens of a draw: lists the tokens between the limits, and counts and weighs the others."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    draw = tl.program_id(1).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    if flags & CUT:
        token = tl.program_id(0) * PART + tl.arange(0, PART)
        is_token = token < vocab
        x = tl.load(logits + of_draw(draws, draw, INDEX) * stride + token, mask=is_token, other=float("-inf")).to(
            tl.float32
        )
        x = tl.where(x == x, x, float("inf"))
        shift = key_shift(logits, flags)
        x = adjusted(
            x, token, is_token, draw, row, flags,
            draws, mask, table, edits, allowed, tally, history, capacity, context, vocab, ADJUSTS,
        )  # fmt: skip
        key = _key(x, shift)
        is_above = is_token & (key > tl.load(limits + draw * 2 + 1))
        low = tl.load(limits + draw * 2)
        is_listed = is_token & (key >= low) & (is_above == 0)
        own = counts + draw * _NUM_COUNTS
        if float_option(table, row, TOP_P) < 1:
            weight = tl.exp((x - tl.load(highest + draw)) / float_option(table, row, TEMPERATURE))
            above = tl.sum(tl.where(is_above, weight, 0.0), 0)
            inside = tl.sum(tl.where(is_listed, weight, 0.0), 0)
            below = tl.sum(tl.where(is_token & (key < low), weight, 0.0), 0)
            tl.atomic_add(own + _MASS_ABOVE, (above * _ONE).to(tl.int64), sem="relaxed")
            tl.atomic_add(own + _MASS_LISTED, (inside * _ONE).to(tl.int64), sem="relaxed")
            tl.atomic_add(own + _MASS_BELOW, (below * _ONE).to(tl.int64), sem="relaxed")
        num_above = tl.sum(is_above.to(tl.int32), 0)
        if num_above > 0:
            tl.atomic_add(own + _NUM_ABOVE, num_above.to(tl.int64), sem="relaxed")
        count = is_listed.to(tl.int32)
        num_listed = tl.sum(count, 0)
        if num_listed > 0:
            start = tl.atomic_add(own + _NUM_LISTED, num_listed.to(tl.int64), sem="relaxed")
            place = start + tl.cumsum(count, 0) - 1
            into = listed + draw * MAX_LISTED + place
            tl.store(into, composite(x, token, shift, vocab), mask=is_listed & (place < MAX_LISTED))


@jit
def _cut_kernel(
    logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    highest, limits, counts, listed, cuts,
    ADJUSTS: tl.constexpr, PART: tl.constexpr, MAX_LISTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per draw: the composite of the last token that is kept."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    draw = tl.program_id(0).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    if flags & CUT:
        own = counts + draw * _NUM_COUNTS
        num_above = tl.load(own + _NUM_ABOVE)
        num_listed = tl.load(own + _NUM_LISTED)
        mass_above = tl.load(own + _MASS_ABOVE)
        mass_listed = tl.load(own + _MASS_LISTED)
        top_k = tl.load(table + row * WIDTH + TOP_K)
        top_p = float_option(table, row, TOP_P)
        temperature = float_option(table, row, TEMPERATURE)
        top = tl.load(highest + draw)
        source = logits + of_draw(draws, draw, INDEX) * stride
        shift = key_shift(logits, flags)
        num_bits = 32 - shift + _TOKEN_BITS
        lowest = -(tl.full((), 1, tl.int64) << (num_bits - 1))
        low = (tl.load(limits + draw * 2).to(tl.int64) << _TOKEN_BITS) - lowest
        high = (tl.load(limits + draw * 2 + 1).to(tl.int64) << _TOKEN_BITS) + _LAST_TOKEN - lowest
        cut = tl.full((), KEEPS_ALL, tl.int64)
        kept_mass = mass_above + mass_listed + tl.load(own + _MASS_BELOW)
        for criterion in range(2):  # top-k, then top-p of what it keeps
            applies = top_k < vocab
            target = top_k
            above = num_above
            inside = num_listed
            if criterion == 1:
                applies = top_p < 1
                target = tl.maximum((top_p.to(tl.float64) * kept_mass.to(tl.float64)).to(tl.int64), 1)
                above = mass_above
                inside = mass_listed
            if applies:
                is_listed = (num_listed <= MAX_LISTED) & (above < target) & (above + inside >= target)
                size = tl.full((), 0, tl.int64) + vocab
                more_num = tl.full((), 0, tl.int64)
                more_mass = tl.full((), 0, tl.int64)
                bit = num_bits - 2
                found = lowest
                reached = kept_mass
                if is_listed:
                    size = num_listed
                    reached = mass_above + mass_listed
                    more_num = num_above
                    more_mass = mass_above
                    while (bit > 0) & ((low >> bit) == (high >> bit)):
                        bit -= 2
                    if bit < num_bits - 2:
                        found = lowest + ((low >> (bit + 2)) << (bit + 2))
                num_from = more_num + size
                num_beyond = more_num
                while (bit >= 0) & (num_from - num_beyond > 1):
                    quarter = tl.full((), 1, tl.int64) << bit
                    nums_1 = tl.zeros((PART,), tl.int32)
                    nums_2 = tl.zeros((PART,), tl.int32)
                    nums_3 = tl.zeros((PART,), tl.int32)
                    masses_1 = tl.zeros((PART,), tl.int64)
                    masses_2 = tl.zeros((PART,), tl.int64)
                    masses_3 = tl.zeros((PART,), tl.int64)
                    for start in range(0, size, PART):
                        place = start + tl.arange(0, PART)
                        is_there = place < size
                        if is_listed:
                            places = tl.load(listed + draw * MAX_LISTED + place, mask=is_there, other=0)
                            key = (places >> _TOKEN_BITS).to(tl.int32) << shift
                            bits = (key ^ ((key >> 31) & 0x7FFFFFFF)) & (-1 << shift)
                            x = bits.to(tl.float32, bitcast=True)
                        else:
                            token = place.to(tl.int32)
                            x = tl.load(source + token, mask=is_there, other=float("-inf")).to(tl.float32)
                            x = tl.where(x == x, x, float("inf"))
                            x = adjusted(
                                x, token, is_there, draw, row, flags,
                                draws, mask, table, edits, allowed, tally, history, capacity, context, vocab, ADJUSTS,
                            )  # fmt: skip
                            places = composite(x, token, shift, vocab)
                        is_1 = is_there & (places >= found + quarter)
                        is_2 = is_there & (places >= found + 2 * quarter)
                        is_3 = is_there & (places >= found + 3 * quarter)
                        nums_1 += is_1.to(tl.int32)
                        nums_2 += is_2.to(tl.int32)
                        nums_3 += is_3.to(tl.int32)
                        if top_p < 1:
                            weight = _weight(x, top, temperature)
                            masses_1 += tl.where(is_1, weight, 0)
                            masses_2 += tl.where(is_2, weight, 0)
                            masses_3 += tl.where(is_3, weight, 0)
                    num_1 = more_num + tl.sum(nums_1, 0)
                    num_2 = more_num + tl.sum(nums_2, 0)
                    num_3 = more_num + tl.sum(nums_3, 0)
                    mass_1 = more_mass + tl.sum(masses_1, 0)
                    mass_2 = more_mass + tl.sum(masses_2, 0)
                    mass_3 = more_mass + tl.sum(masses_3, 0)
                    digit = 0
                    if criterion == 0:
                        digit = (num_1 >= target).to(tl.int32) + (num_2 >= target) + (num_3 >= target)
                    else:
                        digit = (mass_1 >= target).to(tl.int32) + (mass_2 >= target) + (mass_3 >= target)
                    found += digit * quarter
                    if digit == 0:
                        num_beyond = num_1
                    elif digit == 1:
                        num_from = num_1
                        num_beyond = num_2
                        reached = mass_1
                    elif digit == 2:
                        num_from = num_2
                        num_beyond = num_3
                        reached = mass_2
                    else:
                        num_from = num_3
                        reached = mass_3
                    bit -= 2
                if is_listed:
                    found = tl.maximum(found, lowest + low)  # what is below the list was not counted
                cut = tl.maximum(cut, found)
                kept_mass = reached
        tl.store(cuts + draw, cut)
