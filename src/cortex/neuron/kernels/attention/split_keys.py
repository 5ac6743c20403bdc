"""Where few tokens attend to many keys, several programs divide the keys of a tile; this combines their parts.

A program with a part of the keys leaves the highest score, the sum of weights and the weighted values of each query.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.decode_plan import KeyDivision
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, num_processors, tl, triton

MAX_SPLITS = 16
SPLIT_KEYS = 512
"""Programs divide the keys of a tile only where each gets this many."""
MAX_COMBINED_ROWS = 1024
MAX_CELLS = 1 << 16
"""Largest rows × kv heads of one launch of decode rows."""
PLANNED_ROWS, FEW_ROWS, PART_WORDS = 512, 16, 8
"""Decode rows whose keys are divided at once, where there are more than a few; and the integers that a program has of
its part."""
COMBINED, COMBINED_VALUES = 16, 1 << 14
"""Parts of a decode row that are combined at once, at most, and their values, which are in registers."""


def num_splits(tokens: int, tile_tokens: int, heads: int, processors: int) -> int:
    """How many programs may divide the keys of a tile of `tile_tokens`: two for each processor in all, where tiles
    are few. `heads`: programs of a tile. Pure."""
    return max(1, min(MAX_SPLITS, 2 * processors // (-(-tokens // tile_tokens) * heads)))


def combine(
    lengths: Tensor,
    offsets: Tensor | None,
    reach: Tensor | None,
    partial: Tensor | None,
    shares: Tensor | None,
    out: Tensor,
    splits: int,
    window: int,
    num_rows: int,
    kv_heads: int,
    **options: Any,
) -> None:
    """Fills `out` ([tokens, heads, dim]) where more than one program had keys of a token. `options`: those of the
    kernel that left `partial` ([tokens, heads, splits, dim]) and `shares` ([tokens, heads, splits, 2])."""
    tokens, heads, _ = out.shape
    # Mostly there is nothing to combine: no more programs than the device holds at once.
    _combine_kernel[(tokens, kv_heads if tokens < num_processors(out.device) else 1)](
        lengths,
        offsets,
        reach,
        partial,
        shares,
        out,
        splits,
        window,
        num_rows,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_BLOCK=triton.next_power_of_2(heads // kv_heads),
        ROWS_BLOCK=MAX_COMBINED_ROWS,
        num_warps=4,
        **options,
    )


class KeySplits:
    """How programs divide the keys of the decode rows of a step, on the device, because a captured graph serves many
    steps. Long rows have more programs: the longest of a step, with one, would keep all others waiting."""

    def __init__(
        self, lengths: Tensor, table_rows: Tensor, division: KeyDivision, window: int = 0, *, has_new: bool
    ) -> None:
        """`lengths` and `table_rows`: of each row. `has_new`: whether the newest key of a row is in the pages and
        belongs to a part."""
        num_rows, device = len(lengths), lengths.device
        self.of_programs = torch.empty((division.programs, PART_WORDS), dtype=torch.int32, device=device)
        """What `_parts_kernel` writes for each program"""
        self.of_rows = torch.empty((num_rows, 2), dtype=torch.int32, device=device)
        """The first program of each row and their number"""
        _parts_kernel[(1,)](
            lengths,
            table_rows,
            self.of_programs,
            self.of_rows,
            num_rows,
            window,
            0 if has_new else 1,
            division.shares,
            division.parts,
            division.programs,
            TILE=division.tile,
            WORDS=PART_WORDS,
            ROWS_BLOCK=FEW_ROWS if num_rows <= FEW_ROWS else PLANNED_ROWS,
            PARTS_BLOCK=PLANNED_ROWS // FEW_ROWS if num_rows <= FEW_ROWS else 4,
            num_warps=4,
        )


def splits_of(batch: Batch, division: KeyDivision, window: int = 0, *, has_new: bool) -> tuple[KeySplits, bool]:
    """The parts of the decode rows of a step, which all layers share, and whether they are new: the kernel that is
    launched next must not read them before its predecessor has ended. `has_new`: as of `KeySplits`."""
    made = []

    def make() -> KeySplits:
        made.append(True)
        return KeySplits(batch.lengths[: batch.num_decodes], batch.rows, division, window, has_new=has_new)

    return batch.once(("parts", division, window, has_new), make), bool(made)


def join(parts: KeySplits, partial: Tensor | None, sums: Tensor | None, out: Tensor) -> None:
    """Fills `out` ([rows, heads, dim]) where more than one program had keys of a decode row. They left `partial`
    ([programs, heads, dim]) and `sums` ([programs, heads, 2])."""
    rows, heads, dim = out.shape
    _join_kernel[(rows, heads)](
        parts.of_rows,
        partial,
        sums,
        out,
        HEADS=heads,
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        AT_ONCE=COMBINED,
        num_warps=4,
        **launch_options(out.device),
    )


@cache
def counters(device: torch.device) -> Tensor:
    """The number of finished splits of each (row, kv head). Every launch resets them to zero, so that launches
    on two streams must not overlap: all models of a worker compute on one."""
    return torch.zeros(MAX_CELLS, dtype=torch.int32, device=device)


@jit(do_not_specialize=["num_rows", "window", "left", "shares", "most", "programs"])
def _parts_kernel(
    lengths,
    table_rows,
    of_programs,
    of_rows,
    num_rows,
    window,
    left,
    shares,
    most,
    programs,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """For each program: the row, its row in the page table, its first key and the end of its keys, its part and the
    number of the row's parts, which is zero for a program without keys. Long rows come first: others fit behind them.
    left: the number of newest keys of a row that belong to no part."""
    keys = tl.zeros((ROWS_BLOCK,), tl.int64)
    for start in range(0, num_rows, ROWS_BLOCK):
        row = start + tl.arange(0, ROWS_BLOCK)
        first, end = _seen(lengths, row, num_rows, window, left)
        keys += end - first
    share = tl.minimum(tl.maximum(TILE, tl.cdiv(tl.sum(keys, 0), shares)), 1 << 30).to(tl.int32)
    listed = 0
    for is_short in tl.static_range(2):
        for start in range(0, num_rows, ROWS_BLOCK):
            row = start + tl.arange(0, ROWS_BLOCK)
            first, end = _seen(lengths, row, num_rows, window, left)
            count = (end - first).to(tl.int32)
            wanted = tl.minimum(tl.maximum(1, (count + share // 2) // share), most)
            tokens = tl.maximum(1, tl.cdiv(tl.cdiv(count, wanted), TILE)) * TILE
            parts = tl.maximum(1, tl.cdiv(count, tokens))
            own = (row < num_rows) & ((parts == 1) == (is_short == 1))
            parts = tl.where(own, parts, 0)
            begin = listed + tl.cumsum(parts, 0) - parts
            tl.store(of_rows + row * 2, begin, mask=own)
            tl.store(of_rows + row * 2 + 1, parts, mask=own)
            table_row = tl.load(table_rows + row, mask=own, other=0)
            for before in range(0, tl.max(parts, 0), PARTS_BLOCK):
                part = before + tl.arange(0, PARTS_BLOCK)[None, :]
                words = of_programs + (begin[:, None] + part) * WORDS
                has = part < parts[:, None]
                begins = first[:, None] + part * tokens[:, None]
                tl.store(words, row[:, None], mask=has)
                tl.store(words + 1, table_row[:, None], mask=has)
                tl.store(words + 2, begins, mask=has)
                tl.store(words + 3, tl.minimum(end[:, None], begins + tokens[:, None]), mask=has)
                tl.store(words + 4, part, mask=has)
                tl.store(words + 5, parts[:, None], mask=has)
            listed += tl.sum(parts, 0)
    for start in range(listed, programs, ROWS_BLOCK):
        program = start + tl.arange(0, ROWS_BLOCK)
        tl.store(of_programs + program * WORDS + 5, 0, mask=program < programs)


@jit
def _seen(lengths, row, num_rows, window, left):
    """The first position that the newest token of a row sees, and the end of those that are divided."""
    length = tl.load(lengths + row, mask=row < num_rows, other=left)
    return tl.where(window > 0, tl.maximum(0, length - window), 0), length - left


@jit
def combine_last(
    partial,
    sums,
    finished,
    out,
    index,
    kv_head,
    begin,
    active,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    COMBINED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """If all other programs of the row and kv head are done: one softmax over their parts. begin: the first of the
    row's programs"""
    cell = index * KV_HEADS + kv_head
    tl.debug_barrier()
    done = tl.atomic_add(finished + cell, 1, sem="acq_rel")
    if done == active - 1:
        tl.store(finished + cell, 0)
        own = tl.arange(0, GROUP_PAD)
        dim = tl.arange(0, DIM_BLOCK)
        line = kv_head * GROUP + own
        highest = tl.full((GROUP_PAD,), -float("inf"), tl.float32)
        total = tl.zeros((GROUP_PAD,), tl.float32)
        mixed = tl.zeros((GROUP_PAD, DIM_BLOCK), tl.float32)
        for some in range(0, active, COMBINED):
            split = some + tl.arange(0, COMBINED)
            part = (begin + split).to(tl.int64)[:, None] * HEADS + line[None, :]
            theirs = (split < active)[:, None] & (own < GROUP)[None, :]
            their_highest = tl.load(sums + part * 2, mask=theirs, other=-float("inf"), cache_modifier=".cg")
            their_total = tl.load(sums + part * 2 + 1, mask=theirs, other=0.0, cache_modifier=".cg")
            where = part[:, :, None] * DIM + dim[None, None, :]
            inside = theirs[:, :, None] & (dim < DIM)[None, None, :]
            their_mixed = tl.load(partial + where, mask=inside, other=0.0, cache_modifier=".cg")  # [some, group, dim]
            higher = tl.maximum(highest, tl.max(their_highest, 0))
            base = tl.where(higher == -float("inf"), 0.0, higher)  # no head
            shrink = tl.exp2(highest - base)
            grow = tl.exp2(their_highest - base[None, :])
            total = total * shrink + tl.sum(their_total * grow, 0)
            mixed = mixed * shrink[:, None] + tl.sum(their_mixed * grow[:, :, None], 0)
            highest = higher
        inside = (own < GROUP)[:, None] & (dim < DIM)[None, :]
        tl.store(
            out + (index * HEADS + line)[:, None] * DIM + dim[None, :],
            (mixed / total[:, None]).to(out.dtype.element_ty),
            mask=inside,
        )


