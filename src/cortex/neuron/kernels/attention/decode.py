"""Decode attention: norms and rotates one new token per row, stores its KV and attends to the paged KV, in one launch.

Each program takes one row, one kv head and one part of the earlier positions. The last part also has the new token,
directly from the projection. The last program of a (row, kv head) to finish combines the parts, or a second launch
does (`decode_plan.py`). Every key and value is read once: bound by bandwidth. Reference: `paged.attention_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.decode_plan import MIN_GROUP, decode_plan
from cortex.neuron.kernels.attention.rotate import rotated_heads, rotation_factors
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.attention.split_keys import (
    COMBINED,
    COMBINED_VALUES,
    PART_WORDS,
    combine_last,
    counters,
    join,
    splits_of,
)
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
from cortex.neuron.kernels.shared_memory import shared_memory

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
    group = heads // kv_heads
    group_pad = max(MIN_GROUP, triton.next_power_of_2(group))
    dim_block = triton.next_power_of_2(dim)
    reached = min(batch.max_length, rules.window or batch.max_length)
    plan = decode_plan(
        rows,
        kv_heads,
        reached,
        group_pad,
        dim_block,
        q.element_size(),
        num_processors(q.device),
        shared_memory(q.device),
    )
    division = plan.division
    parts, is_new = splits_of(batch, division, rules.window or 0, has_new=False)
    partial = sums = None
    if division.parts > 1:
        partial = torch.empty((division.programs, heads, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((division.programs, heads, 2), dtype=torch.float32, device=q.device)
    _decode_kernel[(kv_heads, division.programs)](
        q,
        k,
        v,
        key_pages,
        value_pages,
        batch.page_table,
        batch.rope_positions,
        batch.slots,
        rules.rope,
        rules.q_scale,
        rules.k_scale,
        rules.sinks,
        out,
        partial,
        sums,
        None if division.parts == 1 or plan.joins else counters(q.device),
        parts.of_programs,
        rules.scale * LOG2_E,
        (rules.softcap or 0.0) * LOG2_E,
        rules.eps,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        v.stride(0),
        batch.page_table.stride(0),
        int(is_new or batch.shares_rows),
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_BLOCK=group_pad,
        DIM=dim,
        DIM_BLOCK=dim_block,
        HALF=rules.half,
        PAIRS=rules.rope.shape[1] // 2,
        NORM=rules.q_scale is not None,
        NORM_VALUES=rules.norms_values,
        SINKS=rules.sinks is not None,
        CAPPED=rules.softcap is not None,
        PAGE=page_tokens,
        TILE=division.tile,
        HOLD=plan.holds,
        SPLIT=division.parts > 1,
        JOINS=plan.joins,
        WORDS=PART_WORDS,
        COMBINED=max(1, min(COMBINED, COMBINED_VALUES // (group_pad * dim_block))),
        num_warps=plan.warps,
        num_stages=2,
        **launch_options(q.device),
    )
    if plan.joins:
        join(parts, partial, sums, out[:rows])


@jit
def _pages(tile, end, table_row, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The pages of the positions from `tile` on, before `end`."""
    position = tile + tl.arange(0, TILE)
    return tl.load(table_row + position // PAGE, mask=position < end, other=0)


@jit
def _tile(
    tile,
    end,
    page,
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

    page: that of each position. KIND: the dtype that they are converted to; the pages may have a smaller one.
    """
    position = tile + tl.arange(0, TILE)
    dim = tl.arange(0, DIM_BLOCK)
    valid = position < end
    where = (((page.to(tl.int64) * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
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


@jit(do_not_specialize=["waits"])
def _decode_kernel(
    q,
    k,
    v,
    key_pages,
    value_pages,
    table,
    rope_positions,
    slots,
    rope,
    q_scale,
    k_scale,
    sinks,
    out,
    partial,
    sums,
    finished,
    of_programs,
    scale,
    cap,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    v_token_stride,
    table_stride,
    waits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
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
    HOLD: tl.constexpr,
    SPLIT: tl.constexpr,
    JOINS: tl.constexpr,
    WORDS: tl.constexpr,
    COMBINED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """waits: whether earlier kernels of the step write what it reads at first: its parts, or pages."""
    if OVERLAP:
        gdc_launch_dependents()
        if waits != 0:
            gdc_wait()
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    own = of_programs + program * WORDS
    active = tl.load(own + 5)
    if active == 0:
        return
    index = tl.load(own).to(tl.int64)
    table_row = table + tl.load(own + 1).to(tl.int64) * table_stride
    start = tl.load(own + 2)
    end = tl.load(own + 3)
    split = tl.load(own + 4)
    # Earlier positions were written by earlier steps, or the kernel has waited.
    if HOLD:
        page = _pages(start, end, table_row, PAGE, TILE)
        keys, values, valid = _tile(
            start, end, page, key_pages, value_pages, kv_head, KV_HEADS, DIM, DIM_BLOCK, PAGE, TILE, q.dtype.element_ty
        )  # fmt: skip
    begin = start + TILE if HOLD else start
    page = _pages(begin, end, table_row, PAGE, TILE)
    rope_row = rope + tl.load(rope_positions + index) * 2 * PAIRS
    q_factors = rotation_factors(q_scale, rope_row, DIM, DIM_BLOCK, HALF, PAIRS, NORM)
    k_factors = rotation_factors(k_scale, rope_row, DIM, DIM_BLOCK, HALF, PAIRS, NORM)
    slot = tl.load(slots + index)
    if OVERLAP:
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
    if HOLD:  # noqa: SIM102
        if start < end:
            highest, total, mixed = _absorb(query, keys, values, valid, scale, cap, highest, total, mixed, CAPPED)
    for tile in range(begin, end, TILE):
        keys, values, valid = _tile(
            tile, end, page, key_pages, value_pages, kv_head, KV_HEADS, DIM, DIM_BLOCK, PAGE, TILE, q.dtype.element_ty
        )  # fmt: skip
        page = _pages(tile + TILE, end, table_row, PAGE, TILE)  # a tile ahead: the next loads need not wait for them
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
    if SPLIT:
        if active == 1:
            tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            part = program.to(tl.int64) * HEADS + kv_head * GROUP + head
            tl.store(partial + part[:, None] * DIM + dim[None, :], mixed, mask=inside)
            tl.store(sums + part * 2, highest, mask=head < GROUP)
            tl.store(sums + part * 2 + 1, total, mask=head < GROUP)
            if not JOINS:
                combine_last(
                    partial, sums, finished, out, index, kv_head, program - split, active, HEADS, KV_HEADS, GROUP,
                    GROUP_BLOCK, COMBINED, DIM, DIM_BLOCK,
                )  # fmt: skip
    else:
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
