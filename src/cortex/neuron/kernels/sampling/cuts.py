"""Top-k and top-p without a sort: the last token that each row keeps is found by selection.

Tokens are ordered by their logit, equal ones by their id. A token's place in this order is one integer, its composite;
a row keeps the tokens from one composite on, its cut. Three steps find it:

1. a sample of the row's tokens says between which two logits the cut lies, almost surely;
2. one pass counts and weighs what is above, and lists what is between;
3. a short list is sorted, and the cut is in it; in a longer one it is found two bits of the composite at a time. If it
   is not there, or the list was too long, it is found among all tokens.

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

MAX_LISTED = 16384
MAX_SORTED = 1024
SAMPLE = 8192
_PART = 1024
_SPAN = 4
_WARPS = 4
MAX_VOCAB = 1 << 20
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
_MASS = constant(3)
_NUM_LISTED = constant(4)
_NUM_COUNTS = constant(5)


def cut_vocabulary(
    logits: Tensor,
    draws: Draws,
    tables: RowTables,
    highest: Tensor,
    figures: Tensor,
    *,
    adjusts: bool,
    most_listed: int = MAX_LISTED,
    most_sorted: int = MAX_SORTED,
) -> Tensor:
    """The cut of each draw whose row has one: [draws] int64.

    `highest`: the top adjusted logit of each draw. `figures`: those of the first pass over the logits, by part.
    `most_listed` and `most_sorted`: powers of two."""
    device, count, vocab = logits.device, len(draws), tables.vocab
    assert vocab <= MAX_VOCAB, f"cuts are made for up to {MAX_VOCAB} tokens"
    max_listed = min(most_listed, max(1024, triton.next_power_of_2(vocab) // 16))
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
    shared = {"TOKEN_BITS": token_bits(vocab), "ADJUSTS": adjusts, "PART": _PART, "MAX_LISTED": max_listed, **launch}
    _list_kernel[(triton.cdiv(vocab, _PART * _SPAN), count)](
        *source, *given, highest, limits, counts, listed, SPAN=_SPAN, num_warps=_WARPS, **shared
    )
    num_warps = min(32, max(4, max_listed // 512))
    _cut_kernel[(count,)](
        *source, *given, highest, limits, counts, listed, cuts,
        MAX_SORTED=min(most_sorted, max_listed), num_warps=num_warps, **shared,
    )  # fmt: skip
    return cuts


def token_bits(vocab: int) -> int:
    """The bits of a token's id in a composite; even, so that composites are found two bits at a time."""
    bits = (vocab - 1).bit_length()
    return bits + bits % 2


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
def _composite(key, token, vocab, TOKEN_BITS: tl.constexpr):
    """The place of each token in its row's order, highest first."""
    return (key.to(tl.int64) << TOKEN_BITS) + (vocab - 1 - token)


@jit
def passes_cut(x, token, shift, cut, vocab, TOKEN_BITS: tl.constexpr):
    """Whether the row keeps each token: whether its composite is at least `cut`."""
    key = _key(x, shift)
    last_key = (cut >> TOKEN_BITS).to(tl.int32)
    last_token = vocab - 1 - (cut - ((cut >> TOKEN_BITS) << TOKEN_BITS)).to(tl.int32)
    return (key > last_key) | ((key == last_key) & (token <= last_token))


@jit
def _weight(x, highest, inverse):
    """`inverse`: of the temperature."""
    return (tl.exp((x - highest) * inverse) * _ONE).to(tl.int64)


@jit
def _count_limits(keys, fewest, most, shift):
    """The highest keys that at least `most` and at least `fewest` of `keys` reach; the lowest one if there are
    fewer keys."""
    low = tl.full((), _LOWEST_KEY, tl.int64) >> shift
    high = low
    step = -low
    for _ in range(32 - shift):
        reach_low = tl.sum((keys >= (low + step).to(tl.int32)).to(tl.int32), 0)
        reach_high = tl.sum((keys >= (high + step).to(tl.int32)).to(tl.int32), 0)
        low = tl.where(reach_low >= most, low + step, low)
        high = tl.where(reach_high >= fewest, high + step, high)
        step = step >> 1
    return low.to(tl.int32), high.to(tl.int32)


