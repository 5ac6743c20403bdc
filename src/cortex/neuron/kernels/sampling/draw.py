"""Draws one token for each draw of a step: two passes over the logits, four where a row cuts its vocabulary.

The first pass finds the top token of rows that draw greedily or from all tokens, and what the other rows need for their
cuts. Rows are computed in blocks of one size, so a draw does not depend on the rest of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import constant, gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.sampling.cuts import cut_vocabulary, key_shift, passes_cut, token_bits
from cortex.neuron.kernels.sampling.gumbel import MIX_1, MIX_2, POSITION_STRIDE, TOKEN_STRIDE
from cortex.neuron.kernels.sampling.rows import (
    ADJUSTING,
    CUT,
    FLAGS,
    INDEX,
    LOG_MIN_P,
    LOGPROBS,
    MIN_P,
    POSITION,
    ROW,
    SAMPLED,
    SEED,
    TEMPERATURE,
    WIDTH,
    Draws,
    RowTables,
    adjusted,
    adjusted_arguments,
    float_option,
    number,
    of_draw,
)

PART = 1024
SPAN = 4
_WARPS = 4
"""Parts per program, one after the other."""

_MIX_1 = constant(MIX_1 + (1 << 64))
_MIX_2 = constant(MIX_2 + (1 << 64))
_POSITION_STRIDE = constant(POSITION_STRIDE + (1 << 64))
_TOKEN_STRIDE = constant(TOKEN_STRIDE + (1 << 64))
_LARGEST_BELOW_ONE = constant(1.0 - 2.0**-24)

# What the first pass stores of each part.
RAW_HIGHEST = constant(0)
RAW_SUM = constant(1)
HIGHEST = constant(2)
MASS = constant(3)
BEST = constant(4)
NUM_FIGURES = constant(5)


class DrawnTokens(NamedTuple):
    tokens: Tensor
    """[draws] int64"""
    healthy: Tensor
    """[draws] bool: whether the logits are finite."""
    logprobs: Tensor
    """[draws] float32: of rows that ask for them."""
    normaliser: Tensor
    """[draws] float32: what log-probabilities subtract from the logits, of rows that ask for them."""


class FirstPass(NamedTuple):
    """The facts of each draw after all its logits were read."""

    figures: Tensor
    """[draws, NUM_FIGURES, parts] float32"""
    places: Tensor
    """[draws, parts] int32: the top token of each part."""
    highest: Tensor
    """[draws] float32: the highest adjusted logit."""
    drawn: DrawnTokens
    """Without the tokens of rows that cut their vocabulary: these are drawn later."""


def draw_tokens(logits: Tensor, draws: Draws, tables: RowTables, flags: int) -> DrawnTokens:
    """`flags`: those of all rows that draw, together. Everything is on one GPU.

    logits: [any, vocab], as `draws` says."""
    adjusts = bool(flags & ADJUSTING) or draws.is_masked
    figures, places, highest, drawn = first_pass(logits, draws, tables, adjusts=adjusts)
    if not (flags & number(SAMPLED) and flags & (number(CUT) | number(MIN_P))):
        return drawn
    cuts = drawn.tokens  # of no use to rows without a cut
    if flags & number(CUT):
        cuts = cut_vocabulary(logits, draws, tables, highest, figures, adjusts=adjusts)
    num_parts, launch = places.shape[1], launch_options(logits.device)
    given = (logits, logits.stride(0), *adjusted_arguments(draws, tables))
    _noise_kernel[(num_parts, len(draws))](
        *given,
        figures,
        places,
        highest,
        cuts,
        TOKEN_BITS=token_bits(tables.vocab),
        ADJUSTS=adjusts,
        PART=PART,
        SPAN=SPAN,
        num_warps=8,
        **launch,
    )
    _cut_row_kernel[(len(draws),)](
        logits, logits.stride(0), draws.lines, tables.options, figures, places,
        drawn.tokens, drawn.logprobs, drawn.normaliser, num_parts,
        BLOCK=triton.next_power_of_2(num_parts), num_warps=1, **launch,
    )  # fmt: skip
    return drawn


def first_pass(logits: Tensor, draws: Draws, tables: RowTables, *, adjusts: bool) -> FirstPass:
    """Draws the tokens of all rows that do not cut their vocabulary."""
    device, count = logits.device, len(draws)
    num_parts = triton.cdiv(tables.vocab, PART * SPAN)
    figures = torch.empty((count, number(NUM_FIGURES), num_parts), dtype=torch.float32, device=device)
    places = torch.empty((count, num_parts), dtype=torch.int32, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    healthy = torch.empty(count, dtype=torch.bool, device=device)
    logprobs, normaliser, highest = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(3))
    drawn, launch = DrawnTokens(tokens, healthy, logprobs, normaliser), launch_options(device)
    given = (logits, logits.stride(0), *adjusted_arguments(draws, tables))
    _scan_kernel[(num_parts, count)](
        *given, figures, places, ADJUSTS=adjusts, PART=PART, SPAN=SPAN, num_warps=_WARPS, **launch
    )
    _row_kernel[(count,)](
        logits, logits.stride(0), draws.lines, tables.options, figures, places, *drawn, highest, num_parts,
        BLOCK=triton.next_power_of_2(num_parts), num_warps=1, **launch,
    )  # fmt: skip
    return FirstPass(figures, places, highest, drawn)


@jit
def _mixed(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@jit
def _noise_base(table, row, position):
    """What the noise of all tokens at a position has in common."""
    seed = tl.load(table + row * WIDTH + SEED).to(tl.uint64, bitcast=True)
    return _mixed(seed + (position + 1).to(tl.uint64) * _POSITION_STRIDE)


@jit
def _noise(base, token):
    """`gumbel_noise` of a block of tokens."""
    bits = _mixed(base + (token + 1).to(tl.uint64) * _TOKEN_STRIDE) >> 1
    u = tl.minimum((bits.to(tl.int64).to(tl.float32) + 0.5) * 1.0842021724855044e-19, _LARGEST_BELOW_ONE)
    # -log(1 - u). Near 0 the logarithm of the difference would lose the digits that decide unlikely tokens.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return -tl.log(tl.where(u < 0.1, series, -tl.log(1 - u)))


@jit
def _scan_kernel(
    logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    figures, places, ADJUSTS: tl.constexpr, PART: tl.constexpr, SPAN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per SPAN parts of a draw. Every lane keeps its own best token until the end."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    draw = tl.program_id(1).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    inverse = 1 / float_option(table, row, TEMPERATURE)
    source = logits + of_draw(draws, draw, INDEX) * stride
    noise = _noise_base(table, row, of_draw(draws, draw, POSITION))
    is_cut = (flags & (CUT | MIN_P)) != 0
    raw_highest = float("-inf")
    highest = float("-inf")
    raw_sum = tl.zeros((PART,), tl.float32)
    mass = tl.zeros((PART,), tl.float32)
    best = tl.full((PART,), float("-inf"), tl.float32)
    place = tl.full((PART,), 2147483647, tl.int32)
    for count in range(SPAN):
        token = (tl.program_id(0) * SPAN + count) * PART + tl.arange(0, PART)
        is_token = token < vocab
        raw = tl.load(source + token, mask=is_token, other=float("-inf")).to(tl.float32)
        raw = tl.where(raw == raw, raw, float("inf"))
        x = adjusted(
            raw, token, is_token, draw, row, flags,
            draws, mask, table, edits, allowed, tally, history, capacity, context, vocab, ADJUSTS,
        )  # fmt: skip
        top = tl.maximum(highest, tl.max(x, 0))
        if flags & CUT:
            mass = _sum_of_exponentials(mass, highest, top, x, inverse)
        highest = top
        if ADJUSTS:
            top = tl.maximum(raw_highest, tl.max(raw, 0))
        if flags & LOGPROBS:
            raw_sum = _sum_of_exponentials(raw_sum, raw_highest, top, raw, 1.0)
        raw_highest = top
        if is_cut == 0:
            score = x
            if flags & SAMPLED:
                score = x * inverse + _noise(noise, token)
            is_better = is_token & ((score > best) | (place == 2147483647))
            best = tl.where(is_better, score, best)
            place = tl.where(is_better, token, place)
    num_parts = tl.num_programs(0)
    own = figures + draw * NUM_FIGURES * num_parts + tl.program_id(0)
    tl.store(own + RAW_HIGHEST * num_parts, raw_highest)
    tl.store(own + HIGHEST * num_parts, highest)
    if flags & LOGPROBS:
        tl.store(own + RAW_SUM * num_parts, tl.sum(raw_sum, 0))
    if flags & CUT:
        tl.store(own + MASS * num_parts, tl.sum(mass, 0))
    if is_cut == 0:
        top = tl.max(best, 0)
        tl.store(own + BEST * num_parts, top)
        tl.store(places + draw * num_parts + tl.program_id(0), tl.min(tl.where(best == top, place, 2147483647), 0))


@jit
def _sum_of_exponentials(total, before, top, x, inverse):
    """Adds the exponentials of x to those of earlier ones, relative to that of `top`, the highest of all; `before`: of
    the earlier ones."""
    scale = tl.where(before > float("-inf"), tl.exp((before - top) * inverse), 0.0)
    return total * scale + tl.where(x > float("-inf"), tl.exp((x - top) * inverse), 0.0)


@jit
def _top_token(figures, places, draw, num_parts, BLOCK: tl.constexpr):
    """The first of the parts with the best score."""
    part = tl.arange(0, BLOCK)
    own = figures + draw * NUM_FIGURES * num_parts + BEST * num_parts
    best = tl.load(own + part, mask=part < num_parts, other=float("-inf"))
    _, first = tl.max(best, 0, return_indices=True)
    token = tl.load(places + draw * num_parts + first).to(tl.int64)
    return tl.where(token < 2147483647, token, 0)  # no token may be drawn


@jit
def _row_kernel(
    logits, stride, draws, table, figures, places, tokens, healthy, logprobs, normaliser, highest, num_parts,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per draw: joins what the first pass has stored of its parts."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    draw = tl.program_id(0).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    part = tl.arange(0, BLOCK)
    own = figures + draw * NUM_FIGURES * num_parts + part
    raw_parts = tl.load(own + RAW_HIGHEST * num_parts, mask=part < num_parts, other=float("-inf"))
    raw_highest = tl.max(raw_parts, 0)
    parts = tl.load(own + HIGHEST * num_parts, mask=part < num_parts, other=float("-inf"))
    tl.store(highest + draw, tl.max(parts, 0))
    tl.store(healthy + draw, tl.abs(raw_highest) < float("inf"))
    normal = 0.0
    if flags & LOGPROBS:
        sums = tl.load(own + RAW_SUM * num_parts, mask=part < num_parts, other=0.0)
        total = tl.sum(tl.where(raw_parts > float("-inf"), sums * tl.exp(raw_parts - raw_highest), 0.0), 0)
        normal = raw_highest + tl.log(total)
        tl.store(normaliser + draw, normal)
    if (flags & (CUT | MIN_P)) == 0:
        token = _top_token(figures, places, draw, num_parts, BLOCK)
        tl.store(tokens + draw, token)
        if flags & LOGPROBS:
            logit = tl.load(logits + of_draw(draws, draw, INDEX) * stride + token).to(tl.float32)
            tl.store(logprobs + draw, logit - normal)


@jit
def _noise_kernel(
    logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    figures, places, highest, cuts,
    TOKEN_BITS: tl.constexpr, ADJUSTS: tl.constexpr, PART: tl.constexpr, SPAN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `_scan_kernel`, for rows that draw from a part of their tokens."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    draw = tl.program_id(1).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    if (flags & SAMPLED) & ((flags & (CUT | MIN_P)) != 0):
        noise = _noise_base(table, row, of_draw(draws, draw, POSITION))
        inverse = 1 / float_option(table, row, TEMPERATURE)
        source = logits + of_draw(draws, draw, INDEX) * stride
        floor = float("-inf")
        if flags & MIN_P:
            floor = tl.load(highest + draw) * inverse + float_option(table, row, LOG_MIN_P)
        cut = tl.load(cuts + draw)
        shift = key_shift(logits, flags)
        best = tl.full((PART,), float("-inf"), tl.float32)
        place = tl.full((PART,), 2147483647, tl.int32)
        for count in range(SPAN):
            token = (tl.program_id(0) * SPAN + count) * PART + tl.arange(0, PART)
            is_token = token < vocab
            x = tl.load(source + token, mask=is_token, other=float("-inf")).to(tl.float32)
            x = adjusted(
                x, token, is_token, draw, row, flags,
                draws, mask, table, edits, allowed, tally, history, capacity, context, vocab, ADJUSTS,
            )  # fmt: skip
            x = tl.where(x == x, x, float("inf"))
            scaled = x * inverse
            keeps = (x > float("-inf")) & (scaled >= floor)
            if flags & CUT:
                keeps = keeps & passes_cut(x, token, shift, cut, vocab, TOKEN_BITS)
            if tl.max(keeps.to(tl.int32), 0) != 0:
                score = scaled + _noise(noise, token)
                is_better = keeps & (score > best)
                best = tl.where(is_better, score, best)
                place = tl.where(is_better, token, place)
        num_parts = tl.num_programs(0)
        top = tl.max(best, 0)
        tl.store(figures + (draw * NUM_FIGURES + BEST) * num_parts + tl.program_id(0), top)
        tl.store(places + draw * num_parts + tl.program_id(0), tl.min(tl.where(best == top, place, 2147483647), 0))


@jit
def _cut_row_kernel(
    logits, stride, draws, table, figures, places, tokens, logprobs, normaliser, num_parts,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `_row_kernel`, for the rows of `_noise_kernel`."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    draw = tl.program_id(0).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    if (flags & SAMPLED) & ((flags & (CUT | MIN_P)) != 0):
        token = _top_token(figures, places, draw, num_parts, BLOCK)
        tl.store(tokens + draw, token)
        if flags & LOGPROBS:
            logit = tl.load(logits + of_draw(draws, draw, INDEX) * stride + token).to(tl.float32)
            tl.store(logprobs + draw, logit - tl.load(normaliser + draw))
