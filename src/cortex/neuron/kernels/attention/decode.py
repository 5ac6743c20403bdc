"""Decode attention: norms and rotates one new token per row, stores its KV and attends to the paged KV, in one launch.

Each program takes one row, one kv head and one split of the earlier positions. The last split also takes the new token,
directly from the projection. The last program of a (row, kv head) to finish combines the splits.
Every key and value is read once: bound by bandwidth. Reference: `paged.attention_reference`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.rotate import rotated_heads, rotation_factors
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
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

TILE = 64
PROGRAMS_PER_PROCESSOR = 3
"""This many programs saturate the memory bandwidth; more splits only add work."""
COMBINED, COMBINED_VALUES = 16, 1 << 14
"""Splits that are combined at once, at most, and their values, which are in registers."""
LARGE, LARGE_WARPS = 256, 4
WIDE, WIDE_WARPS = 512, 8
"""From these head sizes on, fewer warps have too few registers."""
MAX_SPLITS = 64
MAX_CELLS = 1 << 16
"""Largest rows × kv heads of one launch."""
QUERY_BYTES = 4 << 10
"""Shared memory for intermediate values of the queries, besides the queries."""
LOG2_E = 1.4426950408889634
_LOG2_E = constant(LOG2_E)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: AttentionRules,
    batch: Batch,
    key_pages: Tensor,
    value_pages: Tensor,
    out: Tensor,
) -> None:
    """Writes the first `batch.num_decodes` rows of `out` ([tokens, heads, dim], contiguous) and their KV."""
    rows, (_, heads, dim) = batch.num_decodes, q.shape
    _, page_tokens, kv_heads, _ = key_pages.shape
    cells = rows * kv_heads
    splits = _num_splits(cells, min(batch.max_length, rules.window or batch.max_length), q.device)
    group = heads // kv_heads
    group_pad = triton.next_power_of_2(group)
    group_block = max(16, group_pad)
    dim_block = triton.next_power_of_2(dim)
    # With one split per row and at most two programs per processor, larger tiles keep more loads in flight.
    wanted = 2 * TILE if splits == 1 and cells <= 2 * num_processors(q.device) else TILE
    tile = fitting_tile(wanted, group_block, dim_block * q.element_size(), shared_memory(q.device))
    partial = torch.empty((cells * splits, group_pad, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((cells * splits, 2, group_pad), dtype=torch.float32, device=q.device)
    _decode_kernel[(rows, kv_heads, splits)](
        q,
        k,
        v,
        key_pages,
        value_pages,
        batch.page_table,
        batch.rows,
        batch.lengths,
        batch.rope_positions,
        batch.slots,
        rules.rope,
        rules.q_scale,
        rules.k_scale,
        rules.sinks,
        out,
        partial,
        sums,
        _counters(q.device),
        rules.scale * LOG2_E,
        (rules.softcap or 0.0) * LOG2_E,
        rules.eps,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        v.stride(0),
        batch.page_table.stride(0),
        rules.window or 0,
        splits,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_BLOCK=group_block,
        GROUP_PAD=group_pad,
        COMBINED=max(1, min(COMBINED, COMBINED_VALUES // (group_pad * dim_block))),
        DIM=dim,
        DIM_BLOCK=dim_block,
        HALF=rules.half,
        PAIRS=rules.rope.shape[1] // 2,
        NORM=rules.q_scale is not None,
        NORM_VALUES=rules.norms_values,
        SINKS=rules.sinks is not None,
        CAPPED=rules.softcap is not None,
        PAGE=page_tokens,
        TILE=tile,
        SHARES=batch.shares_rows,
        HOLD=dim_block < LARGE,  # the first tile is loaded early; large heads need the registers
        num_warps=_num_warps(tile, dim_block),
        num_stages=3,
        **launch_options(q.device),
    )


def fitting_tile(wanted: int, group_block: int, head_bytes: int, shared: SharedMemory) -> int:
    """Positions per tile: shared memory holds their keys and values, and twice the queries, of `head_bytes` each."""
    tile = wanted
    while tile > 16 and not shared.holds(2 * (tile + group_block) * head_bytes + QUERY_BYTES):
        tile //= 2
    return tile


def _num_splits(cells: int, max_length: int, device: torch.device) -> int:
    """Enough splits to fill the device, but none shorter than a tile."""
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(device) // cells
    return int(max(1, min(MAX_SPLITS, wanted, triton.cdiv(max_length, TILE))))


def _num_warps(tile: int, dim_block: int) -> int:
    if dim_block >= LARGE:
        return LARGE_WARPS if dim_block < WIDE else WIDE_WARPS
    return max(1, tile // 32)


@cache
def _counters(device: torch.device) -> Tensor:
    """The number of finished splits of each (row, kv head). Every launch resets them to zero."""
    return torch.zeros(MAX_CELLS, dtype=torch.int32, device=device)


@jit
def _tile(
    tile,
    end,
    table_row,
    key_pages,
    value_pages,
    kv_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
):
    """Keys and values [tile, dim] of the positions from `tile` on, zero from `end` on, and which of them are valid.

    KIND: the dtype that they are converted to; the pages may have a smaller one.
    """
    position = tile + tl.arange(0, TILE)
    dim = tl.arange(0, DIM_BLOCK)
    valid = position < end
    page = tl.load(table_row + position // PAGE, mask=valid, other=0).to(tl.int64)
    where = (((page * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
    inside = valid[:, None] & (dim < DIM)[None, :]
    keys = tl.load(key_pages + where, mask=inside, other=0.0).to(KIND)
    values = tl.load(value_pages + where, mask=inside, other=0.0).to(KIND)
    return keys, values, valid


@jit
def capped(scores, cap):
    """cap · tanh(scores / cap), without overflow."""
    return cap - 2 * cap / (tl.exp2(scores * (2 * _LOG2_E / cap)) + 1)


@jit
def _absorb(query, keys, values, valid, scale, cap, highest, total, mixed, CAPPED: tl.constexpr):
    """Adds a tile to the online softmax of each head. At least one of its positions is valid."""
    scores = tl.dot(query, tl.trans(keys)) * scale  # [group, tile], in powers of two
    if CAPPED:
        scores = capped(scores, cap)
    scores = tl.where(valid[None, :], scores, -float("inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    shrink = tl.exp2(highest - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
    return higher, total, mixed


@jit(do_not_specialize=["window", "splits"])
def _decode_kernel(
    q,
    k,
    v,
    key_pages,
    value_pages,
    table,
    rows,
    lengths,
    rope_positions,
    slots,
    rope,
    q_scale,
    k_scale,
    sinks,
    out,
    partial,
    sums,
    counters,
    scale,
    cap,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    v_token_stride,
    table_stride,
    window,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    COMBINED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SHARES: tl.constexpr,
    HOLD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        if SHARES:
            gdc_wait()
    index = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    newest = tl.load(lengths + index) - 1  # the new token's position; the pages hold those before it
    table_row = table + tl.load(rows + index) * table_stride
    first = 0
    if window > 0:
        first = tl.maximum(0, newest + 1 - window)
    split_tokens = tl.maximum(1, tl.cdiv(tl.cdiv(newest - first, splits), TILE)) * TILE
    active = tl.maximum(1, tl.cdiv(newest - first, split_tokens))
    if split >= active:
        return
    start = first + split * split_tokens
    end = tl.minimum(newest, start + split_tokens)
    # Earlier positions were written by earlier steps, unless rows are shared: they may be fetched before the wait.
    if HOLD:
        keys, values, valid = _tile(
            start, end, table_row, key_pages, value_pages, kv_head, KV_HEADS, DIM, DIM_BLOCK, PAGE, TILE,
            q.dtype.element_ty,
        )  # fmt: skip
    rope_row = rope + tl.load(rope_positions + index) * 2 * PAIRS
    q_factors = rotation_factors(q_scale, rope_row, DIM, DIM_BLOCK, HALF, PAIRS, NORM)
    k_factors = rotation_factors(k_scale, rope_row, DIM, DIM_BLOCK, HALF, PAIRS, NORM)
    slot = tl.load(slots + index)
    if OVERLAP and not SHARES:
        gdc_wait()

    head = tl.arange(0, GROUP_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    dim_inside = dim < DIM
    source = q + index * q_token_stride + kv_head * GROUP * q_head_stride
    exact = rotated_heads(source, head, q_head_stride, GROUP, q_factors, eps, DIM, DIM_BLOCK, HALF, NORM)
    query = exact.to(q.dtype.element_ty)  # [group, dim]
    # Only the last split needs the key and value of the new token. All load them here, where the latency is hidden.
    only = tl.arange(0, 1)
    source = k + index * k_token_stride + kv_head * DIM
    exact = rotated_heads(source, only, DIM, 1, k_factors, eps, DIM, DIM_BLOCK, HALF, NORM)
    new_key = exact.to(key_pages.dtype.element_ty)  # [1, dim]
    new_value = tl.load(v + index * v_token_stride + kv_head * DIM + dim, mask=dim_inside, other=0.0)
    if NORM_VALUES:
        exact = new_value.to(tl.float32)
        new_value = (exact * tl.rsqrt(tl.sum(exact * exact, 0) / DIM + eps)).to(v.dtype.element_ty)
    new_value = new_value.to(value_pages.dtype.element_ty)  # what later steps will read

    highest = tl.full((GROUP_BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    mixed = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
    if SINKS:  # noqa: SIM102 - the first is decided at compile time, the second at run time
        if split == 0:
            highest = tl.load(sinks + kv_head * GROUP + head, mask=head < GROUP, other=-float("inf")) * _LOG2_E
            total = tl.where(head < GROUP, 1.0, 0.0)
    begin = start
    if HOLD:
        if start < end:
            highest, total, mixed = _absorb(query, keys, values, valid, scale, cap, highest, total, mixed, CAPPED)
        begin = start + TILE
    for tile in range(begin, end, TILE):
        keys, values, valid = _tile(
            tile, end, table_row, key_pages, value_pages, kv_head, KV_HEADS, DIM, DIM_BLOCK, PAGE, TILE,
            q.dtype.element_ty,
        )  # fmt: skip
        highest, total, mixed = _absorb(query, keys, values, valid, scale, cap, highest, total, mixed, CAPPED)

    if split == active - 1:
        where = (slot * KV_HEADS + kv_head) * DIM + dim
        tl.store(key_pages + where[None, :], new_key, mask=dim_inside[None, :])
        tl.store(value_pages + where, new_value, mask=dim_inside)
        score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * scale
        if CAPPED:
            score = capped(score, cap)
        higher = tl.maximum(highest, score)
        shrink = tl.exp2(highest - higher)
        weight = tl.exp2(score - higher)
        total = total * shrink + weight
        mixed = mixed * shrink[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
        highest = higher

    inside = (head < GROUP)[:, None] & dim_inside[None, :]
    target = out + ((index * HEADS + kv_head * GROUP + head)[:, None] * DIM + dim[None, :])
    if active == 1:
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
        return

    cell = index * KV_HEADS + kv_head
    mine = (cell * splits + split) * GROUP_PAD
    is_head = head < GROUP_PAD
    block = head[:, None] * DIM + dim[None, :]
    tl.store(partial + mine * DIM + block, mixed, mask=is_head[:, None] & dim_inside[None, :])
    tl.store(sums + mine * 2 + head, highest, mask=is_head)
    tl.store(sums + mine * 2 + GROUP_PAD + head, total, mask=is_head)
    tl.debug_barrier()
    done = tl.atomic_add(counters + cell, 1, sem="acq_rel")
    if done < active - 1:
        return

    tl.store(counters + cell, 0)
    own = tl.arange(0, GROUP_PAD)
    highest = tl.full((GROUP_PAD,), -float("inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    mixed = tl.zeros((GROUP_PAD, DIM_BLOCK), tl.float32)
    for some in range(0, active, COMBINED):
        other = some + tl.arange(0, COMBINED)
        there = other < active
        theirs = (cell * splits + other) * GROUP_PAD
        pair = sums + (theirs * 2)[:, None] + own[None, :]
        their_highest = tl.load(pair, mask=there[:, None], other=-float("inf"), cache_modifier=".cg")
        their_total = tl.load(pair + GROUP_PAD, mask=there[:, None], other=0.0, cache_modifier=".cg")
        cube = partial + (theirs[:, None, None] + own[None, :, None]) * DIM + dim[None, None, :]
        is_theirs = there[:, None, None] & dim_inside[None, None, :]
        their_mixed = tl.load(cube, mask=is_theirs, other=0.0, cache_modifier=".cg")  # [some, group, dim]
        higher = tl.maximum(highest, tl.max(their_highest, 0))
        shrink = tl.exp2(highest - higher)
        grow = tl.exp2(their_highest - higher[None, :])
        total = total * shrink + tl.sum(their_total * grow, 0)
        mixed = mixed * shrink[:, None] + tl.sum(their_mixed * grow[:, :, None], 0)
        highest = higher
    inside = (own < GROUP)[:, None] & dim_inside[None, :]
    target = out + ((index * HEADS + kv_head * GROUP + own)[:, None] * DIM + dim[None, :])
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
