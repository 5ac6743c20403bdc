"""Prefill attention for Hopper: one warp copies pages into shared memory while two groups of four warps take turns with
the tensor cores, so that one multiplies while the other computes weights. Written in Gluon, Triton's lower language.

Each program takes 128 tokens of one row, and one head. It goes through the keys from the last to the first: only the
first few tiles need a mask. Reference: `paged.attention_reference`; other cards and rules: `prefill.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.decode import LOG2_E
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.attention.split_keys import num_splits
from cortex.neuron.kernels.batch import PREFILL_TILE, Batch, prefill_tiles
from cortex.neuron.kernels.jit import constant, num_processors
from cortex.neuron.private_api.gluon import (
    Descriptor,
    gl,
    gluon_jit,
    hopper,
    load_async,
    reinterpreted,
    shared_layout,
)
from cortex.neuron.private_api.torch import compare, noise
from cortex.neuron.private_api.triton import GLUON

_LOG2_E = constant(LOG2_E)
HALF = PREFILL_TILE // 2
"""Tokens of each group of warps."""
PANEL = 64
"""Dimensions that one copy of a page brings: lines of 128 bytes, which is how the tensor cores read shared memory."""
KEYS = {64: 128, 128: 128, 256: 64}
"""Keys of a tile, by dimensions of a head: two tiles of keys and two of values fit in shared memory."""
STAGES = 2
MIN_WINDOW, MAX_SPLITS = 512, 2
"""Measured on an H200: the other kernel is faster for smaller windows, and where it may divide keys further."""
WARPS = 4


def takes(q: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor) -> bool:
    """Whether `prefill_attention` computes these prefill rows, and is the fastest that does.
    q: as there. Their number of
    tokens decides, not their lengths: a captured graph serves rows of any length."""
    tokens, heads, dim = q.shape
    page_tokens = key_pages.shape[1]
    return (
        _is_usable(q, rules)
        and key_pages.dtype == q.dtype
        and key_pages.is_contiguous()
        and page_tokens % 8 == 0
        and KEYS[dim] % page_tokens == 0
        and rules.softcap is None
        and not (rules.whole_pictures and batch.reach is not None)
        and not batch.batch_invariant  # the last key of a tile decides where its sums begin
        and (rules.window is None or rules.window >= MIN_WINDOW)
        and num_splits(tokens, PREFILL_TILE, heads, num_processors(q.device)) <= MAX_SPLITS
    )


def _is_usable(q: Tensor, rules: AttentionRules) -> bool:
    """Whether these heads have a kernel, and it computes what torch does."""
    dim, has_window, has_sinks = q.shape[2], rules.window is not None, rules.sinks is not None
    if dim not in KEYS or q.dtype not in (torch.bfloat16, torch.float16) or q.device.type == "cpu":
        return False
    if q.is_meta:
        return GLUON.is_usable
    kind = (q.device, q.dtype, dim, has_window, has_sinks)
    return GLUON.usable_on(kind, partial(_check, *kind))


def _check(device: torch.device, dtype: torch.dtype, dim: int, has_window: bool, has_sinks: bool) -> None:
    """Compares tokens after a prefix with torch's attention. Raises if they differ."""
    start, count, page_tokens, scale, window = 150, 140, 32, dim**-0.5, 100
    length, pages = start + count, -(-(start + count) // page_tokens)
    q = noise(count, 2, dim, device=device, dtype=dtype)
    keys, values = noise(2, pages + 1, page_tokens, 1, dim, device=device, dtype=dtype)
    sinks = torch.tensor([0.5, -1.0], device=device)
    near = torch.arange(start, length)[:, None] - torch.arange(length)
    mask = (near >= 0) & ((near < window) | (not has_window))
    scores = q.float().transpose(0, 1) @ keys[1:].flatten(0, 2)[:length].float().T * scale
    scores = scores.masked_fill(~mask.to(device), -torch.inf)
    if has_sinks:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, count, 1)), -1)
    weights = scores.softmax(-1)[..., :length]

    def ints(*given: int) -> Tensor:
        return torch.tensor(given, dtype=torch.int32, device=device)

    tiles = ints(*prefill_tiles([count]).flatten().tolist()).view(-1, 2)
    nothing, table = torch.empty(0, device=device), ints(*range(1, pages + 1))[None]
    batch = Batch(
        tokens=nothing,
        positions=nothing,
        slots=nothing,
        rows=torch.zeros(1, dtype=torch.int64, device=device),
        lengths=ints(length),
        page_table=table,
        num_decodes=0,
        max_length=length,
        prefill_offsets=ints(0, count),
        prefill_tiles=tiles,
    )
    rules = AttentionRules(scale, nothing, window=window if has_window else None, sinks=sinks if has_sinks else None)
    out = torch.full_like(q, torch.nan)
    prefill_attention(q, rules, batch, keys, values, out)
    compare(out.transpose(0, 1), weights @ values[1:].flatten(0, 2)[:length].float())


