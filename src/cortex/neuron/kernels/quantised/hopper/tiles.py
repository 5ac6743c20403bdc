"""Mixtures of packed experts on Hopper: one warp copies codes and the rows of pairs into shared memory, while two
groups of four warps unpack codes in registers and multiply. A group unpacks one block of weights while the tensor cores
multiply another. Written in Gluon, Triton's lower language.

The pairs of each expert are gathered into tiles, which lie one after another; a tile has pairs of one expert. Programs
take turns with products of a tile and 256 rows of its expert's matrix: 128 of the gate and the same of up, or 256
outputs. Reference: `experts.py`, which computes the same on other cards and for other layouts.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import activation_number
from cortex.neuron.kernels.device_properties import properties_of
from cortex.neuron.kernels.expert_pairs import PairLists
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, num_processors, tl, triton
from cortex.neuron.kernels.products.grouped import max_tiles, own_tile, pairs_from
from cortex.neuron.kernels.quantised.codes import PackedCodes, empty_codes, unpacked
from cortex.neuron.kernels.quantised.layout import CHUNK, FP4, UNIT, Layout
from cortex.neuron.kernels.quantised.unpack import RESTORE, small_floats_by_half, unpack_ptx
from cortex.neuron.private_api.gluon import Descriptor, gl, gluon_jit, hopper, load_async, reinterpreted, shared_layout
from cortex.neuron.private_api.torch import compare, noise
from cortex.neuron.private_api.triton import GLUON

HALF = 64
"""Rows of a block of weights. A group of warps has two blocks."""
PANEL = 64
"""Columns of the pairs that one copy brings: lines of 128 bytes, which is how the tensor cores read shared memory."""
MAX_PAIRS = 128
"""Pairs of a tile, at most."""
GENERATION = 9
_UNITS = CHUNK // UNIT
_GATHERED_ROWS, _GATHERED_COLUMNS = 8, 512
_RESTORE = RESTORE


class PairTiles(NamedTuple):
    """Pairs of experts, in tiles of one expert each."""

    rows: Tensor
    """[tiles · pairs, inputs]: their rows; those after the last pair of a tile are undefined"""
    tiles: Tensor
    """[tiles, 3] int32: the expert, the first place in the expert's list, and the number of pairs, which may be 0"""
    pairs: int
    """Pairs of a tile."""


def takes(x: Tensor, layout: Layout, num_pairs: int, num_experts: int) -> bool:
    """Whether these pairs are computed here, and faster than elsewhere."""
    return (
        x.dtype == torch.bfloat16
        and (layout.low_bits, layout.high_bits, layout.scale_words) == (4, 0, 1)
        and is_faster(layout, num_pairs, num_experts)
        and properties_of(x.device).capability[0] == GENERATION
        and (GLUON.is_usable if x.is_meta else GLUON.usable_on((x.device, layout), partial(_check, x.device, layout)))
    )


def is_faster(layout: Layout, num_pairs: int, num_experts: int) -> bool:
    """Whether a batch of this size takes less time here than with `experts.py` or `streams.py`. Measured on an
    H200. Pure."""
    return tile_pairs(num_pairs, num_experts) > 16 or (is_by_half(layout) and num_pairs >= 6 * num_experts)


