"""One query token per row against its paged KV, split along the sequence so that few rows still fill the device.

Each program takes one row, one kv head and one stretch of positions. The last program of a (row, kv head) to finish
combines the stretches, so no second launch is needed. Reads every key and value once: bound by bandwidth.
Reference: `attention.paged_attention_reference`.
"""

from __future__ import annotations

from functools import cache
import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import jit, tl, triton

TILE = 64
MIN_STRETCH = 64
"""Positions below which splitting further costs more than it gains."""
MAX_COUNTERS = 1 << 16


def decode_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    batch: Batch,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Writes the first `batch.num_decodes` rows of `out`. q and out: [tokens, heads, dim], contiguous."""
    rows, (_, heads, dim) = batch.num_decodes, q.shape
    _, page_tokens, kv_heads, _ = key_pages.shape
    splits = _num_splits(rows * kv_heads, batch.max_length, q.device)
    group = heads // kv_heads
    group_block = max(16, triton.next_power_of_2(group))
    partial = torch.empty((rows, kv_heads, splits, group_block, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((rows, kv_heads, splits, 2, group_block), dtype=torch.float32, device=q.device)
    _decode_kernel[(rows, kv_heads, splits)](
        q,
        key_pages,
        value_pages,
        batch.page_table,
        batch.rows,
        batch.lengths,
        out,
        partial,
        sums,
        _counters(q.device),
        scale * 1.4426950408889634,
        batch.page_table.stride(0),
        window or 0,
        splits,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_BLOCK=group_block,
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        PAGE=page_tokens,
        TILE=TILE,
        num_warps=4,
        num_stages=3,
    )


def _num_splits(programs: int, max_length: int, device: torch.device) -> int:
    """Enough stretches to fill the device a few times over, but none shorter than MIN_STRETCH."""
    wanted = triton.cdiv(4 * _num_processors(device), programs)
    longest = triton.cdiv(max_length, MIN_STRETCH)
    return int(min(64, triton.next_power_of_2(max(1, min(wanted, longest)))))


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _counters(device: torch.device) -> Tensor:
    """How many stretches of each (row, kv head) are done; every launch leaves them at zero."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


@jit(do_not_specialize=["window", "splits"])
def _decode_kernel(
    q,
    key_pages,
    value_pages,
    table,
    rows,
    lengths,
    out,
    partial,
    sums,
    counters,
    scale,
    table_stride,
    window,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + index)
    first = 0
    if window > 0:
        first = tl.maximum(0, length - window)
    stretch = tl.cdiv(tl.cdiv(length - first, splits), TILE) * TILE
    active = tl.cdiv(length - first, stretch)
    start = first + split * stretch
    if start >= length:
        return
    end = tl.minimum(length, start + stretch)

    head = tl.arange(0, GROUP_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    dim_inside = dim < DIM
    head_inside = head < GROUP
    q_offset = (index * HEADS + kv_head * GROUP + head).to(tl.int64)[:, None] * DIM + dim[None, :]
    inside = head_inside[:, None] & dim_inside[None, :]
    query = tl.load(q + q_offset, mask=inside, other=0.0)  # [group, dim]

    table_row = table + tl.load(rows + index) * table_stride
    highest = tl.full((GROUP_BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    mixed = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
    for tile in range(start, end, TILE):
        position = tile + tl.arange(0, TILE)
        valid = position < end
        page = tl.load(table_row + position // PAGE, mask=valid, other=0).to(tl.int64)
        slot = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM
        where = valid[:, None] & dim_inside[None, :]
        keys = tl.load(key_pages + slot[:, None] + dim[None, :], mask=where, other=0.0)  # [tile, dim]
        values = tl.load(value_pages + slot[:, None] + dim[None, :], mask=where, other=0.0)
        scores = tl.dot(query, tl.trans(keys)) * scale  # [group, tile], in powers of two
        scores = tl.where(valid[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        highest = higher

    if active == 1:
        tl.store(out + q_offset, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
        return

    cell = index * KV_HEADS + kv_head
    mine = (cell * splits + split).to(tl.int64)
    block = head[:, None] * DIM + dim[None, :]
    tl.store(partial + mine * GROUP_BLOCK * DIM + block, mixed, mask=dim_inside[None, :])
    tl.store(sums + mine * 2 * GROUP_BLOCK + head, highest)
    tl.store(sums + mine * 2 * GROUP_BLOCK + GROUP_BLOCK + head, total)
    tl.debug_barrier()
    done = tl.atomic_add(counters + cell, 1, sem="acq_rel")
    if done < active - 1:
        return

    tl.store(counters + cell, 0)
    highest = tl.full((GROUP_BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    mixed = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
    for other in range(0, active):
        theirs = (cell * splits + other).to(tl.int64)
        their_highest = tl.load(sums + theirs * 2 * GROUP_BLOCK + head, cache_modifier=".cg")
        their_total = tl.load(sums + theirs * 2 * GROUP_BLOCK + GROUP_BLOCK + head, cache_modifier=".cg")
        their_mixed = tl.load(
            partial + theirs * GROUP_BLOCK * DIM + block, mask=dim_inside[None, :], other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(highest, their_highest)
        shrink, grow = tl.exp2(highest - higher), tl.exp2(their_highest - higher)
        total = total * shrink + their_total * grow
        mixed = mixed * shrink[:, None] + their_mixed * grow[:, None]
        highest = higher
    tl.store(out + q_offset, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