def prefill_attention(
    q: Tensor, rules: AttentionRules, batch: Batch, key_pages: Tensor, value_pages: Tensor, out: Tensor
) -> None:
    """q and out: the tokens of the prefill rows [tokens, heads, dim], contiguous, q rotated. Their KV is in the
    pages."""
    _, heads, dim = q.shape
    _, page_tokens, kv_heads, _ = key_pages.shape
    assert batch.prefill_tiles is not None
    layout = shared_layout(q.dtype)

    def copied(lines: Tensor, width: int, count: int) -> Any:
        return Descriptor(lines, [lines.numel() // width, width], [width, 1], [count, PANEL], layout)

    _prefill_kernel[(heads, len(batch.prefill_tiles))](
        copied(q, heads * dim, HALF),
        copied(key_pages, kv_heads * dim, page_tokens),
        copied(value_pages, kv_heads * dim, page_tokens),
        batch.page_table,
        rules.sinks,
        batch.prefill_tiles,
        batch.rows[batch.num_decodes :],
        batch.lengths[batch.num_decodes :],
        batch.prefill_offsets,
        out,
        rules.scale * LOG2_E,
        batch.page_table.stride(0),
        rules.window or 0,
        heads,
        heads // kv_heads,
        DIM=dim,
        PAGE=page_tokens,
        KEYS=KEYS[dim],
        STAGES=STAGES,
        HALF=HALF,
        PANEL=PANEL,
        WINDOWED=rules.window is not None,
        SINKS=rules.sinks is not None,
        num_warps=WARPS,
    )


@gluon_jit(
    do_not_specialize=["table_stride", "window", "heads", "group"],
    do_not_specialize_on_alignment=["rows", "lengths", "offsets"],
)
def _prefill_kernel(
    query_lines,
    key_lines,
    value_lines,
    table,
    sinks,
    tiles,
    rows,
    lengths,
    offsets,
    out,
    scale,
    table_stride,
    window,
    heads,
    group,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    HALF: gl.constexpr,
    PANEL: gl.constexpr,
    WINDOWED: gl.constexpr,
    SINKS: gl.constexpr,
):
    dtype: gl.constexpr = query_lines.dtype
    layout: gl.constexpr = query_lines.layout
    panels: gl.constexpr = DIM // PANEL
    tile = gl.program_id(1)
    prefill = gl.load(tiles + tile * 2)
    first = gl.load(tiles + tile * 2 + 1)  # token of this program in its row
    offset = gl.load(offsets + prefill)
    count = gl.load(offsets + prefill + 1) - offset
    length = gl.load(lengths + prefill)
    table_row = table + gl.load(rows + prefill) * table_stride
    oldest = length - count + first  # the position of the first token
    last = gl.maximum(gl.minimum(length, oldest + 2 * HALF) - 1, 0) // KEYS  # tile of keys
    begin = 0
    if WINDOWED:
        begin = gl.maximum(0, oldest - window + 1) // KEYS
    num_tiles = gl.maximum(1, last + 1 - begin)  # one, of which nothing is stored, for a tile of no row
    num_masked = gl.minimum(num_tiles, gl.maximum(1, last + 1 - (oldest + 1) // KEYS))

    # Copies bring panels of pages; the tensor cores read the same memory as whole tiles.
    query_panels = gl.allocate_shared_memory(dtype, [2 * panels, HALF, PANEL], layout)
    key_panels = gl.allocate_shared_memory(dtype, [STAGES * panels * KEYS // PAGE, PAGE, PANEL], layout)
    value_panels = gl.allocate_shared_memory(dtype, [STAGES * panels * KEYS // PAGE, PAGE, PANEL], layout)
    queries = reinterpreted(query_panels, dtype, [2, HALF, DIM], layout)
    keys = reinterpreted(key_panels, dtype, [STAGES, KEYS, DIM], layout)
    values = reinterpreted(value_panels, dtype, [STAGES, KEYS, DIM], layout)
    # Of each stage of keys, then of values; the queries have the last one.
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], hopper.mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    for each in gl.static_range(2 * STAGES + 1):
        hopper.mbarrier.init(ready.index(each), count=1)
    for each in gl.static_range(2 * STAGES):
        hopper.mbarrier.init(free.index(each), count=2)
    for each in gl.static_range(2):
        hopper.mbarrier.init(turns.index(each), count=1)
    gl.warp_specialize(
        [
            (_attend, (
                0, queries, keys, values, ready, free, turns, sinks, out, first, count, offset, oldest, last,
                num_masked, num_tiles, window, scale, heads, WINDOWED, SINKS,
            )),
            (_attend, (
                1, queries, keys, values, ready, free, turns, sinks, out, first, count, offset, oldest, last,
                num_masked, num_tiles, window, scale, heads, WINDOWED, SINKS,
            )),
            (_copy, (
                query_lines, key_lines, value_lines, query_panels, key_panels, value_panels, ready, free, table_row,
                offset + first, oldest, length, last, num_tiles, window, group,
                DIM, PAGE, KEYS, STAGES, HALF, PANEL, WINDOWED,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon_jit
def _copy(
    query_lines,
    key_lines,
    value_lines,
    query_panels,
    key_panels,
    value_panels,
    ready,
    free,
    table_row,
    line,
    oldest,
    length,
    last,
    num_tiles,
    window,
    group,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    HALF: gl.constexpr,
    PANEL: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """The part of the copying warp. line: the first query's"""
    panels: gl.constexpr = DIM // PANEL
    pages: gl.constexpr = KEYS // PAGE
    tile_bytes: gl.constexpr = KEYS * DIM * key_lines.dtype.primitive_bitwidth // 8
    head = gl.program_id(0)
    dim = head // group * DIM
    hopper.mbarrier.expect(ready.index(2 * STAGES), 2 * HALF * DIM * query_lines.dtype.primitive_bitwidth // 8)
    for half in gl.static_range(2):
        for panel in gl.static_range(panels):
            load_async(
                query_lines,
                [line + half * HALF, head * DIM + panel * PANEL],
                ready.index(2 * STAGES),
                query_panels.index(half * panels + panel),
            )
    for tile in range(num_tiles):
        stage = tile % STAGES
        is_odd = (tile // STAGES) & 1
        position = (last - tile) * KEYS
        hopper.mbarrier.wait(free.index(stage), is_odd ^ 1)
        hopper.mbarrier.expect(ready.index(stage), tile_bytes)
        for each in gl.static_range(pages):
            page = _page(table_row, position + each * PAGE, oldest, length, window, PAGE, WINDOWED) * PAGE
            for panel in gl.static_range(panels):
                target = (stage * panels + panel) * pages + each
                load_async(key_lines, [page, dim + panel * PANEL], ready.index(stage), key_panels.index(target))
        hopper.mbarrier.wait(free.index(STAGES + stage), is_odd ^ 1)
        hopper.mbarrier.expect(ready.index(STAGES + stage), tile_bytes)
        for each in gl.static_range(pages):
            page = _page(table_row, position + each * PAGE, oldest, length, window, PAGE, WINDOWED) * PAGE
            for panel in gl.static_range(panels):
                target = (stage * panels + panel) * pages + each
                load_async(
                    value_lines, [page, dim + panel * PANEL], ready.index(STAGES + stage), value_panels.index(target)
                )


@gluon_jit
def _page(table_row, position, oldest, length, window, PAGE: gl.constexpr, WINDOWED: gl.constexpr):
    """The page that begins with a position; the first page where no query sees any of it."""
    held = position < length
    if WINDOWED:  # pages behind the window of the first query may belong to others by now
        held = held & (position + PAGE - 1 > oldest - window)
    return gl.load(table_row + position // PAGE, mask=held, other=0)


@gluon_jit
def _attend(
    GROUP: gl.constexpr,
    queries,
    keys,
    values,
    ready,
    free,
    turns,
    sinks,
    out,
    first,
    count,
    offset,
    oldest,
    last,
    num_masked,
    num_tiles,
    window,
    scale,
    heads,
    WINDOWED: gl.constexpr,
    SINKS: gl.constexpr,
):
    """The part of one group of warps."""
    STAGES: gl.constexpr = keys.shape[0]
    KEYS: gl.constexpr = keys.shape[1]
    HALF: gl.constexpr = queries.shape[1]
    DIM: gl.constexpr = queries.shape[2]
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    added: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    head = gl.program_id(0)
    token = first + GROUP * HALF
    position = oldest + GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(1, scored))
    highest = gl.full([HALF], -float("inf"), gl.float32, gl.SliceLayout(1, scored))
    total = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, scored))
    if SINKS:
        highest = gl.full([HALF], 1.0, gl.float32, gl.SliceLayout(1, scored)) * gl.load(sinks + head) * _LOG2_E
        total += 1.0
    query = queries.index(GROUP)
    hopper.mbarrier.wait(ready.index(2 * STAGES), 0)
    hopper.mbarrier.wait(ready.index(0), 0)
    none = gl.zeros([HALF, KEYS], gl.float32, scored)
    scores = hopper.warpgroup_mma(query, keys.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    scores = hopper.warpgroup_mma_wait(0, deps=[scores])
    hopper.mbarrier.arrive(free.index(0))
    key = last * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, scored))
    weights, highest, total, _ = _weighted(scores, highest, total, key, position, window, scale, True, WINDOWED)
    operand = gl.convert_layout(weights.to(queries.dtype), gl.DotOperandLayout(0, added, 2))
    mixed = gl.zeros([HALF, DIM], gl.float32, added)
    highest, total, mixed, operand = _add_tiles(
        GROUP, 1, num_masked, query, keys, values, ready, free, turns, position, last, window, scale,
        highest, total, mixed, operand, True, WINDOWED, scored, added,
    )  # fmt: skip
    highest, total, mixed, operand = _add_tiles(
        GROUP, num_masked, num_tiles, query, keys, values, ready, free, turns, position, last, window, scale,
        highest, total, mixed, operand, WINDOWED, WINDOWED, scored, added,
    )  # fmt: skip
    stage = (num_tiles - 1) % STAGES
    hopper.mbarrier.wait(ready.index(STAGES + stage), ((num_tiles - 1) // STAGES) & 1)
    mixed = hopper.warpgroup_mma(operand, values.index(stage), mixed, is_async=True)
    mixed = hopper.warpgroup_mma_wait(0, deps=[mixed])
    mixed = mixed / gl.convert_layout(total, gl.SliceLayout(1, added))[:, None]
    own = token + gl.arange(0, HALF, gl.SliceLayout(1, added))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, added))
    line = (offset + own).to(gl.int64) * heads + head
    gl.store(out + line[:, None] * DIM + dim[None, :], mixed.to(queries.dtype), mask=(own < count)[:, None])


@gluon_jit
def _add_tiles(
    GROUP: gl.constexpr,
    begin,
    end,
    query,
    keys,
    values,
    ready,
    free,
    turns,
    position,
    last,
    window,
    scale,
    highest,
    total,
    mixed,
    operand,
    MASKED: gl.constexpr,
    WINDOWED: gl.constexpr,
    scored: gl.constexpr,
    added: gl.constexpr,
):
    """Adds the tiles from `begin` to `end`, counted from the last, to the online softmax. While the tensor cores add
    the values of a tile, the weights of the next are computed. operand: the weights of the tile before `begin`"""
    STAGES: gl.constexpr = keys.shape[0]
    KEYS: gl.constexpr = keys.shape[1]
    HALF: gl.constexpr = query.shape[0]
    for tile in range(begin, end):
        stage = tile % STAGES
        before = (tile - 1) % STAGES
        is_odd_before = ((tile - 1) // STAGES) & 1
        hopper.mbarrier.wait(ready.index(stage), (tile // STAGES) & 1)
        hopper.mbarrier.wait(turns.index(GROUP), (tile & 1) ^ GROUP)
        none = gl.zeros([HALF, KEYS], gl.float32, scored)
        scores = hopper.warpgroup_mma(query, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        hopper.mbarrier.wait(ready.index(STAGES + before), is_odd_before)
        adding = hopper.warpgroup_mma(operand, values.index(before), mixed, is_async=True)
        hopper.mbarrier.arrive(turns.index(1 - GROUP))
        scores = hopper.warpgroup_mma_wait(1, deps=[scores])
        hopper.mbarrier.arrive(free.index(stage))
        key = (last - tile) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, scored))
        weights, highest, total, shrink = _weighted(
            scores, highest, total, key, position, window, scale, MASKED, WINDOWED
        )
        following = weights.to(query.dtype)
        # Already over; keeps the assembler from moving the next wait before the weights.
        hopper.mbarrier.wait(ready.index(STAGES + before), is_odd_before)
        mixed, following = hopper.warpgroup_mma_wait(0, deps=[adding, following])
        hopper.mbarrier.arrive(free.index(STAGES + before))
        operand = gl.convert_layout(following, gl.DotOperandLayout(0, added, 2))
        mixed = mixed * gl.convert_layout(shrink, gl.SliceLayout(1, added))[:, None]
    return highest, total, mixed, operand


@gluon_jit
def _weighted(scores, highest, total, key, position, window, scale, MASKED: gl.constexpr, WINDOWED: gl.constexpr):
    """The weights of a tile of scores, the highest score and the sum of weights with them, and the factor of what was
    added before."""
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = gl.where(visible, scores, -float("inf"))
    higher = gl.maximum(highest, gl.max(scores, 1) * scale)
    base = higher
    if MASKED:
        base = gl.where(higher == -float("inf"), 0.0, higher)  # no key so far is visible
    shrink = gl.exp2(highest - base)
    weights = gl.exp2(scores * scale - base[:, None])
    return weights, higher, total * shrink + gl.sum(weights, 1), shrink
