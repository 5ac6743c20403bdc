"""The top tokens of each draw, and their log-probabilities: the top of each part of the vocabulary, then of those."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.sampling.rows import FLAGS, INDEX, ROW, TOP_LOGPROBS, WIDTH, Draws, RowTables, of_draw

MAX_SELECTED = 64
"""More top tokens than this are sorted."""
_PART = 4096


def top_logprobs(
    logits: Tensor, draws: Draws, tables: RowTables, normaliser: Tensor, num_top: int
) -> tuple[Tensor, Tensor]:
    """The `num_top` tokens with the highest logits, highest first, equal ones in order, and their log-probabilities:
    [draws, num_top] int64 and float32. Only those of rows that ask for them are computed."""
    device, count, vocab = logits.device, len(draws), tables.vocab
    num_top = min(num_top, vocab)
    if num_top > MAX_SELECTED:
        values, ids = logits.index_select(0, draws.index).float().sort(dim=-1, descending=True, stable=True)
        return ids[:, :num_top], values[:, :num_top] - normaliser[:, None]
    num_parts = triton.cdiv(vocab, _PART)
    values = torch.empty((count, num_parts, num_top), dtype=torch.float32, device=device)
    places = torch.empty((count, num_parts, num_top), dtype=torch.int32, device=device)
    ids = torch.empty((count, num_top), dtype=torch.int64, device=device)
    found = torch.empty((count, num_top), dtype=torch.float32, device=device)
    launch = launch_options(device)
    _parts_kernel[(num_parts, count)](
        logits, logits.stride(0), draws.lines, tables.options, values, places, vocab, num_top,
        PART=_PART, num_warps=4, **launch,
    )  # fmt: skip
    _top_kernel[(count,)](
        draws.lines, tables.options, values, places, normaliser, ids, found, num_parts * num_top, num_top,
        BLOCK=triton.next_power_of_2(num_parts * num_top), num_warps=4, **launch,
    )  # fmt: skip
    return ids, found


@jit(do_not_specialize=["num_top"])
def _parts_kernel(
    logits, stride, draws, table, values, places, vocab, num_top, PART: tl.constexpr, OVERLAP: tl.constexpr
):
    """One program per PART tokens of a draw."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    draw = tl.program_id(1).to(tl.int64)
    if tl.load(table + of_draw(draws, draw, ROW) * WIDTH + FLAGS).to(tl.int32) & TOP_LOGPROBS:
        token = part * PART + tl.arange(0, PART)
        x = tl.load(logits + of_draw(draws, draw, INDEX) * stride + token, mask=token < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        into = (draw * tl.num_programs(0) + part) * num_top
        # A token that was taken is behind all others, also those whose logit is -inf.
        rest = tl.where(token < vocab, token, 2147483647)
        for number in range(num_top):
            left = tl.where(rest < 2147483647, x, float("-inf"))
            best = tl.max(left, 0)
            place = tl.min(tl.where(left == best, rest, 2147483647), 0)
            tl.store(values + into + number, best)
            tl.store(places + into + number, place)
            rest = tl.where(token == place, 2147483647, rest)


@jit(do_not_specialize=["count", "num_top"])
def _top_kernel(
    draws, table, values, places, normaliser, ids, found, count, num_top, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """One program per draw: the top of the tops of its parts."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    draw = tl.program_id(0).to(tl.int64)
    if tl.load(table + of_draw(draws, draw, ROW) * WIDTH + FLAGS).to(tl.int32) & TOP_LOGPROBS:
        entry = tl.arange(0, BLOCK)
        x = tl.load(values + draw * count + entry, mask=entry < count, other=float("-inf"))
        rest = tl.load(places + draw * count + entry, mask=entry < count, other=2147483647)
        token = rest
        for number in range(num_top):
            left = tl.where(rest < 2147483647, x, float("-inf"))
            best = tl.max(left, 0)
            place = tl.min(tl.where(left == best, rest, 2147483647), 0)
            tl.store(ids + draw * num_top + number, place.to(tl.int64))
            tl.store(found + draw * num_top + number, best - tl.load(normaliser + draw))
            rest = tl.where(token == place, 2147483647, rest)
