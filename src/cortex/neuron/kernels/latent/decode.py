"""Decode attention over paged latents: one new token per row, which is in the pages already.

Each program takes the heads of one row (or a block of them) and one part of the positions, so that every latent is
read once for all heads. The latents of a tile are its keys and, without a second read, its values. Where a row has
several parts, a second kernel combines them, head by head. Reference: `attention.latent_attention_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.decode import LOG2_E
from cortex.neuron.kernels.attention.decode_plan import MAX_PARTS, KeyDivision
from cortex.neuron.kernels.attention.split_keys import PART_WORDS, splits_of
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch_options,
    num_processors,
    tl,
    triton,
)
from cortex.neuron.kernels.latent.rules import LatentRules
from cortex.neuron.kernels.shared_memory import SharedMemory, shared_memory

COMBINED = 16
"""Parts that are combined at once."""
MAX_HEADS = 64
"""Heads of one program: their sums are in registers."""
TILES = (64, 32, 16)


def decode_latent_attention(query: Tensor, rules: LatentRules, batch: Batch, pages: Tensor, mixed: Tensor) -> None:
    """Writes the first `batch.num_decodes` rows of `mixed` ([tokens, heads, latent]). query: [tokens, heads, latent +
    rope dims]; both are contiguous."""
    rows, (_, heads, _) = batch.num_decodes, query.shape
    heads_block = min(MAX_HEADS, max(16, triton.next_power_of_2(heads)))
    blocks = triton.cdiv(heads, heads_block)
    tile = fitting_tile(heads_block, pages.shape[-1] * query.element_size(), shared_memory(query.device))
    most = min(MAX_PARTS, triton.cdiv(batch.max_length, tile))
    division = KeyDivision.of(rows, num_processors(query.device) // blocks, most, tile)
    parts, is_new = splits_of(batch, division, has_new=True)
    partial = sums = None
    if most > 1:
        partial = torch.empty((division.programs, heads, rules.latent), dtype=torch.float32, device=query.device)
        sums = torch.empty((division.programs, heads), dtype=torch.float32, device=query.device)
    latent_block = max(16, triton.next_power_of_2(rules.latent))
    _decode_kernel[(blocks, division.programs)](
        query,
        pages,
        batch.page_table,
        parts.of_programs,
        mixed,
        partial,
        sums,
        rules.scale * LOG2_E,
        batch.page_table.stride(0),
        int(is_new),
        HEADS=heads,
        HEADS_BLOCK=heads_block,
        LATENT=rules.latent,
        LATENT_BLOCK=latent_block,
        ROPE=rules.rope_dims,
        ROPE_BLOCK=max(16, triton.next_power_of_2(rules.rope_dims)),
        PAGE=pages.shape[1],
        TILE=tile,
        SPLIT=most > 1,
        WORDS=PART_WORDS,
        num_warps=8,
        num_stages=2,
        **launch_options(query.device),
    )
    if most > 1:
        _combine_kernel[(rows, heads)](
            parts.of_rows,
            partial,
            sums,
            mixed,
            LATENT=rules.latent,
            LATENT_BLOCK=latent_block,
            PARTS=triton.next_power_of_2(most),
            COMBINED=min(COMBINED, triton.next_power_of_2(most)),
            num_warps=4,
            **launch_options(query.device),
        )


def fitting_tile(heads_block: int, key_bytes: int, shared: SharedMemory) -> int:
    """Positions per tile: shared memory holds those of two tiles, and the queries."""
    return next((tile for tile in TILES if shared.holds((2 * tile + heads_block) * key_bytes)), TILES[-1])


@jit(do_not_specialize=["waits"])
def _decode_kernel(
    query,
    pages,
    table,
    of_programs,
    mixed_values,
    partial,
    sums,
    scale,
    table_stride,
    waits,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`mixed_values`: the result for rows of one part. Others leave theirs in `partial` ([programs, heads, latent]),
    with the logarithms of its sum of weights in `sums`, in powers of two. waits: whether an earlier kernel of the step
    writes `of_programs`."""
    if OVERLAP:
        gdc_launch_dependents()
        if waits != 0:
            gdc_wait()
    program = tl.program_id(1)
    own = of_programs + program * WORDS
    active = tl.load(own + 5)
    if active == 0:
        return
    index = tl.load(own).to(tl.int64)
    table_row = table + tl.load(own + 1).to(tl.int64) * table_stride
    start = tl.load(own + 2)
    end = tl.load(own + 3)

    head = tl.program_id(0) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    column = tl.arange(0, LATENT_BLOCK)
    turned = tl.arange(0, ROPE_BLOCK)
    is_head = (head < HEADS)[:, None]
    row = query + (index * HEADS + head[:, None]) * (LATENT + ROPE)
    if OVERLAP:
        gdc_wait()
    plain = tl.load(row + column[None, :], mask=is_head & (column < LATENT)[None, :], other=0.0)
    rotated = tl.load(row + LATENT + turned[None, :], mask=is_head & (turned < ROPE)[None, :], other=0.0)

    highest = tl.full((HEADS_BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS_BLOCK,), tl.float32)
    mixed = tl.zeros((HEADS_BLOCK, LATENT_BLOCK), tl.float32)
    for tile in range(start, end, TILE):
        position = tile + tl.arange(0, TILE)
        valid = position < end
        page = tl.load(table_row + position // PAGE, mask=valid, other=0).to(tl.int64)
        slot = pages + ((page * PAGE + position % PAGE) * (LATENT + ROPE))[:, None]
        is_latent = valid[:, None] & (column < LATENT)[None, :]
        latents = tl.load(slot + column[None, :], mask=is_latent, other=0.0).to(plain.dtype)
        is_key = valid[:, None] & (turned < ROPE)[None, :]
        keys = tl.load(slot + LATENT + turned[None, :], mask=is_key, other=0.0).to(plain.dtype)
        scores = tl.dot(plain, tl.trans(latents))
        scores = tl.dot(rotated, tl.trans(keys), scores) * scale  # [heads, tile], in powers of two
        scores = tl.where(valid[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(latents.dtype), latents, mixed)
        highest = higher

    inside = is_head & (column < LATENT)[None, :]
    result = mixed / total[:, None]
    target = mixed_values + (index * HEADS + head)[:, None] * LATENT + column[None, :]
    if SPLIT:
        if active == 1:
            tl.store(target, result.to(mixed_values.dtype.element_ty), mask=inside)
        else:
            line = program.to(tl.int64) * HEADS + head
            tl.store(sums + line, highest + tl.log2(total), mask=head < HEADS)
            tl.store(partial + line[:, None] * LATENT + column[None, :], result, mask=inside)
    else:
        tl.store(target, result.to(mixed_values.dtype.element_ty), mask=inside)


@jit
def _combine_kernel(
    of_rows,
    partial,
    sums,
    mixed,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    COMBINED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and head."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    begin = tl.load(of_rows + row * 2).to(tl.int64)
    active = tl.load(of_rows + row * 2 + 1)
    if active == 1:
        return
    heads, head = tl.num_programs(1), tl.program_id(1)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, LATENT_BLOCK)
    all_sums = tl.load(sums + (begin + part) * heads + head, mask=part < active, other=-float("inf"))
    highest = tl.max(all_sums, 0)
    weights = tl.sum(tl.exp2(all_sums - highest), 0)
    total = tl.zeros((LATENT_BLOCK,), tl.float32)
    for first in range(0, active, COMBINED):
        some = first + tl.arange(0, COMBINED)
        line = (begin + some) * heads + head
        sum = tl.load(sums + line, mask=some < active, other=-float("inf"))
        source = partial + line[:, None] * LATENT + column[None, :]
        block = tl.load(source, mask=(some < active)[:, None] & (column < LATENT)[None, :], other=0.0)
        total += tl.sum(block * tl.exp2(sum - highest)[:, None], 0)
    total /= weights
    target = mixed + (row.to(tl.int64) * heads + head) * LATENT + column
    tl.store(target, total.to(mixed.dtype.element_ty), mask=column < LATENT)