def tile_pairs(num_pairs: int, num_experts: int) -> int:
    """Pairs of a tile, so that most experts of small batches need one."""
    wanted = -(-2 * num_pairs // num_experts)
    return max(16, min(MAX_PAIRS, 1 << (wanted - 1).bit_length()))


def _check(device: torch.device, layout: Layout) -> None:
    """Compares a product with torch's. Raises if they differ."""
    tokens, inputs, outputs = 40, 192, 136
    codes = empty_codes(layout, 2 * outputs, inputs, device)
    code = torch.arange(2 * outputs * inputs, device=device).view(2 * outputs, inputs).remainder(11).remainder(8)
    scale = torch.rand(2 * outputs, inputs // 32, generator=torch.Generator().manual_seed(0)).to(device)
    zero = 3 if layout.has_zeros else layout.zero or 0
    if layout.codebook:
        code = zero + torch.tensor(layout.codebook, device=device)[code]
    codes.put_codes(0, code.to(torch.uint8), scale, -zero * scale)
    x = noise(tokens, inputs, device=device, dtype=torch.bfloat16)
    members = torch.arange(tokens, dtype=torch.int32, device=device).repeat(2, 1)
    counts = torch.tensor([tokens, 0], dtype=torch.int32, device=device)
    lists = PairLists(torch.full((tokens, 1), 0.5, device=device), counts, members)
    out = torch.full((tokens, outputs), torch.nan, dtype=x.dtype, device=device)
    given = gather_pairs(x, lists, 1, layout)
    tiles_product(given, codes, lists, out, activation=None)
    compare(out, x.float() @ unpacked(codes, slice(0, outputs)).T * 0.5)


def gated_pairs(
    x: Tensor,
    gate_up: PackedCodes,
    down: PackedCodes,
    lists: PairLists,
    parts: Tensor,
    *,
    slots: int,
    activation: str,
    biases: tuple[Tensor | None, Tensor | None],
) -> None:
    """parts[pair] = weight · expert(x). x: [tokens, hidden]; parts: [tokens · slots, hidden]"""
    given = gather_pairs(x, lists, slots, gate_up.layout)
    inner = torch.empty(len(given.rows), down.inputs, dtype=x.dtype, device=x.device)
    tiles_product(given, gate_up, lists, inner, activation=activation, bias=biases[0])
    tiles_product(given._replace(rows=inner), down, lists, parts, activation=None, bias=biases[1])


def gather_pairs(x: Tensor, lists: PairLists, slots: int, layout: Layout) -> PairTiles:
    """The rows of all pairs, by expert. x: [tokens, inputs]"""
    num_pairs, num_experts, inputs = len(x) * slots, len(lists.counts), x.shape[1]
    pairs = tile_pairs(num_pairs, num_experts)
    num_tiles = max_tiles(num_pairs, num_experts, pairs)
    rows = torch.empty((num_tiles * pairs, inputs), dtype=x.dtype, device=x.device)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=x.device)
    _gather_kernel[(triton.cdiv(pairs, _GATHERED_ROWS), num_tiles, triton.cdiv(inputs, _GATHERED_COLUMNS))](
        x,
        lists.counts,
        lists.members,
        rows,
        tiles,
        lists.members.stride(0),
        INPUTS=inputs,
        SLOTS=slots,
        EXPERTS=num_experts,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        TILE=pairs,
        BY_HALF=is_by_half(layout),
        ROWS=_GATHERED_ROWS,
        BLOCK=_GATHERED_COLUMNS,
        num_warps=4,
        **launch_options(x.device),
    )
    return PairTiles(rows, tiles, pairs)


def is_by_half(layout: Layout) -> bool:
    """Whether the tensor cores get columns in another order: bits 0 and 3 of their numbers swapped. Then the two values
    of a register come from the same place of both halves of a word, which takes fewer instructions."""
    return layout == FP4


def tiles_product(
    given: PairTiles,
    codes: PackedCodes,
    lists: PairLists,
    out: Tensor,
    *,
    activation: str | None,
    bias: Tensor | None = None,
) -> None:
    """With an activation: out[place] = activation(gate) · up of each pair, in the order of the tiles and of columns as
    `given`. Without: out[pair] = weight · product."""
    outputs, inputs = out.shape[1], codes.inputs
    num_tiles, chunks, pairs, by_half = (
        len(given.tiles),
        codes.low.shape[1] // _UNITS,
        given.pairs,
        is_by_half(codes.layout),
    )
    blocks = triton.cdiv(outputs, 2 * HALF if activation is not None else 4 * HALF)
    _tiles_kernel[(min(blocks * num_tiles, num_processors(out.device)),)](
        Descriptor(given.rows, [len(given.rows), inputs], [inputs, 1], [pairs, PANEL], shared_layout(out.dtype)),
        Descriptor(codes.low, list(codes.low.shape), [chunks * _UNITS, 1], [2 * HALF, _UNITS], _word_layout()),
        codes.scales,
        bias,
        lists.weights,
        given.tiles,
        lists.members,
        out,
        num_tiles * blocks,
        lists.members.stride(0),
        ROWS=codes.outputs,
        OUTPUTS=outputs,
        CHUNKS=chunks,
        BLOCKS=blocks,
        ACTIVATION=activation_number(activation),
        BIAS=bias is not None,
        PAIRS=pairs,
        STAGES=3 if pairs > 64 else 4,
        HALF=HALF,
        PANEL=PANEL,
        BY_HALF=by_half,
        PTX=small_floats_by_half() if by_half else unpack_ptx(codes.layout),
        num_warps=4,
    )


def _word_layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)


