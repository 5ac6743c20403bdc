"""Draws one token for each draw of a step: two passes over the logits, four where a row cuts its vocabulary.

The first pass finds the top token of rows that draw greedily or from all tokens, and what the other rows need for their
cuts. Rows are computed in blocks of one size, so a draw does not depend on the rest of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortex.neuron.kernels.gumbel import MIX_1, MIX_2, POSITION_STRIDE, TOKEN_STRIDE
from cortex.neuron.kernels.jit import constant, gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.sampling.cuts import composite, cut_vocabulary, key_shift
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

PART = 2048
"""Tokens per program."""

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
    """What is known of each draw once all its logits were read."""

    figures: Tensor
    """[draws, NUM_FIGURES, parts] float32"""
    places: Tensor
    """[draws, parts] int32: the top token of each part."""
    highest: Tensor
    """[draws] float32: the highest adjusted logit."""
    drawn: DrawnTokens
    """Of rows that cut their vocabulary, the tokens are not drawn yet."""


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
        *given, figures, places, highest, cuts, ADJUSTS=adjusts, PART=PART, num_warps=8, **launch
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
    num_parts = triton.cdiv(tables.vocab, PART)
    figures = torch.empty((count, number(NUM_FIGURES), num_parts), dtype=torch.float32, device=device)
    places = torch.empty((count, num_parts), dtype=torch.int32, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    healthy = torch.empty(count, dtype=torch.bool, device=device)
    logprobs, normaliser, highest = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(3))
    drawn, launch = DrawnTokens(tokens, healthy, logprobs, normaliser), launch_options(device)
    given = (logits, logits.stride(0), *adjusted_arguments(draws, tables))
    _scan_kernel[(num_parts, count)](*given, figures, places, ADJUSTS=adjusts, PART=PART, num_warps=8, **launch)
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
def _noise(table, row, position, token):
    """`gumbel_noise` of a block of tokens."""
    seed = tl.load(table + row * WIDTH + SEED).to(tl.uint64, bitcast=True)
    base = _mixed(seed + (position + 1).to(tl.uint64) * _POSITION_STRIDE)
    bits = _mixed(base + (token + 1).to(tl.uint64) * _TOKEN_STRIDE) >> 1
    u = tl.minimum((bits.to(tl.int64).to(tl.float32) + 0.5) * 1.0842021724855044e-19, _LARGEST_BELOW_ONE)
    # -log(1 - u). Near 0 the logarithm of the difference would lose the digits that decide unlikely tokens.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return -tl.log(tl.where(u < 0.1, series, -tl.log(1 - u)))


@jit
def _scan_kernel(
    logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    figures, places, ADJUSTS: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per PART tokens of a draw."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    num_parts = tl.num_programs(0)
    draw = tl.program_id(1).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    token = part * PART + tl.arange(0, PART)
    is_token = token < vocab
    raw = tl.load(logits + of_draw(draws, draw, INDEX) * stride + token, mask=is_token, other=float("-inf")).to(
        tl.float32
    )
    raw = tl.where(raw == raw, raw, float("inf"))
    raw_highest = tl.max(raw, 0)
    raw_sum = 0.0
    if flags & LOGPROBS:
        raw_sum = tl.sum(tl.where(raw > float("-inf"), tl.exp(raw - raw_highest), 0.0), 0)
    x = adjusted(
        raw, token, is_token, draw, row, flags,
        draws, mask, table, edits, allowed, tally, history, capacity, context, vocab, ADJUSTS,
    )  # fmt: skip
    highest = tl.max(x, 0)
    mass = 0.0
    score = x
    if flags & SAMPLED:
        temperature = float_option(table, row, TEMPERATURE)
        if flags & CUT:
            mass = tl.sum(tl.where(x > float("-inf"), tl.exp((x - highest) / temperature), 0.0), 0)
        if (flags & (CUT | MIN_P)) == 0:
            score = x / temperature + _noise(table, row, of_draw(draws, draw, POSITION), token)
    best, place = tl.max(score, 0, return_indices=True)
    own = figures + draw * NUM_FIGURES * num_parts + part
    tl.store(own + RAW_HIGHEST * num_parts, raw_highest)
    tl.store(own + RAW_SUM * num_parts, raw_sum)
    tl.store(own + HIGHEST * num_parts, highest)
    tl.store(own + MASS * num_parts, mass)
    tl.store(own + BEST * num_parts, best)
    tl.store(places + draw * num_parts + part, part * PART + place)


@jit
def _top_token(figures, places, draw, num_parts, BLOCK: tl.constexpr):
    """The first of the parts with the best score."""
    part = tl.arange(0, BLOCK)
    own = figures + draw * NUM_FIGURES * num_parts + BEST * num_parts
    best = tl.load(own + part, mask=part < num_parts, other=float("-inf"))
    _, first = tl.max(best, 0, return_indices=True)
    return tl.load(places + draw * num_parts + first).to(tl.int64)


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
    token = _top_token(figures, places, draw, num_parts, BLOCK)
    tl.store(tokens + draw, token)
    if flags & LOGPROBS:
        logit = tl.load(logits + of_draw(draws, draw, INDEX) * stride + token).to(tl.float32)
        tl.store(logprobs + draw, logit - normal)


@jit
def _noise_kernel(
    logits, stride, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    figures, places, highest, cuts, ADJUSTS: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `_scan_kernel`, for rows that draw from a part of their tokens."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    num_parts = tl.num_programs(0)
    draw = tl.program_id(1).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    if (flags & SAMPLED) & ((flags & (CUT | MIN_P)) != 0):
        token = part * PART + tl.arange(0, PART)
        is_token = token < vocab
        x = tl.load(logits + of_draw(draws, draw, INDEX) * stride + token, mask=is_token, other=float("-inf")).to(
            tl.float32
        )
        shift = key_shift(logits, flags)
        x = adjusted(
            x, token, is_token, draw, row, flags,
            draws, mask, table, edits, allowed, tally, history, capacity, context, vocab, ADJUSTS,
        )  # fmt: skip
        temperature = float_option(table, row, TEMPERATURE)
        x = tl.where(x == x, x, float("inf"))
        keeps = is_token & (x > float("-inf"))
        if flags & CUT:
            keeps = keeps & (composite(x, token, shift, vocab) >= tl.load(cuts + draw))
        x = x / temperature
        if flags & MIN_P:
            keeps = keeps & (x >= tl.load(highest + draw) / temperature + float_option(table, row, LOG_MIN_P))
        best = float("-inf")
        place = 0
        if tl.max(keeps.to(tl.int32), 0) != 0:
            score = tl.where(keeps, x + _noise(table, row, of_draw(draws, draw, POSITION), token), float("-inf"))
            best, place = tl.max(score, 0, return_indices=True)
        tl.store(figures + (draw * NUM_FIGURES + BEST) * num_parts + part, best)
        tl.store(places + draw * num_parts + part, part * PART + place)


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
