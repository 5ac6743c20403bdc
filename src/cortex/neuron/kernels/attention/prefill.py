"""Prefill attention: many query tokens per row, causal, over paged KV. Bound by arithmetic for long prompts.

Each program takes one tile of the tokens of one row, and one head. Rows of different lengths share a launch: the host
lists the tiles. Reference: `paged.attention_reference`.
"""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.attention.decode import LOG2_E, WIDE, WIDE_WARPS, capped
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import PREFILL_TILE, Batch
from cortex.neuron.kernels.jit import constant, gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.shared_memory import SharedMemory, shared_memory

_LOG2_E = constant(LOG2_E)
TILES = ((128, 128, 8), (128, 64, 8), (64, 32, 4), (32, 16, 4))
"""Queries and keys per tile, and warps: the fastest on Hopper first."""


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
    _prefill_kernel[(len(batch.prefill_tiles) * parts, heads)](
        q,
        key_pages,
        value_pages,
        batch.page_table,
        batch.rows[batch.num_decodes :],
        batch.lengths[batch.num_decodes :],
        batch.prefill_offsets,
        batch.prefill_tiles,
        rules.sinks,
        None if reach is None else reach[batch.num_decodes :],
        out,
        rules.scale * LOG2_E,
        (rules.softcap or 0.0) * LOG2_E,
        batch.page_table.stride(0),
        rules.window or 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_BLOCK=dim_block,
        PAGE=page_tokens,
        QUERY_TILE=queries,
        KEY_TILE=keys,
        PARTS=parts,
        WINDOWED=rules.window is not None,
        SINKS=rules.sinks is not None,
        CAPPED=rules.softcap is not None,
        REACHES=reach is not None,
        MASKED=batch.batch_invariant or rules.window is not None or reach is not None,
        num_warps=warps,
        num_stages=2,
        **launch_options(q.device),
    )


def fitting_tiles(dim_block: int, element_bytes: int, shared: SharedMemory) -> tuple[int, int, int]:
    """Queries, keys and warps: the first of TILES whose queries, keys, values and scores fit in shared memory."""
    for queries, keys, warps in TILES:
        in_heads = (queries + 2 * shared.copies * keys) * dim_block
        if shared.holds((in_heads + queries * keys) * element_bytes):
            return queries, keys, WIDE_WARPS if dim_block >= WIDE else warps
    return TILES[-1]


# Slices after the decode rows have any alignment: do not compile a variant for each.
@jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["rows", "lengths", "reach"])
def _prefill_kernel(
    q,
    key_pages,
    value_pages,
    table,
    rows,
    lengths,
    offsets,
    tiles,
    sinks,
    reach,
    out,
    scale,
    cap,
    table_stride,
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
    OVERLAP: tl.constexpr,
):
    """MASKED: every tile goes through the same code, whichever of its keys the queries see."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0) // PARTS
    prefill = tl.load(tiles + tile * 2)
    first = tl.load(tiles + tile * 2 + 1) + tl.program_id(0) % PARTS * QUERY_TILE  # token of this program in its row
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    offset = tl.load(offsets + prefill)
    count = tl.load(offsets + prefill + 1) - offset
    if PARTS > 1:  # noqa: SIM102 - the first is decided at compile time, the second at run time
        if first >= count:
            return
    length = tl.load(lengths + prefill)
    table_row = table + tl.load(rows + prefill) * table_stride

    token = first + tl.arange(0, QUERY_TILE)
    dim = tl.arange(0, DIM_BLOCK)
    dim_inside = dim < DIM
    inside = (token < count)[:, None] & dim_inside[None, :]
    where = ((offset + token).to(tl.int64)[:, None] * HEADS + head) * DIM + dim[None, :]
    query = tl.load(q + where, mask=inside, other=0.0)
    position = length - count + token  # of each query in its sequence
    last = position  # the last that it sees
    if REACHES:
        last = tl.load(reach + offset + token, mask=token < count, other=1) - 1

    highest = tl.full((QUERY_TILE,), 0.0 if SINKS else -float("inf"), tl.float32)
    total = tl.zeros((QUERY_TILE,), tl.float32)
    mixed = tl.zeros((QUERY_TILE, DIM_BLOCK), tl.float32)
    if SINKS:
        highest += tl.load(sinks + head) * _LOG2_E
        total += 1.0
    oldest = length - count + first
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, oldest - window + 1) // KEY_TILE * KEY_TILE
    end = tl.minimum(length, oldest + QUERY_TILE)
    if REACHES:
        end = tl.minimum(length, tl.maximum(end, tl.max(last, 0) + 1))
    # Tiles that all queries see completely need no mask. The last tiles, and all tiles of a window, do.
    unmasked = begin if MASKED else (oldest + 1) // KEY_TILE * KEY_TILE
    highest, total, mixed = _attend(
        query, highest, total, mixed, position, last, begin, unmasked, end, oldest, window, table_row, key_pages,
        value_pages, kv_head, scale, cap, KV_HEADS, DIM, DIM_BLOCK, PAGE, KEY_TILE, WINDOWED, CAPPED, False,
    )  # fmt: skip
    highest, total, mixed = _attend(
        query, highest, total, mixed, position, last, unmasked, end, end, oldest, window, table_row, key_pages,
        value_pages, kv_head, scale, cap, KV_HEADS, DIM, DIM_BLOCK, PAGE, KEY_TILE, WINDOWED, CAPPED, True,
    )  # fmt: skip
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
        if WINDOWED:
            base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing of this tile is in the window
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
