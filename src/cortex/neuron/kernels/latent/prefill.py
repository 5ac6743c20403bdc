"""Prefill attention over paged latents: many query tokens per row, causal. Bound by arithmetic for long prompts.

The heads of consecutive tokens are the rows of a tile, so that they share each read of a latent. Rows of different
lengths share a launch: the host lists the tiles of tokens. Every tile goes through the same code, whichever of its
positions the queries see, so the result of a token does not depend on the batch. Reference:
`attention.latent_attention_reference`.
"""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.attention.decode import LOG2_E
from cortex.neuron.kernels.batch import PREFILL_TILE, Batch
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.latent.rules import LatentRules
from cortex.neuron.kernels.shared_memory import SharedMemory, shared_memory

TILES = ((64, 32, 8), (32, 16, 4), (16, 16, 4))
"""Queries (of all heads) and positions per tile, and warps: the fastest on Hopper first."""


def prefill_latent_attention(query: Tensor, rules: LatentRules, batch: Batch, pages: Tensor, mixed: Tensor) -> None:
    """query: the tokens of the prefill rows [tokens, heads, latent + rope dims]; mixed: [tokens, heads, latent]; both
    are contiguous. Their latents are in the pages."""
    assert batch.prefill_tiles is not None
    heads = query.shape[1]
    queries, keys, warps = fitting_tiles(pages.shape[-1] * query.element_size(), shared_memory(query.device))
    blocks = triton.cdiv(PREFILL_TILE * heads, queries)
    _prefill_kernel[(len(batch.prefill_tiles) * blocks,)](
        query,
        pages,
        batch.page_table,
        batch.rows[batch.num_decodes :],
        batch.lengths[batch.num_decodes :],
        batch.prefill_offsets,
        batch.prefill_tiles,
        mixed,
        rules.scale * LOG2_E,
        batch.page_table.stride(0),
        HEADS=heads,
        LATENT=rules.latent,
        LATENT_BLOCK=max(16, triton.next_power_of_2(rules.latent)),
        ROPE=rules.rope_dims,
        ROPE_BLOCK=max(16, triton.next_power_of_2(rules.rope_dims)),
        PAGE=pages.shape[1],
        QUERY_TILE=queries,
        KEY_TILE=keys,
        BLOCKS=blocks,
        TILE_TOKENS=PREFILL_TILE,
        num_warps=warps,
        num_stages=2,
        **launch_options(query.device),
    )


def fitting_tiles(key_bytes: int, shared: SharedMemory) -> tuple[int, int, int]:
    """Queries, positions and warps: the first of TILES whose queries and two tiles of latents fit in shared memory."""
    return next((tile for tile in TILES if shared.holds((tile[0] + 2 * tile[1]) * key_bytes)), TILES[-1])


# Slices after the decode rows have any alignment: do not compile a variant for each.
@jit(do_not_specialize_on_alignment=["rows", "lengths"])
def _prefill_kernel(
    query,
    pages,
    table,
    rows,
    lengths,
    offsets,
    tiles,
    out,
    scale,
    table_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per QUERY_TILE queries of the tokens of a tile, counted by token and head."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0) // BLOCKS
    prefill = tl.load(tiles + tile * 2)
    first_token = tl.load(tiles + tile * 2 + 1)
    offset = tl.load(offsets + prefill)
    count = tl.load(offsets + prefill + 1) - offset
    first = first_token * HEADS + tl.program_id(0) % BLOCKS * QUERY_TILE  # query of this program in its row
    stop = tl.minimum(count, first_token + TILE_TOKENS) * HEADS
    if first >= stop:
        return
    length = tl.load(lengths + prefill)
    table_row = table + tl.load(rows + prefill) * table_stride

    number = first + tl.arange(0, QUERY_TILE)
    is_query = (number < stop)[:, None]
    position = length - count + number // HEADS  # of each query in its sequence
    column = tl.arange(0, LATENT_BLOCK)
    turned = tl.arange(0, ROPE_BLOCK)
    place = (offset.to(tl.int64) * HEADS + number)[:, None]
    source = query + place * (LATENT + ROPE)
    plain = tl.load(source + column[None, :], mask=is_query & (column < LATENT)[None, :], other=0.0)
    rotated = tl.load(source + LATENT + turned[None, :], mask=is_query & (turned < ROPE)[None, :], other=0.0)

    highest = tl.full((QUERY_TILE,), -float("inf"), tl.float32)
    total = tl.zeros((QUERY_TILE,), tl.float32)
    mixed = tl.zeros((QUERY_TILE, LATENT_BLOCK), tl.float32)
    end = length - count + (tl.minimum(first + QUERY_TILE, stop) - 1) // HEADS + 1
    for start in range(0, end, KEY_TILE):
        key_position = start + tl.arange(0, KEY_TILE)
        valid = key_position < end
        page = tl.load(table_row + key_position // PAGE, mask=valid, other=0).to(tl.int64)
        slot = pages + ((page * PAGE + key_position % PAGE) * (LATENT + ROPE))[:, None]
        is_latent = valid[:, None] & (column < LATENT)[None, :]
        latents = tl.load(slot + column[None, :], mask=is_latent, other=0.0).to(plain.dtype)
        is_key = valid[:, None] & (turned < ROPE)[None, :]
        keys = tl.load(slot + LATENT + turned[None, :], mask=is_key, other=0.0).to(plain.dtype)
        scores = tl.dot(plain, tl.trans(latents))
        scores = tl.dot(rotated, tl.trans(keys), scores)
        scores = tl.where(key_position[None, :] <= position[:, None], scores * scale, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(latents.dtype), latents, mixed)
        highest = higher
    target = out + place * LATENT + column[None, :]
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_query & (column < LATENT)[None, :])