@jit(do_not_specialize=["members_stride"])
def _gather_kernel(
    x,
    counts,
    members,
    rows,
    tiles,
    members_stride,
    INPUTS: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BY_HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    expert, first, count = own_tile(counts, EXPERTS, EXPERTS_BLOCK, TILE)
    tile = tl.program_id(1)
    count = tl.where(expert < EXPERTS, tl.minimum(count - first, TILE), 0)
    begin = tl.program_id(0) * ROWS
    if (begin == 0) & (tl.program_id(2) == 0):
        tl.store(tiles + tile * 3, tl.minimum(expert, EXPERTS - 1).to(tl.int32))
        tl.store(tiles + tile * 3 + 1, first)
        tl.store(tiles + tile * 3 + 2, count)
    if begin < count:
        pair, valid = pairs_from(members, members_stride, expert, first + begin, first + count, ROWS)
        source = x + (pair // SLOTS).to(tl.int64)[:, None] * INPUTS
        target = rows + (tile.to(tl.int64) * TILE + begin + tl.arange(0, ROWS))[:, None] * INPUTS
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = valid[:, None] & (column < INPUTS)[None, :]
        taken = column
        if BY_HALF:  # bits 0 and 3 swapped
            taken = (column & -10) | ((column & 1) << 3) | ((column >> 3) & 1)
        tl.store(target + column[None, :], tl.load(source + taken[None, :], mask=inside), mask=inside)


@gluon_jit(do_not_specialize=["num_programs", "members_stride"])
def _tiles_kernel(
    pair_lines,
    code_lines,
    scales,
    bias,
    pair_weights,
    tiles,
    members,
    out,
    num_programs,
    members_stride,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCKS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    PAIRS: gl.constexpr,
    STAGES: gl.constexpr,
    HALF: gl.constexpr,
    PANEL: gl.constexpr,
    BY_HALF: gl.constexpr,
    PTX: gl.constexpr,
):
    UNITS: gl.constexpr = 16
    dtype: gl.constexpr = pair_lines.dtype
    panels: gl.constexpr = 2
    value_panels = gl.allocate_shared_memory(dtype, [STAGES * panels, PAIRS, PANEL], pair_lines.layout)
    values = reinterpreted(value_panels, dtype, [STAGES, PAIRS, panels * PANEL], pair_lines.layout)
    code_blocks = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 2 * HALF, UNITS], code_lines.layout)
    codes = reinterpreted(code_blocks, gl.int32, [STAGES * 4, HALF, UNITS], code_lines.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(stage), count=1)
        hopper.mbarrier.init(free.index(stage), count=2)
    gl.warp_specialize(
        [
            (_multiply, (
                0, values, codes, ready, free, scales, bias, pair_weights, tiles, members, out, num_programs,
                members_stride, ROWS, OUTPUTS, CHUNKS, BLOCKS, ACTIVATION, BIAS, BY_HALF, PTX,
            )),
            (_multiply, (
                1, values, codes, ready, free, scales, bias, pair_weights, tiles, members, out, num_programs,
                members_stride, ROWS, OUTPUTS, CHUNKS, BLOCKS, ACTIVATION, BIAS, BY_HALF, PTX,
            )),
            (_copy, (
                pair_lines, code_lines, value_panels, code_blocks, ready, free, tiles, num_programs,
                OUTPUTS, CHUNKS, BLOCKS, ACTIVATION, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon_jit
def _copy(pair_lines, code_lines, value_panels, code_blocks, ready, free, tiles, num_programs, OUTPUTS: gl.constexpr,
          CHUNKS: gl.constexpr, BLOCKS: gl.constexpr, ACTIVATION: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The part of the copying warp."""
    PAIRS: gl.constexpr = value_panels.shape[1]
    PANEL: gl.constexpr = value_panels.shape[2]
    BLOCK: gl.constexpr = code_blocks.shape[1]
    UNITS: gl.constexpr = code_blocks.shape[2]
    step = 0
    for program in range(gl.program_id(0), num_programs, gl.num_programs(0)):
        tile = program // BLOCKS
        if gl.load(tiles + tile * 3 + 2) > 0:
            expert = gl.load(tiles + tile * 3)
            if ACTIVATION:
                row = expert * (2 * OUTPUTS) + program % BLOCKS * BLOCK
                second = row + OUTPUTS
            else:
                row = expert * OUTPUTS + program % BLOCKS * (2 * BLOCK)
                second = row + BLOCK
            for chunk in range(CHUNKS):
                stage = step % STAGES
                hopper.mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
                own = ready.index(stage)
                hopper.mbarrier.expect(own, 2 * BLOCK * UNITS * 4 + 2 * PAIRS * PANEL * 2)
                load_async(code_lines, [row, chunk * UNITS], own, code_blocks.index(2 * stage))
                load_async(code_lines, [second, chunk * UNITS], own, code_blocks.index(2 * stage + 1))
                for panel in gl.static_range(2):
                    load_async(
                        pair_lines,
                        [tile * PAIRS, (chunk * 2 + panel) * PANEL],
                        own,
                        value_panels.index(2 * stage + panel),
                    )
                step += 1


@gluon_jit
def _multiply(
    GROUP: gl.constexpr,
    values,
    codes,
    ready,
    free,
    scales,
    bias,
    pair_weights,
    tiles,
    members,
    out,
    num_programs,
    members_stride,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCKS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    BY_HALF: gl.constexpr,
    PTX: gl.constexpr,
):
    """The part of one group of warps: 64 rows of each of the two blocks of a program."""
    STAGES: gl.constexpr = values.shape[0]
    PAIRS: gl.constexpr = values.shape[1]
    HALF: gl.constexpr = codes.shape[1]
    BLOCK: gl.constexpr = 2 * HALF
    added: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIRS, 16])
    # a thread has units 4·t to 4·t + 3 of two rows, as tensor cores want them
    words: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
    apart: gl.constexpr = OUTPUTS if ACTIVATION else BLOCK
    step = 0
    for program in range(gl.program_id(0), num_programs, gl.num_programs(0)):
        tile = program // BLOCKS
        count = gl.load(tiles + tile * 3 + 2)
        if count > 0:
            expert = gl.load(tiles + tile * 3)
            if ACTIVATION:
                block = program % BLOCKS * BLOCK + GROUP * HALF
                base = expert * (2 * OUTPUTS)
            else:
                block = program % BLOCKS * (2 * BLOCK) + GROUP * HALF
                base = expert * OUTPUTS
            row = base + block + gl.arange(0, HALF, gl.SliceLayout(1, words))
            group = gl.arange(0, 16, gl.SliceLayout(0, words)) % 4
            first = gl.minimum(row, ROWS - 1).to(gl.int64) * (CHUNKS * 4)
            second = gl.minimum(row + apart, ROWS - 1).to(gl.int64) * (CHUNKS * 4)
            scale_lines = scales + (first[:, None] + group[None, :])
            scale_lines_2 = scales + (second[:, None] + group[None, :])
            scale, scale_2 = gl.load(scale_lines), gl.load(scale_lines_2)
            total = gl.zeros([HALF, PAIRS], gl.float32, added)
            total_2 = gl.zeros([HALF, PAIRS], gl.float32, added)
            hopper.mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
            weights = unpacked_operand(codes.index(4 * (step % STAGES) + GROUP).load(words), scale, added, BY_HALF, PTX)
            for chunk in range(CHUNKS):
                stage = step % STAGES
                after = gl.minimum(chunk + 1, CHUNKS - 1) * 4
                scale, next_scale_2 = gl.load(scale_lines + after), gl.load(scale_lines_2 + after)
                own = values.index(stage).permute((1, 0))
                adding = hopper.warpgroup_mma(weights, own, total, is_async=True)
                weights_2 = unpacked_operand(
                    codes.index(4 * stage + 2 + GROUP).load(words), scale_2, added, BY_HALF, PTX
                )
                adding_2 = hopper.warpgroup_mma(weights_2, own, total_2, is_async=True)
                total, _ = hopper.warpgroup_mma_wait(1, deps=[adding, weights])
                step += 1
                if chunk + 1 < CHUNKS:
                    hopper.mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
                weights = unpacked_operand(
                    codes.index(4 * (step % STAGES) + GROUP).load(words), scale, added, BY_HALF, PTX
                )
                total_2, _, weights = hopper.warpgroup_mma_wait(0, deps=[adding_2, weights_2, weights])
                hopper.mbarrier.arrive(free.index(stage))
                scale_2 = next_scale_2
            pairs = members + expert.to(gl.int64) * members_stride + gl.load(tiles + tile * 3 + 1)
            _store(
                total * _RESTORE, total_2 * _RESTORE, bias, pair_weights, pairs, count, out, tile * PAIRS, base, block,
                OUTPUTS, ACTIVATION, BIAS, BY_HALF, added,
            )  # fmt: skip


@gluon_jit
def unpacked_operand(word, scale, added: gl.constexpr, BY_HALF: gl.constexpr, PTX: gl.constexpr):
    """Weights / RESTORE as the left operand of tensor cores. word and scale: [rows, 16] → [rows, 128]"""
    ROWS: gl.constexpr = word.shape[0]
    scale = scale.to(gl.int32)
    a0, b0, a1, b1, a2, b2, a3, b3 = gl.inline_asm_elementwise(
        PTX,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r",
        [word, word, scale, scale],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    first = gl.join(gl.join(a0, b0), gl.join(a1, b1))
    second = gl.join(gl.join(a2, b2), gl.join(a3, b3))
    weights = gl.reshape(gl.join(first, second), (ROWS, 4, 4, 2, 2, 2))
    # row, t, v, j0, j1, h → row, v, j1, h, t, j0, or row, t, v, h, j0, j1 → row, v, j1, j0, t, h
    weights = gl.permute(weights, (0, 2, 4, 5, 1, 3)) if BY_HALF else gl.permute(weights, (0, 2, 5, 4, 1, 3))
    weights = gl.reshape(weights, (ROWS, 128))
    return gl.convert_layout(weights, gl.DotOperandLayout(0, added, 2), assert_trivial=True)


@gluon_jit
def _store(
    total,
    total_2,
    bias,
    pair_weights,
    pairs,
    count,
    out,
    place,
    base,
    block,
    OUTPUTS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    BY_HALF: gl.constexpr,
    added: gl.constexpr,
):
    """How a group ends: with the expert's bias, then the activation or the weight of each pair."""
    HALF: gl.constexpr = total.shape[0]
    PAIRS: gl.constexpr = total.shape[1]
    BLOCK: gl.constexpr = 2 * HALF
    apart: gl.constexpr = OUTPUTS if ACTIVATION else BLOCK
    output = block + gl.arange(0, HALF, gl.SliceLayout(1, added))
    if BIAS:
        total += gl.load(bias + base + output, mask=output < OUTPUTS, other=0.0).to(gl.float32)[:, None]
        inside = output < OUTPUTS if ACTIVATION else output + BLOCK < OUTPUTS
        total_2 += gl.load(bias + base + apart + output, mask=inside, other=0.0).to(gl.float32)[:, None]
    if ACTIVATION:
        _store_block(activated(total, total_2, ACTIVATION), pairs, count, out, place, block, OUTPUTS, False, BY_HALF)
    else:
        pair = gl.arange(0, PAIRS, gl.SliceLayout(0, added))
        share = gl.load(pair_weights + gl.load(pairs + pair, mask=pair < count, other=0))[None, :]
        _store_block(total * share, pairs, count, out, place, block, OUTPUTS, True, False)
        _store_block(total_2 * share, pairs, count, out, place, block + BLOCK, OUTPUTS, True, False)


@gluon_jit
def _store_block(total, pairs, count, out, place, block, OUTPUTS: gl.constexpr, BY_PAIR: gl.constexpr,
                 BY_HALF: gl.constexpr):  # fmt: skip
    """total: [HALF, PAIRS]"""
    HALF: gl.constexpr = total.shape[0]
    PAIRS: gl.constexpr = total.shape[1]
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    each = gl.arange(0, PAIRS, gl.SliceLayout(1, lines))
    column = block + gl.arange(0, HALF, gl.SliceLayout(0, lines))
    inside = (each < count)[:, None] & (column < OUTPUTS)[None, :]
    rounded = gl.permute(total.to(out.dtype.element_ty), (1, 0))
    if BY_HALF:  # bits 0 and 3 of the column swapped; `column` is that of the place
        parted = gl.reshape(rounded, (PAIRS, HALF // 16, 2, 4, 2))
        rounded = gl.reshape(gl.permute(parted, (0, 1, 4, 3, 2)), (PAIRS, HALF))
    rounded = gl.convert_layout(rounded, lines)
    line = gl.load(pairs + each, mask=each < count, other=0) if BY_PAIR else place + each
    gl.store(out + line.to(gl.int64)[:, None] * OUTPUTS + column[None, :], rounded, mask=inside)


@gluon_jit
def activated(gate, up, ACTIVATION: gl.constexpr):
    """As `activations.activated`."""
    if ACTIVATION == 1:
        inner = gate
    elif ACTIVATION == 3:
        gate = gl.minimum(gate, 7.0)
        up = gl.minimum(gl.maximum(up, -7.0), 7.0) + 1.0
        inner = 1.702 * gate
    else:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * up / (1.0 + gl.exp(-inner))
