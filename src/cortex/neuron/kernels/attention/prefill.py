"""Prefill attention: many query tokens per row, causal, over paged KV. Bound by arithmetic for long prompts.

Each program takes one tile of the tokens of one row, and one head. Rows of different lengths share a launch: the host
lists the tiles. The few tokens after a long cached prefix are few tiles with many keys: then several programs divide
the keys of a tile, and another kernel combines their parts. Reference: `paged.attention_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.decode import LOG2_E, WIDE, WIDE_WARPS, capped
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import PREFILL_TILE, Batch
from cortex.neuron.kernels.jit import (
    constant,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch_options,
    num_processors,
    tl,
    triton,
)
from cortex.neuron.kernels.shared_memory import SharedMemory, shared_memory

_LOG2_E = constant(LOG2_E)
TILES = ((128, 128, 8), (128, 64, 8), (64, 32, 4), (32, 16, 4))
"""Queries and keys per tile, and warps: the fastest on Hopper first."""
MAX_SPLITS = 16
SPLIT_KEYS = 512
"""Programs divide the keys of a tile only where each gets this many."""


def prefill_attention(
    q: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor, out: Tensor
) -> None:
    """q and out: the tokens of the prefill rows [tokens, heads, dim], contiguous, q rotated. Their KV is in the
    pages."""
    _, heads, dim = q.shape
    _, page_tokens, kv_heads, _ = key_pages.shape
    assert batch.prefill_tiles is not None
    dim_block = triton.next_power_of_2(dim)
    queries, keys, warps = fitting_tiles(dim_block, q.element_size(), shared_memory(q.device))
    parts = PREFILL_TILE // queries
    reach = batch.reach if rules.whole_pictures else None
    # The number of tokens alone decides: a captured graph serves rows of any length.
    splits = 1 if batch.batch_invariant else num_splits(len(q), heads, queries, q.device)
    partial = shares = None
    if splits > 1:
        partial = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        shares = torch.empty((splits, *q.shape[:2], 2), dtype=torch.float32, device=q.device)
    common = (
        batch.lengths[batch.num_decodes :],
        batch.prefill_offsets,
        batch.prefill_tiles,
        None if reach is None else reach[batch.num_decodes :],
        partial,
        shares,
        out,
    )
    options = {
        "HEADS": heads,
        "DIM": dim,
        "DIM_BLOCK": dim_block,
        "QUERY_TILE": queries,
        "KEY_TILE": keys,
        "PARTS": parts,
        "WINDOWED": rules.window is not None,
        "REACHES": reach is not None,
        "SPLIT_KEYS": SPLIT_KEYS,
        "num_warps": warps,
        **launch_options(q.device),
    }
    programs = (len(batch.prefill_tiles) * parts, heads)
    _prefill_kernel[(*programs, splits)](
        q,
        key_pages,
        value_pages,
        batch.page_table,
        rules.sinks,
        batch.rows[batch.num_decodes :],
        *common,
        rules.scale * LOG2_E,
        (rules.softcap or 0.0) * LOG2_E,
        batch.page_table.stride(0),
        splits,
        rules.window or 0,
        KV_HEADS=kv_heads,
        PAGE=page_tokens,
        SINKS=rules.sinks is not None,
        CAPPED=rules.softcap is not None,
        MASKED=batch.batch_invariant or rules.window is not None or reach is not None,
        SPLIT=splits > 1,
        num_stages=2,
        **options,
    )
    if splits > 1:
        _combine_kernel[programs](*common, splits, rules.window or 0, **options)


def num_splits(tokens: int, heads: int, queries: int, device: torch.device) -> int:
    """The programs that may divide the keys of a tile: two for each processor in all, where tiles are few."""
    tiles = -(-tokens // queries)
    return max(1, min(MAX_SPLITS, 2 * num_processors(device) // (tiles * heads)))


def fitting_tiles(dim_block: int, element_bytes: int, shared: SharedMemory) -> tuple[int, int, int]:
    """Queries, keys and warps: the first of TILES whose queries, keys, values and scores fit in shared memory."""
    for queries, keys, warps in TILES:
        in_heads = (queries + 2 * shared.copies * keys) * dim_block
        if shared.holds((in_heads + queries * keys) * element_bytes):
            return queries, keys, WIDE_WARPS if dim_block >= WIDE else warps
    return TILES[-1]


@jit
def _tile_of(tiles, offsets, lengths, reach, splits, window, QUERY_TILE: tl.constexpr,
             KEY_TILE: tl.constexpr, PARTS: tl.constexpr, WINDOWED: tl.constexpr, REACHES: tl.constexpr,
             SPLIT_KEYS: tl.constexpr):  # fmt: skip
    """What one program computes: its row, the row's first token in the step and number of tokens, this program's first
    in the row; the last position that each query sees; the keys that they see, and how many of them a program takes."""
    tile = tl.program_id(0) // PARTS
    prefill = tl.load(tiles + tile * 2)
    first = tl.load(tiles + tile * 2 + 1) + tl.program_id(0) % PARTS * QUERY_TILE
    offset = tl.load(offsets + prefill)
    count = tl.load(offsets + prefill + 1) - offset
    length = tl.load(lengths + prefill)
    token = first + tl.arange(0, QUERY_TILE)
    last = length - count + token
    oldest = length - count + first
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, oldest - window + 1) // KEY_TILE * KEY_TILE
    end = tl.minimum(length, oldest + QUERY_TILE)
    if REACHES:
        last = tl.load(reach + offset + token, mask=token < count, other=1) - 1
        end = tl.minimum(length, tl.maximum(end, tl.max(last, 0) + 1))
    share = tl.maximum(tl.cdiv(tl.cdiv(end - begin, KEY_TILE), splits) * KEY_TILE, SPLIT_KEYS)
    return prefill, offset, count, first, last, begin, end, share


# Slices after the decode rows have any alignment: do not compile a variant for each.
@jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=["rows", "lengths", "reach"])
def _prefill_kernel(
    q,
    key_pages,
    value_pages,
    table,
    sinks,
    rows,
    lengths,
    offsets,
    tiles,
    reach,
    partial,
    shares,
    out,
    scale,
    cap,
    table_stride,
    splits,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    REACHES: tl.constexpr,
    MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """MASKED: every tile goes through the same code, whichever of its keys the queries see."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    prefill, offset, count, first, last, begin, end, share = _tile_of(
        tiles, offsets, lengths, reach, splits, window, QUERY_TILE, KEY_TILE, PARTS, WINDOWED, REACHES, SPLIT_KEYS
    )
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    if PARTS > 1:  # noqa: SIM102 - the first is decided at compile time, the second at run time
        if first >= count:
            return
    own = begin  # the first key of this program
    if SPLIT:
        own = begin + tl.program_id(2) * share
        if (own >= end) & (tl.program_id(2) > 0):
            return
    length = tl.load(lengths + prefill)
    table_row = table + tl.load(rows + prefill) * table_stride

    token = first + tl.arange(0, QUERY_TILE)
    dim = tl.arange(0, DIM_BLOCK)
    dim_inside = dim < DIM
    inside = (token < count)[:, None] & dim_inside[None, :]
    line = (offset + token).to(tl.int64) * HEADS + head
    where = line[:, None] * DIM + dim[None, :]
    query = tl.load(q + where, mask=inside, other=0.0)
    position = length - count + token  # of each query in its sequence

    highest = tl.full((QUERY_TILE,), -float("inf"), tl.float32)
    total = tl.zeros((QUERY_TILE,), tl.float32)
    mixed = tl.zeros((QUERY_TILE, DIM_BLOCK), tl.float32)
    if SINKS:
        is_first = tl.program_id(2) == 0
        highest = tl.where(is_first, tl.load(sinks + head) * _LOG2_E, highest)
        total += tl.where(is_first, 1.0, 0.0)
    oldest = length - count + first
    # Tiles that all queries see completely need no mask. The last tiles, and all tiles of a window, do.
    unmasked = begin if MASKED else (oldest + 1) // KEY_TILE * KEY_TILE
    stop = end
    if SPLIT:
        stop = tl.minimum(end, own + share)
        unmasked = tl.minimum(tl.maximum(unmasked, own), stop)
    highest, total, mixed = _attend(
        query, highest, total, mixed, position, last, own, unmasked, stop, oldest, window, table_row, key_pages,
        value_pages, kv_head, scale, cap, KV_HEADS, DIM, DIM_BLOCK, PAGE, KEY_TILE, WINDOWED, CAPPED, SPLIT, False,
    )  # fmt: skip
    highest, total, mixed = _attend(
        query, highest, total, mixed, position, last, unmasked, stop, stop, oldest, window, table_row, key_pages,
        value_pages, kv_head, scale, cap, KV_HEADS, DIM, DIM_BLOCK, PAGE, KEY_TILE, WINDOWED, CAPPED, SPLIT, True,
    )  # fmt: skip
    if SPLIT:
        if begin + share < end:  # other programs have the rest
            part = line * splits + tl.program_id(2)
            tl.store(partial + part[:, None] * DIM + dim[None, :], mixed, mask=inside)
            tl.store(shares + part * 2, highest, mask=token < count)
            tl.store(shares + part * 2 + 1, total, mask=token < count)
        else:
            tl.store(out + where, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + where, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=["lengths", "reach"])
