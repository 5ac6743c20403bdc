"""Many query tokens per row against paged KV, causally. Bound by arithmetic once prompts are long.

Each program takes one tile of one row's tokens and one head. Rows of different lengths share a launch: the host lists
the tiles. Reference: `attention.paged_attention_reference`.
"""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.batch import PREFILL_TILE, Batch
from cortex.neuron.kernels.jit import jit, tl, triton

KEY_TILE = 64


def prefill_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    batch: Batch,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Writes the rows of `out` behind the decode rows. q and out: [tokens, heads, dim], contiguous."""
    _, heads, dim = q.shape
    _, page_tokens, kv_heads, _ = key_pages.shape
    assert batch.prefill_tiles is not None
    _prefill_kernel[(len(batch.prefill_tiles), heads)](
        q,
        key_pages,
        value_pages,
        batch.page_table,
        batch.rows,
        batch.lengths,
        batch.prefill_offsets,
        batch.prefill_tiles,
        out,
        scale * 1.4426950408889634,
        batch.page_table.stride(0),
        batch.num_decodes,
        window or 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        PAGE=page_tokens,
        QUERY_TILE=PREFILL_TILE,
        KEY_TILE=KEY_TILE,
        num_warps=8,
        num_stages=3,
    )


@jit(do_not_specialize=["num_decodes", "window"])
def _prefill_kernel(
    q,
    key_pages,
    value_pages,
    table,
    rows,
    lengths,
    offsets,
    tiles,
    out,
    scale,
    table_stride,
    num_decodes,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    prefill = tl.load(tiles + tl.program_id(0) * 2)
    first = tl.load(tiles + tl.program_id(0) * 2 + 1)  # of this tile's tokens within its row
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    offset = tl.load(offsets + prefill)
    count = tl.load(offsets + prefill + 1) - offset
    length = tl.load(lengths + num_decodes + prefill)
    table_row = table + tl.load(rows + num_decodes + prefill) * table_stride

    token = first + tl.arange(0, QUERY_TILE)
    dim = tl.arange(0, DIM_BLOCK)
    dim_inside = dim < DIM
    inside = (token < count)[:, None] & dim_inside[None, :]
    q_offset = ((num_decodes + offset + token).to(tl.int64)[:, None] * HEADS + head) * DIM + dim[None, :]
    query = tl.load(q + q_offset, mask=inside, other=0.0)
    position = length - count + token  # of each query in its sequence

    highest = tl.full((QUERY_TILE,), -float("inf"), tl.float32)
    total = tl.zeros((QUERY_TILE,), tl.float32)
    mixed = tl.zeros((QUERY_TILE, DIM_BLOCK), tl.float32)
    end = tl.minimum(length, length - count + first + QUERY_TILE)
    begin = 0
    if window > 0:
        begin = tl.maximum(0, length - count + first - window + 1) // KEY_TILE * KEY_TILE
    for tile in range(begin, end, KEY_TILE):
        key_position = tile + tl.arange(0, KEY_TILE)
        valid = key_position < end
        page = tl.load(table_row + key_position // PAGE, mask=valid, other=0).to(tl.int64)
        slot = ((page * PAGE + key_position % PAGE) * KV_HEADS + kv_head) * DIM
        where = valid[:, None] & dim_inside[None, :]
        keys = tl.load(key_pages + slot[:, None] + dim[None, :], mask=where, other=0.0)
        scores = tl.dot(query, tl.trans(keys)) * scale
        visible = key_position[None, :] <= position[:, None]
        if window > 0:
            visible = visible & (key_position[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, -1.0e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(value_pages + slot[:, None] + dim[None, :], mask=where, other=0.0)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(values.dtype), values, mixed)
        highest = higher
    tl.store(out + q_offset, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
