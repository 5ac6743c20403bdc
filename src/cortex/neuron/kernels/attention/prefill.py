"""Prefill attention: many query tokens per row, causal, over paged KV. Bound by arithmetic for long prompts.

Each program takes one tile of the tokens of one row, and one head. Rows of different lengths share a launch: the host
lists the tiles. Where there are few tokens, maybe after a long cached prefix, the heads that share keys are packed into
one tile, several programs divide the keys of the tile, and another kernel combines their parts. Reference:
`paged.attention_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.decode import LOG2_E, capped
from cortex.neuron.kernels.attention.decode_plan import WIDE, WIDE_WARPS
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.attention.split_keys import MAX_COMBINED_ROWS, SPLIT_KEYS, combine, keys_of, num_splits
from cortex.neuron.kernels.batch import PREFILL_TILE, Batch
from cortex.neuron.kernels.device_properties import properties_of
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
HOPPER = 9
"""The generation of cards that `hopper.py` is for, as the first number of their capability."""
TILES = ((128, 128, 8), (128, 64, 8), (64, 32, 4), (32, 16, 4))
"""Queries and keys per tile, and warps: the fastest on Hopper first."""
SHORT, SHORT_TOKENS, SHORT_BYTES = (64, 64, 4), 2048, 256
"""Faster on Hopper for up to this many tokens and heads of up to this size: two programs fit on a processor."""


def prefill_attention(
    q: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor, out: Tensor
) -> None:
    """q and out: the tokens of the prefill rows [tokens, heads, dim], contiguous, q rotated. Their KV is in the
    pages."""
    _, heads, dim = q.shape
    _, page_tokens, kv_heads, _ = key_pages.shape
    assert batch.prefill_tiles is not None
    if properties_of(q.device).capability[0] == HOPPER:
        from cortex.neuron.kernels.attention import hopper

        if hopper.takes(q, rules, batch, key_pages):
            hopper.prefill_attention(q, rules, batch, key_pages, value_pages, out)
            return
    dim_block = triton.next_power_of_2(dim)
    tokens, group = len(q), heads // kv_heads
    is_short = not batch.batch_invariant and tokens <= SHORT_TOKENS  # else other rows would decide over the tiles
    queries, keys, warps = fitting_tiles(is_short, dim_block, q.element_size(), shared_memory(q.device))
    reach = batch.reach if rules.whole_pictures else None
    # The number of tokens alone decides: a captured graph serves rows of any length.
    packed = group if queries % group == 0 else 1
    splits = num_splits(tokens, queries // packed, heads // packed, num_processors(q.device))
    if batch.batch_invariant or batch.num_prefills > MAX_COMBINED_ROWS:
        splits = 1
    packed = packed if splits > 1 else 1
    partial = shares = None
    if splits > 1:
        partial = torch.empty((tokens, heads, splits, dim), dtype=torch.float32, device=q.device)
        shares = torch.empty((tokens, heads, splits, 2), dtype=torch.float32, device=q.device)
    common = (
        batch.lengths[batch.num_decodes :],
        batch.prefill_offsets,
        None if reach is None else reach[batch.num_decodes :],
        partial,
        shares,
        out,
    )
    parts = triton.cdiv(min(PREFILL_TILE, tokens) if splits > 1 else PREFILL_TILE, queries // packed)
    options = {
        "HEADS": heads,
        "DIM": dim,
        "DIM_BLOCK": dim_block,
        "TOKENS": queries // packed,
        "KEY_TILE": keys,
        "WINDOWED": rules.window is not None,
        "REACHES": reach is not None,
        "SPLIT_KEYS": SPLIT_KEYS,
        **launch_options(q.device),
    }
    _prefill_kernel[(heads // packed, len(batch.prefill_tiles) * parts, splits)](
        q,
        key_pages,
        value_pages,
        batch.page_table,
        rules.sinks,
        batch.prefill_tiles,
        batch.rows[batch.num_decodes :],
        *common,
        rules.scale * LOG2_E,
        (rules.softcap or 0.0) * LOG2_E,
        batch.page_table.stride(0),
        parts,
        splits,
        rules.window or 0,
        KV_HEADS=kv_heads,
        PAGE=page_tokens,
        SINKS=rules.sinks is not None,
        CAPPED=rules.softcap is not None,
        MASKED=batch.batch_invariant or rules.window is not None or reach is not None,
        SPLIT=splits > 1,
        PACKED=packed,
        num_warps=warps,
        num_stages=2,
        **options,
    )
    if splits > 1:
        combine(*common, splits, rules.window or 0, batch.num_prefills, kv_heads, **options)


def fitting_tiles(is_short: bool, dim_block: int, element_bytes: int, shared: SharedMemory) -> tuple[int, int, int]:
    """Queries, keys and warps: SHORT where it is faster, else the first of TILES whose queries, keys, values and scores
    fit in shared memory. Pure."""
    if is_short and dim_block * element_bytes <= SHORT_BYTES and shared.copies == 2:
        return SHORT
    for queries, keys, warps in TILES:
        in_heads = (queries + 2 * shared.copies * keys) * dim_block
        if shared.holds((in_heads + queries * keys) * element_bytes):
            return queries, keys, WIDE_WARPS if dim_block >= WIDE else warps
    return TILES[-1]


# Slices after the decode rows have any alignment: do not compile a variant for each.
@jit(do_not_specialize=["parts", "splits", "window"], do_not_specialize_on_alignment=["rows", "lengths", "reach"])
def _prefill_kernel(
    q,
    key_pages,
    value_pages,
    table,
    sinks,
    tiles,
    rows,
    lengths,
    offsets,
    reach,
    partial,
    shares,
    out,
    scale,
    cap,
    table_stride,
    parts,
    splits,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    REACHES: tl.constexpr,
    MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """MASKED: every tile goes through the same code, whichever of its keys the queries see. PACKED: this many heads of
    a token are consecutive queries of a tile."""
    if OVERLAP:
        gdc_launch_dependents()
    QUERY_TILE: tl.constexpr = TOKENS * PACKED
    # All heads of a tile, then those of the next: the longest to compute begin first.
    tile = tl.program_id(1) // parts
    prefill = tl.load(tiles + tile * 2)
    first = tl.load(tiles + tile * 2 + 1) + tl.program_id(1) % parts * TOKENS  # token of this program in its row
    offset = tl.load(offsets + prefill)
    count = tl.load(offsets + prefill + 1) - offset
    length = tl.load(lengths + prefill)
    table_row = table + tl.load(rows + prefill) * table_stride
    if OVERLAP:
        gdc_wait()
    if first >= count:
        return
    begin, end, share = keys_of(
        first, count, length, reach + offset if REACHES else reach, splits, window, TOKENS, KEY_TILE, WINDOWED,
        REACHES, SPLIT_KEYS,
    )  # fmt: skip
    own = begin  # the first key of this program
    if SPLIT:
        own = begin + tl.program_id(2) * share
        if own >= end:
            return
    query_index = tl.arange(0, QUERY_TILE)
    token = first + query_index // PACKED
    head = tl.program_id(0) * PACKED + query_index % PACKED
    kv_head = tl.program_id(0) * PACKED // (HEADS // KV_HEADS)

    dim = tl.arange(0, DIM_BLOCK)
    inside = (token < count)[:, None] & (dim < DIM)[None, :]
    line = (offset + token).to(tl.int64) * HEADS + head
    where = line[:, None] * DIM + dim[None, :]
    query = tl.load(q + where, mask=inside, other=0.0)
    position = length - count + token  # of each query in its sequence
    last = position  # the last that it sees
    if REACHES:
        last = tl.load(reach + offset + token, mask=token < count, other=1) - 1

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
        held = key_position < end
        if WINDOWED:  # pages behind the window of the first query may belong to others by now
            held = held & (key_position > oldest - window)
        page = tl.load(table_row + key_position // PAGE, mask=held, other=0).to(tl.int64)
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