def _combine_kernel(
    lengths,
    offsets,
    tiles,
    reach,
    partial,
    shares,
    out,
    splits,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    REACHES: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The tiles whose keys several programs have divided: one softmax over all of them."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    _, offset, count, first, _, begin, end, share = _tile_of(
        tiles, offsets, lengths, reach, splits, window, QUERY_TILE, KEY_TILE, PARTS, WINDOWED, REACHES, SPLIT_KEYS
    )
    if (begin + share >= end) | (first >= count):
        return
    token = first + tl.arange(0, QUERY_TILE)
    dim = tl.arange(0, DIM_BLOCK)
    is_token = token < count
    inside = is_token[:, None] & (dim < DIM)[None, :]
    line = (offset + token).to(tl.int64) * HEADS + tl.program_id(1)
    highest = tl.full((QUERY_TILE,), -float("inf"), tl.float32)
    total = tl.zeros((QUERY_TILE,), tl.float32)
    mixed = tl.zeros((QUERY_TILE, DIM_BLOCK), tl.float32)
    for split in range(0, tl.cdiv(end - begin, share)):
        part = line * splits + split
        own = tl.load(shares + part * 2, mask=is_token, other=0.0)
        higher = tl.maximum(highest, own)
        base = tl.where(higher == -float("inf"), 0.0, higher)  # these queries see none of the keys so far
        shrink, gain = tl.exp2(highest - base), tl.exp2(own - base)
        total = total * shrink + tl.load(shares + part * 2 + 1, mask=is_token, other=1.0) * gain
        added = tl.load(partial + part[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
        mixed = mixed * shrink[:, None] + added * gain[:, None]
        highest = higher
    where = line[:, None] * DIM + dim[None, :]
    tl.store(out + where, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


@jit
def _attend(
    query,
    highest,
    total,
    mixed,
    position,
    last,
    begin,
    stop,
    end,
    oldest,
    window,
    table_row,
    key_pages,
    value_pages,
    kv_head,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the positions from `begin` to `stop` to the online softmax. oldest: the position of the first query"""
    dim = tl.arange(0, DIM_BLOCK)
    for tile in range(begin, stop, KEY_TILE):
        key_position = tile + tl.arange(0, KEY_TILE)
        if MASKED:
            held = key_position < end
            if WINDOWED:  # pages behind the window of the first query may belong to others by now
                held = held & (key_position > oldest - window)
            page = tl.load(table_row + key_position // PAGE, mask=held, other=0).to(tl.int64)
        else:
            page = tl.load(table_row + key_position // PAGE).to(tl.int64)
        slot = ((page * PAGE + key_position % PAGE) * KV_HEADS + kv_head) * DIM
        where = slot[:, None] + dim[None, :]
        if DIM == DIM_BLOCK:
            keys = tl.load(key_pages + where).to(query.dtype)
        else:
            keys = tl.load(key_pages + where, mask=(dim < DIM)[None, :], other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys))
        factor = scale
        if CAPPED:
            scores = capped(scores * scale, cap)
            factor = 1.0
        if MASKED:
            visible = key_position[None, :] <= last[:, None]
            if WINDOWED:
                visible = visible & (key_position[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * factor)
        base = higher
        if WINDOWED or SPLIT:
            base = tl.where(higher == -float("inf"), 0.0, higher)  # no key of this tile is visible
        shrink = tl.exp2(highest - base)
        weights = tl.exp2(scores * factor - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if DIM == DIM_BLOCK:
            values = tl.load(value_pages + where).to(query.dtype)
        else:
            values = tl.load(value_pages + where, mask=(dim < DIM)[None, :], other=0.0).to(query.dtype)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(values.dtype), values, mixed)
        highest = higher
    return highest, total, mixed
