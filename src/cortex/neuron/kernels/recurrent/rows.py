"""A step of a recurrent layer on a GPU: decode rows advance by one token, prefill rows by a chunk of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.kernels.jit import jit, tl

Advance = Callable[[Tensor, Batch, Tensor], None]
"""(projected tokens, batch, out): writes `out` and advances the states of the rows."""


def advance_rows(
    projected: Tensor, batch: Batch, out: Tensor, *, step: Advance, chunks: Advance, few_tokens: Advance
) -> Tensor:
    """Fills `out` ([tokens, …]) and returns it. `step` takes the first `batch.num_decodes` tokens of what it is given,
    each of another row, `chunks` the tokens of all prefill rows, `few_tokens` decode rows that share a sequence."""
    if batch.batch_invariant:
        for turn, tokens in batch.once("turns", lambda: _turns(batch)):
            if tokens is None:
                step(projected, turn, out)
            else:
                part = torch.empty((len(tokens), *out.shape[1:]), dtype=out.dtype, device=out.device)
                step(projected[tokens], turn, part)
                out[tokens] = part
        return out
    if batch.shares_rows:
        few_tokens(projected, batch, out)
        return out
    decodes = batch.num_decodes
    if decodes:
        step(projected, batch, out)
    if batch.num_prefills:
        chunks(projected[decodes:], batch, out[decodes:])
    return out


def pieces(batch: Batch, *states: Tensor) -> Iterator[PrefillRow]:
    """The prefill rows as references compute them: each up to its cut, and from there on. Before it continues, the
    caller has advanced `states` ([slots, …]) by the piece that it got; then the states at the cut are saved."""
    for row in batch.prefills:
        if row.cut:
            yield PrefillRow(row.row, row.start, row.cut, row.offset)
            for state in states:
                state[row.slot] = state[row.row]
        yield PrefillRow(row.row, row.start + row.cut, row.count - row.cut, row.offset + row.cut)


@jit
def chunk_bounds(index, cut, count, CHUNK: tl.constexpr):
    """The first token of a chunk of a prefill row, and the end of its tokens. A chunk ends at the cut. After the last
    chunk, the first token is not below `count`."""
    before = tl.cdiv(cut, CHUNK)
    is_before = index < before
    first = tl.where(is_before, index * CHUNK, cut + (index - before) * CHUNK)
    return first, tl.minimum(first + CHUNK, tl.where(is_before, cut, count))


def one_by_one(batch: Batch) -> list[Batch]:
    """The decode rows of a step in which several may be of one sequence, each as a batch of its own, in order."""
    return [
        replace(batch, num_decodes=1, rows=row, positions=position, shares_rows=False)
        for row, position in zip(batch.rows.split(1), batch.positions.split(1), strict=True)
    ]


def _turns(batch: Batch) -> list[tuple[Batch, Tensor | None]]:
    """The first token of every row as a batch of decode rows, then the second, and so on, each with the indices of its
    tokens. None: all tokens of the step, in order."""
    if len(batch.rows) == len(batch.tokens):
        return [(replace(batch, num_decodes=len(batch.rows)), None)]
    turns: list[tuple[Batch, Tensor | None]] = []
    for number in range(max(row.count for row in batch.prefills)):
        here = [(index, row.offset + number) for index, row in enumerate(batch.prefills) if row.count > number]
        rows, tokens = torch.tensor(here, device=batch.rows.device).unbind(1)
        turn = replace(batch, num_decodes=len(here), rows=batch.rows[rows], positions=batch.positions[tokens])
        turns.append((turn, tokens))
    return turns