@jit
def _mass_limits(keys, weights, limit, shift):
    """The highest keys below which the weights surely do not, and probably do not, exceed `limit`: the standard error
    of their sum is added, and subtracted, `_MARGIN` times."""
    low = tl.full((), _LOWEST_KEY, tl.int64) >> shift
    high = low
    step = -low
    for _ in range(32 - shift):
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
        inverse = 1 / float_option(table, row, TEMPERATURE)
        first = tl.load(highest + draw)
        part = tl.arange(0, BLOCK)
        own = figures + draw * num_figures * num_parts + part
        parts = tl.load(own + 2 * num_parts, mask=part < num_parts, other=float("-inf"))
        masses = tl.load(own + 3 * num_parts, mask=part < num_parts, other=0.0)
        mass = tl.sum(tl.where(masses > 0, masses * tl.exp((parts - first) * inverse), 0.0), 0)
        tl.store(counts + draw * _NUM_COUNTS + _MASS, (mass * _ONE).to(tl.int64))
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
                low, top = _count_limits(keys, fewest, (expected + margin).to(tl.int32), shift)
                if (fewest > 0) & (float_option(table, row, TOP_P) >= 1):
                    high = top
            else:
                weights = tl.exp((x - first) * inverse)
                limit = (1 - float_option(table, row, TOP_P)) * mass * SAMPLE / vocab
                low, high = _mass_limits(keys, weights, limit, shift)
        tl.store(limits + draw * 2, low)
        tl.store(limits + draw * 2 + 1, high)


