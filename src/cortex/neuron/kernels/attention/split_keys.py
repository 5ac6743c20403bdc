"""Where few tokens attend to many keys, several programs divide the keys of a tile; this combines their parts.

A program with a part of the keys leaves the highest score, the sum of weights and the weighted values of each query.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, tl, triton

MAX_SPLITS = 16
SPLIT_KEYS = 512
"""Programs divide the keys of a tile only where each gets this many."""
MAX_COMBINED_ROWS = 1024


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
    _combine_kernel[(tokens, kv_heads)](
        lengths,
        offsets,
        reach,
        partial,
        shares,
        out,
        splits,
        window,
        num_rows,
        GROUP=heads // kv_heads,
        GROUP_BLOCK=triton.next_power_of_2(heads // kv_heads),
        ROWS_BLOCK=MAX_COMBINED_ROWS,
        num_warps=4,
        **options,
    )


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
    """One token and the heads of one kv head, whose keys several programs have divided: one softmax over all."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    step_token = tl.program_id(0)
    row = tl.arange(0, ROWS_BLOCK)
    ends = tl.load(offsets + 1 + row, mask=row < num_rows, other=2147483647)
    prefill = tl.sum((ends <= step_token).to(tl.int32), 0)
    if prefill >= num_rows:
        return
    offset = tl.load(offsets + prefill)
    count = tl.load(offsets + prefill + 1) - offset
    first = (step_token - offset) // TOKENS * TOKENS
    begin, end, share = keys_of(
        first, count, tl.load(lengths + prefill), reach + offset if REACHES else reach, splits, window, TOKENS,
        KEY_TILE, WINDOWED, REACHES, SPLIT_KEYS,
    )  # fmt: skip
    if begin + share >= end:
        return
    member = tl.arange(0, GROUP_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    inside = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    line = step_token.to(tl.int64) * HEADS + tl.program_id(1) * GROUP + member
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
