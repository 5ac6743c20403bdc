"""The reference of the sampling kernels with plain operations, one row at a time. CPUs draw with it."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.greedy import argmax_reference
from cortex.neuron.kernels.sampling.gumbel import gumbel_noise
from cortex.neuron.kernels.sampling.rows import (
    CUT,
    DRAFTED,
    DRAWN,
    EDITED,
    FLAGS,
    MIN_P,
    MOST,
    NUM_EDITS,
    PENALISED,
    REPETITION,
    RESTRICTED,
    SAMPLED,
    SEED,
    SEEN,
    TEMPERATURE,
    TOP_K,
    WINDOW,
    Draws,
    RowTables,
    number,
    unpacked,
)

_FEW = 1024
"""Top tokens that are ordered first: most cuts lie among them."""


class Row:
    """The options of one draw."""

    def __init__(self, draws: Draws, tables: RowTables, draw: int) -> None:
        self.draw = draw
        _, self.row, self.position, self.first, _, self.masked_by = draws.lines[draw].tolist()
        line = tables.options[self.row]
        column = line.tolist()
        self.flags, self.top_k, self.seed = column[number(FLAGS)], column[number(TOP_K)], column[number(SEED)]
        self.window, self.num_edits = column[number(WINDOW)], column[number(NUM_EDITS)]
        floats = line[number(TEMPERATURE) : number(REPETITION) + 1].to(torch.int32).view(torch.float32).tolist()
        self.temperature, self.top_p, self.log_min_p, self.presence, self.frequency, self.repetition = floats

    def has(self, flag: object) -> bool:
        return bool(self.flags & number(flag))


def draw_reference(logits: Tensor, draws: Draws, tables: RowTables) -> tuple[Tensor, Tensor]:
    """Tokens, and whether the logits of each draw are finite: [draws] int64, [draws] bool"""
    logits = logits.index_select(0, draws.index)
    highest = logits.float().amax(-1)
    tokens = [_token(logits[draw].float(), Row(draws, tables, draw), draws, tables) for draw in range(len(draws))]
    return torch.tensor(tokens, device=logits.device), highest.isfinite()


def top_logprobs_reference(logits: Tensor, draws: Draws, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens`; the `num_top` top tokens of each draw, and theirs."""
    logprobs = logits.index_select(0, draws.index).float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    top = logprobs.topk(num_top, dim=-1)
    return chosen, top.indices, top.values


def count_reference(tokens: Tensor, draws: Draws, tables: RowTables) -> None:
    """See `count_drawn`."""
    drafted, drawn = draws.lines[:, number(DRAFTED)].tolist(), tokens.tolist()
    for draw in range(len(draws)):
        row = Row(draws, tables, draw)
        if not row.has(PENALISED) or drafted[row.first : draw] != drawn[row.first : draw]:
            continue
        tally, history, token = tables.tally[row.row], tables.history[row.row], drawn[draw]
        tally[token] += number(DRAWN) if tally[token] & number(MOST) != number(MOST) else 0
        num_seen = int(tally[token]) >> 16 & number(MOST)
        tally[token] += number(SEEN) if num_seen == 0 or (row.window and num_seen < number(MOST)) else 0
        if row.window:
            history[min(row.position + 1, len(history) - 1)] = token
            if (left := row.position + 1 - row.window) >= 0:
                tally[history[left]] -= number(SEEN)


def _token(x: Tensor, row: Row, draws: Draws, tables: RowTables) -> int:
    x = _adjusted(x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf), row, draws, tables)
    if not row.has(SAMPLED):
        return int(argmax_reference(x[None])[0])
    x = x / row.temperature
    if row.has(CUT):
        x = cut_reference(x, row.top_k, row.top_p)
    if row.has(MIN_P):
        x = x.masked_fill(x < x.amax() + row.log_min_p, -torch.inf)
    seed, position = (torch.tensor([value], device=x.device) for value in (row.seed, row.position))
    return int(argmax_reference(x[None] + gumbel_noise(seed, position, tables.vocab))[0])


def _adjusted(x: Tensor, row: Row, draws: Draws, tables: RowTables) -> Tensor:
    """The logits of one draw after grammar mask, allowed tokens, edits and penalties."""
    if row.masked_by >= 0:
        x = x.masked_fill(~unpacked(draws.mask[row.masked_by, None], tables.vocab)[0], -torch.inf)
    if row.has(RESTRICTED):
        x = x.masked_fill(~unpacked(tables.allowed[row.row, None], tables.vocab)[0], -torch.inf)
    if row.has(EDITED):
        edited, values, until = tables.edits[row.row, :, : row.num_edits]
        holds = until > row.position
        x = x.index_add(0, edited[holds].long(), values.view(torch.float32)[holds])
    return _penalised(x, row, draws, tables) if row.has(PENALISED) else x


def _penalised(x: Tensor, row: Row, draws: Draws, tables: RowTables) -> Tensor:
    tally, checked = tables.tally[row.row].clone(), draws.lines[row.first : row.draw, number(DRAFTED)].tolist()
    begin = row.position - len(checked)
    for count, token in enumerate(checked, start=1):
        tally[token] += number(DRAWN) + number(SEEN)
        left = begin + count - row.window
        if row.window and left >= 0:
            gone = int(tables.history[row.row, left]) if left <= begin else checked[left - begin - 1]
            tally[gone] -= number(SEEN)
    drawn, seen = (tally & number(MOST)).float(), tally >> 16 & number(MOST)
    x = x - row.frequency * drawn - row.presence * (drawn > 0)
    return torch.where(seen > 0, torch.where(x > 0, x / row.repetition, x * row.repetition), x)


def cut_reference(x: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keeps the `top_k` highest, and of those the fewest that together reach `top_p`; always keeps the first. Equal
    ones are in the order of their ids. x: [vocab], other tokens become -inf"""
    vocab = len(x)
    for few in (min(_FEW, vocab), vocab):
        tokens = (x >= x.topk(few).values[-1]).nonzero()[:, 0] if few < vocab else torch.arange(vocab, device=x.device)
        ordered, order = x[tokens].sort(descending=True, stable=True)
        ordered, tokens = ordered[:top_k], tokens[order][:top_k]
        if len(tokens) < min(top_k, vocab) and top_k < vocab:
            continue
        weights = (ordered - ordered[0]).double().exp()
        total = weights.sum() if top_k < vocab else (x - ordered[0]).double().exp().sum()
        before = weights.cumsum(0) - weights
        count = max(1, int((before < top_p * total).sum())) if top_p < 1 else len(tokens)
        if count < len(tokens) or top_k < vocab or few == vocab:
            break
    return torch.full_like(x, -torch.inf).index_copy(0, tokens[:count], ordered[:count])
