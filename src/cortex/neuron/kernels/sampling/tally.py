"""Counts drawn tokens for the penalties of later draws."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl
from cortex.neuron.kernels.sampling.rows import (
    DRAFTED,
    DRAWN,
    FIRST,
    FLAGS,
    MOST,
    PENALISED,
    POSITION,
    ROW,
    SEEN,
    WIDTH,
    WINDOW,
    Draws,
    RowTables,
    of_draw,
)


def count_drawn(tokens: Tensor, draws: Draws, tables: RowTables) -> None:
    """Adds the drawn tokens to the tallies of the rows with penalties, up to the first that is not the draft token.

    tokens: [draws] int64"""
    launch = launch_options(tokens.device)
    _count_kernel[(len(draws),)](
        tokens, draws.lines, tables.options, tables.tally, tables.history, tables.history.shape[-1], tables.vocab,
        num_warps=1, **launch,
    )  # fmt: skip


@jit
def _count_kernel(tokens, draws, table, tally, history, context, vocab, OVERLAP: tl.constexpr):
    """One program per draw. The first draw of each row counts all of them, in order."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    draw = tl.program_id(0).to(tl.int64)
    row = of_draw(draws, draw, ROW)
    flags = tl.load(table + row * WIDTH + FLAGS).to(tl.int32)
    if (flags & PENALISED) & (of_draw(draws, draw, FIRST) == draw):
        window = tl.load(table + row * WIDTH + WINDOW)
        place = draw
        follows = 1
        while follows != 0:
            token = tl.load(tokens + place)
            position = of_draw(draws, place, POSITION) + 1
            own = tally + row * vocab + token
            count = tl.load(own)
            count += tl.where((count & MOST) < MOST, DRAWN, 0)
            is_seen = ((count >> 16) & MOST) != 0
            is_full = ((count >> 16) & MOST) == MOST
            count += tl.where((window > 0) & (is_full == 0) | (is_seen == 0), SEEN, 0)
            tl.store(own, count)
            if window > 0:
                tl.debug_barrier()  # the token that leaves may be the same one
                tl.store(history + row * context + tl.minimum(position, context - 1), token.to(tl.int32))
                left = position - window
                if left >= 0:
                    gone = tally + row * vocab + tl.load(history + row * context + left).to(tl.int64)
                    tl.store(gone, tl.load(gone) - SEEN)
                tl.debug_barrier()
            follows = 0
            if token == of_draw(draws, place, DRAFTED):
                place += 1
                follows = 1