@jit
def _list_kernel(
    logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    highest, limits, counts, listed,
    TOKEN_BITS: tl.constexpr, ADJUSTS: tl.constexpr, PART: tl.constexpr, SPAN: tl.constexpr, MAX_LISTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per SPAN parts of a draw: lists the tokens between the limits, and counts and weighs the others."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    draw = tl.program_id(1).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    if flags & CUT:
        source = logits + of_draw(draws, draw, INDEX) * stride
        shift = key_shift(logits, flags)
        low = tl.load(limits + draw * 2)
        high = tl.load(limits + draw * 2 + 1)
        top = tl.load(highest + draw)
        inverse = 1 / float_option(table, row, TEMPERATURE)
        weighs = float_option(table, row, TOP_P) < 1
        own = counts + draw * _NUM_COUNTS
        above = tl.zeros((PART,), tl.float32)
        inside = tl.zeros((PART,), tl.float32)
        num_above = tl.zeros((PART,), tl.int32)
        for number in range(SPAN):
            token = (tl.program_id(0) * SPAN + number) * PART + tl.arange(0, PART)
            is_token = token < vocab
            x = tl.load(source + token, mask=is_token, other=float("-inf")).to(tl.float32)
            x = tl.where(x == x, x, float("inf"))
            x = adjusted(
                x, token, is_token, draw, row, flags,
                draws, mask, table, edits, allowed, tally, history, capacity, context, vocab, ADJUSTS,
            )  # fmt: skip
            key = _key(x, shift)
            is_above = is_token & (key > high)
            is_listed = is_token & (key >= low) & (key <= high)
            if weighs:
                weight = tl.exp((x - top) * inverse)
                above += tl.where(is_above, weight, 0.0)
                inside += tl.where(is_listed, weight, 0.0)
            num_above += is_above.to(tl.int32)
            count = is_listed.to(tl.int32)
            num_listed = tl.sum(count, 0)
            if num_listed > 0:
                start = tl.atomic_add(own + _NUM_LISTED, num_listed.to(tl.int64), sem="relaxed")
                place = start + tl.cumsum(count, 0) - 1
                into = listed + draw * MAX_LISTED + place
                place_in_order = _composite(key, token, vocab, TOKEN_BITS)
                tl.store(into, place_in_order, mask=is_listed & (place < MAX_LISTED))
        tl.atomic_add(own + _NUM_ABOVE, tl.sum(num_above, 0).to(tl.int64), sem="relaxed")
        if weighs:
            tl.atomic_add(own + _MASS_ABOVE, (tl.sum(above, 0) * _ONE).to(tl.int64), sem="relaxed")
            tl.atomic_add(own + _MASS_LISTED, (tl.sum(inside, 0) * _ONE).to(tl.int64), sem="relaxed")


@jit
def _from_each(places, weight, is_there, found, quarter):
    """How many elements there are from each of the next three quarters on, and their weight."""
    is_1 = is_there & (places >= found + quarter)
    is_2 = is_there & (places >= found + 2 * quarter)
    is_3 = is_there & (places >= found + 3 * quarter)
    return (
        tl.sum(is_1.to(tl.int32), 0).to(tl.int64),
        tl.sum(is_2.to(tl.int32), 0).to(tl.int64),
        tl.sum(is_3.to(tl.int32), 0).to(tl.int64),
        tl.sum(tl.where(is_1, weight, 0), 0),
        tl.sum(tl.where(is_2, weight, 0), 0),
        tl.sum(tl.where(is_3, weight, 0), 0),
    )


@jit
def _entry_weight(entries, shift, top, inverse, TOKEN_BITS: tl.constexpr):
    """The weight of tokens, given by their composites."""
    key = (entries >> TOKEN_BITS).to(tl.int32) << shift
    bits = (key ^ ((key >> 31) & 0x7FFFFFFF)) & (-1 << shift)
    return _weight(bits.to(tl.float32, bitcast=True), top, inverse)


@jit
def _sorted_cut(
    own, listed, num_listed, top_k, top_p, vocab, shift, top, inverse,
    TOKEN_BITS: tl.constexpr, MAX_SORTED: tl.constexpr,
):  # fmt: skip
    """The composite of the last token that is kept, and whether it is in the list. `own` and `listed`: of the draw."""
    place = tl.arange(0, MAX_SORTED)
    is_entry = place < num_listed
    entries = tl.load(listed + place, mask=is_entry, other=-(1 << 63))
    entries = tl.sort(entries, descending=True)
    last = num_listed - 1
    is_there = num_listed > 0
    kept_mass = tl.load(own + _MASS)
    mass_above = tl.load(own + _MASS_ABOVE)
    mass = tl.zeros((MAX_SORTED,), tl.int64)
    if top_p < 1:
        mass = mass_above + tl.cumsum(tl.where(is_entry, _entry_weight(entries, shift, top, inverse, TOKEN_BITS), 0), 0)
    if top_k < vocab:
        last = top_k - tl.load(own + _NUM_ABOVE) - 1
        is_there = is_there & (last >= 0) & (last < num_listed)
        kept_mass = tl.sum(tl.where(place == last, mass, 0), 0)
    if top_p < 1:
        target = tl.maximum((top_p.to(tl.float64) * kept_mass.to(tl.float64)).to(tl.int64), 1)
        reaching = tl.sum((is_entry & (mass < target)).to(tl.int64), 0)
        is_there = is_there & (mass_above < target) & (reaching < num_listed)
        last = tl.minimum(last, reaching)
    return tl.sum(tl.where(place == last, entries, 0), 0), is_there


@jit
def _searched_cut(
    logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    draw, row, flags, shift, top, inverse, top_k, top_p, limits, own, listed,
    TOKEN_BITS: tl.constexpr, ADJUSTS: tl.constexpr, PART: tl.constexpr, MAX_LISTED: tl.constexpr,
):  # fmt: skip
    """The composite of the last token that is kept, two bits at a time. `limits`, `own` and `listed`: of the draw."""
    num_above = tl.load(own + _NUM_ABOVE)
    num_listed = tl.load(own + _NUM_LISTED)
    mass_above = tl.load(own + _MASS_ABOVE)
    mass_listed = tl.load(own + _MASS_LISTED)
    source = logits + of_draw(draws, draw, INDEX) * stride
    num_bits = 32 - shift + TOKEN_BITS
    lowest = -(tl.full((), 1, tl.int64) << (num_bits - 1))
    low = (tl.load(limits).to(tl.int64) << TOKEN_BITS) - lowest
    high = ((tl.load(limits + 1).to(tl.int64) + 1) << TOKEN_BITS) - 1 - lowest
    # The part of the list that fits stays in registers.
    entry = tl.arange(0, MAX_LISTED)
    is_entry = entry < num_listed
    entries = tl.load(listed + entry, mask=is_entry, other=0)
    weights = tl.zeros((MAX_LISTED,), tl.int64)
    if top_p < 1:
        weights = _entry_weight(entries, shift, top, inverse, TOKEN_BITS)
    cut = lowest
    kept_mass = tl.load(own + _MASS)
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
            more_num = tl.full((), 0, tl.int64)
            more_mass = tl.full((), 0, tl.int64)
            num_from = tl.full((), 0, tl.int64) + vocab
            bit = num_bits - 2
            found = lowest
            reached = kept_mass
            if is_listed:
                reached = mass_above + mass_listed
                more_num = num_above
                more_mass = mass_above
                num_from = num_above + num_listed
                while (bit > 0) & ((low >> bit) == (high >> bit)):
                    bit -= 2
                if bit < num_bits - 2:
                    found = lowest + ((low >> (bit + 2)) << (bit + 2))
            num_beyond = more_num
            while (bit >= 0) & (num_from - num_beyond > 1):
                quarter = tl.full((), 1, tl.int64) << bit
                num_1 = tl.full((), 0, tl.int64)
                num_2 = tl.full((), 0, tl.int64)
                num_3 = tl.full((), 0, tl.int64)
                mass_1 = tl.full((), 0, tl.int64)
                mass_2 = tl.full((), 0, tl.int64)
                mass_3 = tl.full((), 0, tl.int64)
                if is_listed:
                    num_1, num_2, num_3, mass_1, mass_2, mass_3 = _from_each(entries, weights, is_entry, found, quarter)
                else:
                    for start in range(0, vocab, PART):
                        token = start + tl.arange(0, PART)
                        is_token = token < vocab
                        x = tl.load(source + token, mask=is_token, other=float("-inf")).to(tl.float32)
                        x = tl.where(x == x, x, float("inf"))
                        x = adjusted(
                            x, token, is_token, draw, row, flags,
                            draws, mask, table, edits, allowed, tally, history, capacity, context, vocab, ADJUSTS,
                        )  # fmt: skip
                        places = _composite(_key(x, shift), token, vocab, TOKEN_BITS)
                        weight = _weight(x, top, inverse)
                        one, two, three, own_1, own_2, own_3 = _from_each(places, weight, is_token, found, quarter)
                        num_1 += one
                        num_2 += two
                        num_3 += three
                        mass_1 += own_1
                        mass_2 += own_2
                        mass_3 += own_3
                num_1 += more_num
                num_2 += more_num
                num_3 += more_num
                mass_1 += more_mass
                mass_2 += more_mass
                mass_3 += more_mass
                digit = (num_1 >= target).to(tl.int32) + (num_2 >= target) + (num_3 >= target)
                if criterion == 1:
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
    return cut


@jit
def _cut_kernel(
    logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    highest, limits, counts, listed, cuts,
    TOKEN_BITS: tl.constexpr, ADJUSTS: tl.constexpr, PART: tl.constexpr, MAX_LISTED: tl.constexpr,
    MAX_SORTED: tl.constexpr, OVERLAP: tl.constexpr,
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
        num_listed = tl.load(own + _NUM_LISTED)
        top_k = tl.load(table + row * WIDTH + TOP_K)
        top_p = float_option(table, row, TOP_P)
        inverse = 1 / float_option(table, row, TEMPERATURE)
        top = tl.load(highest + draw)
        shift = key_shift(logits, flags)
        cut = tl.full((), 0, tl.int64)
        is_found = num_listed < 0
        if num_listed <= MAX_SORTED:
            cut, is_found = _sorted_cut(
                own, listed + draw * MAX_LISTED, num_listed, top_k, top_p, vocab, shift, top, inverse,
                TOKEN_BITS, MAX_SORTED,
            )  # fmt: skip
        if is_found == 0:
            cut = _searched_cut(
                logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
                draw, row, flags, shift, top, inverse, top_k, top_p, limits + draw * 2, own, listed + draw * MAX_LISTED,
                TOKEN_BITS, ADJUSTS, PART, MAX_LISTED,
            )  # fmt: skip
        tl.store(cuts + draw, cut)
