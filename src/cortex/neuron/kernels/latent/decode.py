"""Decode attention over paged latents: one new token per row, which is in the pages already.

Each program takes the heads of one row (or a block of them) and one split of the positions, so that every latent is
read once for all heads. The latents of a tile are its keys and, without a second read, its values. Where positions are
split, a second kernel combines the parts, head by head. Reference: `attention.latent_attention_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.decode import LOG2_E
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

MAX_SPLITS = 64
COMBINED = 16
"""Splits that are combined at once."""
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
    wanted = num_processors(query.device) // (rows * blocks)
    splits = int(max(1, min(MAX_SPLITS, wanted, triton.cdiv(batch.max_length, tile))))
    parts, sums = mixed, mixed
    if splits > 1:
        parts = torch.empty((splits, rows, heads, rules.latent), dtype=torch.float32, device=query.device)
        sums = torch.empty((splits, rows, heads), dtype=torch.float32, device=query.device)
    latent_block = max(16, triton.next_power_of_2(rules.latent))
    _decode_kernel[(rows, blocks, splits)](
        query,
        pages,
        batch.page_table,
        batch.rows,
        batch.lengths,
        parts,
        sums,
        rules.scale * LOG2_E,
        batch.page_table.stride(0),
        HEADS=heads,
        HEADS_BLOCK=heads_block,
        LATENT=rules.latent,
        LATENT_BLOCK=latent_block,
        ROPE=rules.rope_dims,
        ROPE_BLOCK=max(16, triton.next_power_of_2(rules.rope_dims)),
        PAGE=pages.shape[1],
        TILE=tile,
        SPLIT=splits > 1,
        num_warps=8,
        num_stages=2,
        **launch_options(query.device),
    )
    if splits > 1:
        _combine_kernel[(rows, heads)](
            parts,
            sums,
            batch.lengths,
            mixed,
            splits,
            TILE=tile,
            ROWS_HEADS=rows * heads,
            LATENT=rules.latent,
            LATENT_BLOCK=latent_block,
            SPLITS=triton.next_power_of_2(splits),
            COMBINED=min(COMBINED, triton.next_power_of_2(splits)),
            num_warps=4,
            **launch_options(query.device),
        )


def fitting_tile(heads_block: int, key_bytes: int, shared: SharedMemory) -> int:
    """Positions per tile: shared memory holds those of two tiles, and the queries."""
    return next((tile for tile in TILES if shared.holds((2 * tile + heads_block) * key_bytes)), TILES[-1])


@jit
def _split_tokens(length, splits, TILE: tl.constexpr):
    """Positions of each split of a row; the last ones may have fewer or none."""
    return tl.maximum(1, tl.cdiv(tl.cdiv(length, splits), TILE)) * TILE


@jit
def _decode_kernel(
    query,
    pages,
    table,
    rows,
    lengths,
    parts,
    sums,
    scale,
    table_stride,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`parts`: the result, or the part of each split [splits, rows, heads, latent] with the logarithms of its sum of
    weights in `sums`, in powers of two."""
    if OVERLAP:
        gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + index)
    table_row = table + tl.load(rows + index) * table_stride
    split_tokens = _split_tokens(length, tl.num_programs(2), TILE)
    start = split * split_tokens
    end = tl.minimum(length, start + split_tokens)
    if start >= end:
        return

    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
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
    if SPLIT:
        cell = split * tl.num_programs(0) + index
        tl.store(sums + cell * HEADS + head, highest + tl.log2(total), mask=head < HEADS)
        target = parts + (cell * HEADS + head)[:, None] * LATENT + column[None, :]
        tl.store(target, mixed / total[:, None], mask=inside)
    else:
        target = parts + (index * HEADS + head)[:, None] * LATENT + column[None, :]
        tl.store(target, (mixed / total[:, None]).to(parts.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["splits"])
def _combine_kernel(
    parts,
    sums,
    lengths,
    mixed,
    splits,
    TILE: tl.constexpr,
    ROWS_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    COMBINED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and head."""
    if OVERLAP:
        gdc_launch_dependents()
    length = tl.load(lengths + tl.program_id(0))
    active = tl.cdiv(length, _split_tokens(length, splits, TILE))
    if OVERLAP:
        gdc_wait()
    cell = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, LATENT_BLOCK)
    all_sums = tl.load(sums + split * ROWS_HEADS + cell, mask=split < active, other=-float("inf"))
    highest = tl.max(all_sums, 0)
    weights = tl.sum(tl.exp2(all_sums - highest), 0)
    total = tl.zeros((LATENT_BLOCK,), tl.float32)
    for first in range(0, active, COMBINED):
        some = first + tl.arange(0, COMBINED)
        sum = tl.load(sums + some * ROWS_HEADS + cell, mask=some < active, other=-float("inf"))
        source = parts + ((some * ROWS_HEADS + cell) * LATENT)[:, None] + column[None, :]
        block = tl.load(source, mask=(some < active)[:, None] & (column < LATENT)[None, :], other=0.0)
        total += tl.sum(block * tl.exp2(sum - highest)[:, None], 0)
    total /= weights
    tl.store(mixed + cell * LATENT + column, total.to(mixed.dtype.element_ty), mask=column < LATENT)