@jit
def _join_kernel(
    of_rows,
    partial,
    sums,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of one row, if several programs have divided its keys: one softmax over all."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(of_rows + row * 2)
    active = tl.load(of_rows + row * 2 + 1)
    if active == 1:
        return
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_BLOCK)
    highest = -float("inf")
    total = 0.0
    mixed = tl.zeros((DIM_BLOCK,), tl.float32)
    for some in range(0, active, AT_ONCE):
        split = some + tl.arange(0, AT_ONCE)
        part = (begin + split).to(tl.int64) * HEADS + head
        theirs = split < active
        their_highest = tl.load(sums + part * 2, mask=theirs, other=-float("inf"))
        their_total = tl.load(sums + part * 2 + 1, mask=theirs, other=0.0)
        inside = theirs[:, None] & (dim < DIM)[None, :]
        their_mixed = tl.load(partial + part[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
        higher = tl.maximum(highest, tl.max(their_highest, 0))
        shrink = tl.exp2(highest - higher)
        grow = tl.exp2(their_highest - higher)
        total = total * shrink + tl.sum(their_total * grow, 0)
        mixed = mixed * shrink + tl.sum(their_mixed * grow[:, None], 0)
        highest = higher
    tl.store(out + (row * HEADS + head) * DIM + dim, (mixed / total).to(out.dtype.element_ty), mask=dim < DIM)


@jit
def keys_of(first, count, length, reach, splits, window, TOKENS: tl.constexpr, KEY_TILE: tl.constexpr,
             WINDOWED: tl.constexpr, REACHES: tl.constexpr, SPLIT_KEYS: tl.constexpr):  # fmt: skip
    """The keys that the tokens of a tile see, which begins at token `first` of its row, and how many of the keys one
    program takes. reach: of the row's tokens"""
    oldest = length - count + first
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, oldest - window + 1) // KEY_TILE * KEY_TILE
    end = tl.minimum(length, oldest + TOKENS)
    if REACHES:
        token = first + tl.arange(0, TOKENS)
        last = tl.load(reach + token, mask=token < count, other=0)
        end = tl.minimum(length, tl.maximum(end, tl.max(last, 0)))
    share = tl.maximum(tl.cdiv(tl.cdiv(end - begin, KEY_TILE), splits) * KEY_TILE, SPLIT_KEYS)
    return begin, end, share


@jit(do_not_specialize=["splits", "window", "num_rows"], do_not_specialize_on_alignment=["lengths", "reach"])
def _combine_kernel(
    lengths,
    offsets,
    reach,
    partial,
    shares,
    out,
    splits,
    window,
    num_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    REACHES: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token and the heads of some kv heads, whose keys several programs have divided: one softmax over all."""
    if OVERLAP:
        gdc_launch_dependents()
    step_token = tl.program_id(0)
    row = tl.arange(0, ROWS_BLOCK)
    ends = tl.load(offsets + 1 + row, mask=row < num_rows, other=2147483647)
    prefill = tl.sum((ends <= step_token).to(tl.int32), 0)
    if prefill >= num_rows:
        if OVERLAP:
            gdc_wait()
        return
    offset = tl.load(offsets + prefill)
    count = tl.load(offsets + prefill + 1) - offset
    first = (step_token - offset) // TOKENS * TOKENS
    begin, end, share = keys_of(
        first, count, tl.load(lengths + prefill), reach + offset if REACHES else reach, splits, window, TOKENS,
        KEY_TILE, WINDOWED, REACHES, SPLIT_KEYS,
    )  # fmt: skip
    if OVERLAP:
        gdc_wait()
    if begin + share >= end:
        return
    member = tl.arange(0, GROUP_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    inside = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    for kv_head in range(tl.program_id(1), KV_HEADS, tl.num_programs(1)):
        line = step_token.to(tl.int64) * HEADS + kv_head * GROUP + member
        highest = tl.full((GROUP_BLOCK,), -float("inf"), tl.float32)
        total = tl.zeros((GROUP_BLOCK,), tl.float32)
        mixed = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
        for split in range(0, tl.cdiv(end - begin, share)):
            part = line * splits + split
            own = tl.load(shares + part * 2, mask=member < GROUP, other=0.0)
            higher = tl.maximum(highest, own)
            base = tl.where(higher == -float("inf"), 0.0, higher)  # these queries see none of the keys so far
            shrink, gain = tl.exp2(highest - base), tl.exp2(own - base)
            total = total * shrink + tl.load(shares + part * 2 + 1, mask=member < GROUP, other=1.0) * gain
            added = tl.load(partial + part[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
            mixed = mixed * shrink[:, None] + added * gain[:, None]
            highest = higher
        where = line[:, None] * DIM + dim[None, :]
        tl.store(out + where, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
