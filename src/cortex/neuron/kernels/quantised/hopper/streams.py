"""Packed experts for few rows on Hopper: codes go from memory straight into registers, where they become the left
operand of tensor cores, and only the rows' values pass through shared memory. No warp waits for another one while it
reads an expert. Written in Gluon, Triton's lower language.

A program has some rows of one expert's matrix, and up to eight of its pairs: the columns of the smallest product of
tensor cores. Of gate and up, a warp has eight rows each. Reference: `one_row.py` and `experts.py`, which compute
the same on other cards and for other layouts, and the former also a single row's second product, in less time. Larger
batches take less time in `tiles.py`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import activation_number
from cortex.neuron.kernels.device_properties import properties_of
from cortex.neuron.kernels.expert_pairs import ExpertPairs, PairLists
from cortex.neuron.kernels.jit import launch_options, triton
from cortex.neuron.kernels.matrix import PLAIN, Epilogue, Prologue
from cortex.neuron.kernels.products.grouped import max_tiles
from cortex.neuron.kernels.quantised.codes import PackedCodes, empty_codes, unpacked
from cortex.neuron.kernels.quantised.hopper.tiles import GENERATION, activated, unpacked_operand
from cortex.neuron.kernels.quantised.layout import CHUNK, FP4, UNIT
from cortex.neuron.kernels.quantised.unpack import RESTORE, small_floats_by_half
from cortex.neuron.private_api.gluon import ampere, gl, gluon_jit, reinterpreted
from cortex.neuron.private_api.torch import compare, noise
from cortex.neuron.private_api.triton import GLUON

MAX_PAIRS = 8
"""Pairs of a tile, at most."""
MAX_INPUTS = 12 << 10
"""Their values of eight pairs fit into shared memory."""
PAIR_WARPS, TILE_WARPS = 8, 4
"""Warps of a program that has one pair, and of one that has a tile of pairs: the fastest on an H200."""
_UNITS = CHUNK // UNIT
_RESTORE = RESTORE


def takes(x: Tensor, codes: PackedCodes) -> bool:
    """Whether few rows are multiplied with these experts here. With other layouts it takes longer than elsewhere."""
    return (
        x.dtype == torch.bfloat16
        and codes.layout == FP4
        and codes.inputs <= MAX_INPUTS
        and properties_of(x.device).capability[0] == GENERATION
        and (GLUON.is_usable if x.is_meta else GLUON.usable_on((x.device, "few rows"), partial(_check, x.device)))
    )


def _check(device: torch.device) -> None:
    """Compares a product of pairs and one of lists with torch's. Raises if they differ."""
    inputs, outputs = 192, 136
    codes = empty_codes(FP4, 2 * outputs, inputs, device)
    code = torch.arange(2 * outputs * inputs, device=device).view(2 * outputs, inputs).remainder(11).remainder(8)
    scale = torch.rand(2 * outputs, inputs // 32, generator=torch.Generator().manual_seed(0)).to(device)
    zero = FP4.zero or 0
    codes.put_codes(0, (zero + torch.tensor(FP4.codebook, device=device)[code]).to(torch.uint8), scale, -zero * scale)
    x = noise(3, inputs, device=device, dtype=torch.bfloat16)
    chosen = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    weights = torch.full((3, 1), 0.5, device=device)
    out = torch.full((3, outputs), torch.nan, dtype=x.dtype, device=device)
    pairs_product(x, codes, out, PLAIN, Epilogue(), ExpertPairs(chosen, weights, 1))
    expected = torch.stack(
        [x[row].float() @ unpacked(codes).view(2, outputs, inputs)[chosen[row]].T for row in range(3)]
    )
    compare(out, expected * 0.5)
    members = torch.tensor([[1, 0, 0], [0, 2, 0]], dtype=torch.int32, device=device)
    lists = PairLists(weights, torch.tensor([1, 2], dtype=torch.int32, device=device), members)
    lists_product(x, codes, lists, out.fill_(torch.nan), pairs_per_row=1, activation=None, bias=None)
    compare(out, expected * 0.5)


def pairs_product(
    x: Tensor, codes: PackedCodes, out: Tensor, prologue: Prologue, epilogue: Epilogue, pairs: ExpertPairs
) -> None:
    """Each pair on its own; see `one_row_product`."""
    weights = None if epilogue.activation else pairs.weights
    _launch(x, codes, out, prologue, epilogue, pairs.per_row, weights, pairs.chosen, None)


def lists_product(
    x: Tensor,
    codes: PackedCodes,
    lists: PairLists,
    out: Tensor,
    *,
    pairs_per_row: int,
    activation: str | None,
    bias: Tensor | None,
) -> None:
    """The pairs of each expert together; see `ExpertMatrix.grouped`."""
    weights = None if activation else lists.weights
    _launch(x, codes, out, PLAIN, Epilogue(bias, activation=activation), pairs_per_row, weights, None, lists)


def _launch(
    x: Tensor,
    codes: PackedCodes,
    out: Tensor,
    prologue: Prologue,
    epilogue: Epilogue,
    pairs_per_row: int,
    weights: Tensor | None,
    chosen: Tensor | None,
    lists: PairLists | None,
) -> None:
    (num_pairs, outputs), activation = out.shape, activation_number(epilogue.activation)
    tiles, warps, experts = num_pairs, PAIR_WARPS, 0
    if lists is not None:
        experts = len(lists.counts)
        tiles, warps = max_tiles(num_pairs, experts, MAX_PAIRS), TILE_WARPS
    chunks = codes.low.shape[1] // _UNITS
    _streamed_kernel[(triton.cdiv(outputs, (8 if activation else 16) * warps), tiles)](
        x,
        prologue.norm,
        codes.low,
        codes.scales,
        epilogue.bias,
        chosen,
        weights,
        lists.counts if lists else None,
        lists.members if lists else None,
        out,
        lists.members.stride(0) if lists else 0,
        prologue.eps,
        INPUTS=codes.inputs,
        OUTPUTS=outputs,
        CHUNKS=chunks,
        FOURS_BLOCK=triton.next_power_of_2(triton.cdiv(chunks, 4)),
        ACTIVATION=activation,
        BIAS=epilogue.bias is not None,
        NORM=prologue.norm is not None,
        WEIGHTED=weights is not None,
        PAIRS_PER_ROW=pairs_per_row,
        EXPERTS=experts,
        EXPERTS_BLOCK=triton.next_power_of_2(experts),
        PTX=small_floats_by_half(),
        num_warps=warps,
        **launch_options(x.device),
    )


@gluon_jit(do_not_specialize=["members_stride"])
def _streamed_kernel(
    x,
    norm,
    codes,
    scales,
    bias,
    chosen,
    pair_weights,
    counts,
    members,
    out,
    members_stride,
    eps,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    CHUNKS: gl.constexpr,
    FOURS_BLOCK: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    NORM: gl.constexpr,
    WEIGHTED: gl.constexpr,
    PAIRS_PER_ROW: gl.constexpr,
    EXPERTS: gl.constexpr,
    EXPERTS_BLOCK: gl.constexpr,
    PTX: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """EXPERTS: the second coordinate is a tile of one expert's pairs; 0: it is a pair.

    The kernels between the choice of experts and this one start the next only after they have waited, so that the codes
    are on their way before they end.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 16 * WARPS
    STEP: gl.constexpr = 8 * WARPS if ACTIVATION else ROWS
    dtype: gl.constexpr = x.dtype.element_ty
    added: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    # a thread has units 4·t to 4·t + 3 of two rows, as tensor cores want them
    words: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]] if WARPS == 8 else [[16, 0], [32, 0]],
        [],
        [ROWS, 16],
    )
    if EXPERTS:
        fours: gl.constexpr = (CHUNKS + 3) // 4
        values = gl.allocate_shared_memory(dtype, [fours, 8, 512], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    else:
        values = gl.allocate_shared_memory(dtype, [FOURS_BLOCK, 512], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    factor = 1.0
    if EXPERTS == 0 and ACTIVATION > 0:
        source = x + gl.program_id(1) // PAIRS_PER_ROW * INPUTS
        factor = _fill_row(source, norm, values, eps, INPUTS, NORM)
    if OVERLAP:
        if ACTIVATION:
            _wait()
        _launch_dependents()

    if EXPERTS:
        expert, first, count = _own_tile(counts, EXPERTS, EXPERTS_BLOCK)
        if expert >= EXPERTS:
            return
        pairs = members + expert * members_stride + first
        count = gl.minimum(count - first, 8)
    else:
        expert, count = gl.load(chosen + gl.program_id(1)), 1
    block = gl.program_id(0) * STEP
    base = expert * (2 * OUTPUTS if ACTIVATION else OUTPUTS)
    row = base + _output(gl.arange(0, ROWS, gl.SliceLayout(1, words)), block, OUTPUTS, ACTIVATION)
    unit = gl.arange(0, 16, gl.SliceLayout(0, words))
    lines = codes + (row.to(gl.int64)[:, None] * (CHUNKS * 16) + unit[None, :])
    scale_lines = scales + (row.to(gl.int64)[:, None] * (CHUNKS * 4) + (unit % 4)[None, :])
    word_0, scale_0 = _words(lines, scale_lines, 0, CHUNKS)
    word_1, scale_1 = _words(lines, scale_lines, 1, CHUNKS)
    word_2, scale_2 = _words(lines, scale_lines, 2, CHUNKS)
    word_3, scale_3 = _words(lines, scale_lines, 3, CHUNKS)
    if OVERLAP and ACTIVATION == 0:
        _wait()
    if EXPERTS:
        _fill_rows(x, pairs, count, values, INPUTS, PAIRS_PER_ROW)
    elif ACTIVATION == 0:
        source = x + gl.program_id(1) // PAIRS_PER_ROW * INPUTS
        factor = _fill_row(source, norm, values, eps, INPUTS, NORM)

    total = gl.zeros([ROWS, 8], gl.float32, added)
    for chunk in range(0, CHUNKS, 4):  # words are loaded into the registers of those that were multiplied
        four = values.index(chunk // 4)
        total = _multiplied(word_0, scale_0, four, 0, total, added, PTX)
        word_0, scale_0 = _words(lines, scale_lines, chunk + 4, CHUNKS)
        total = _multiplied(word_1, scale_1, four, 1, total, added, PTX)
        word_1, scale_1 = _words(lines, scale_lines, chunk + 5, CHUNKS)
        total = _multiplied(word_2, scale_2, four, 2, total, added, PTX)
        word_2, scale_2 = _words(lines, scale_lines, chunk + 6, CHUNKS)
        total = _multiplied(word_3, scale_3, four, 3, total, added, PTX)
        word_3, scale_3 = _words(lines, scale_lines, chunk + 7, CHUNKS)

    total = total * (factor * _RESTORE)
    place = gl.arange(0, ROWS, gl.SliceLayout(1, added))
    row = _output(place, block, OUTPUTS, ACTIVATION)
    if BIAS:
        total += gl.load(bias + base + row).to(gl.float32)[:, None]
    each = gl.arange(0, 8, gl.SliceLayout(0, added))
    pair = gl.load(pairs + each, mask=each < count, other=0) if EXPERTS else gl.program_id(1) + 0 * each
    if WEIGHTED:
        total *= gl.load(pair_weights + pair)[None, :]
    output = block + (place // 16 * 8 + place % 8 if ACTIVATION else place)
    where = gl.where(
        (each < count)[None, :] & (output < OUTPUTS)[:, None], pair[None, :] * OUTPUTS + output[:, None], -1
    )
    if ACTIVATION:
        gate, up = _gate_and_up(total)
        where, _ = _gate_and_up(where)
        total = activated(gate, up, ACTIVATION)
    gl.store(out + where, total.to(dtype), mask=where >= 0)


@gluon_jit
def _output(place, block, OUTPUTS: gl.constexpr, ACTIVATION: gl.constexpr):
    """The row of an expert's matrix at each place of a program; after the last, the last."""
    if ACTIVATION:  # eight of the gate, then the same of up
        row = gl.minimum(block + place // 16 * 8 + place % 8, OUTPUTS - 1) + place // 8 % 2 * OUTPUTS
    else:
        row = gl.minimum(block + place, OUTPUTS - 1)
    return row


@gluon_jit
def _words(lines, scale_lines, chunk, CHUNKS: gl.constexpr):
    """The codes and scales of a chunk; after the last chunk, those of the last, whose values are 0."""
    chunk = gl.minimum(chunk, CHUNKS - 1)
    word, scale = gl.load(lines + chunk * 16), gl.load(scale_lines + chunk * 4)
    # The assembler moves loads to where their values are needed, but not beyond this.
    gl.inline_asm_elementwise("bar.warp.sync -1; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return word, scale


@gluon_jit
def _multiplied(word, scale, four, PART: gl.constexpr, total, added: gl.constexpr, PTX: gl.constexpr):
    """total + weights · values, of one of four chunks."""
    operand: gl.constexpr = gl.DotOperandLayout(1, added, 2)
    if len(four.shape) == 2:
        value = four.slice(PART * 128, 128, dim=1).permute((1, 0)).load(operand)
        value = gl.reshape(_by_half(gl.reshape(value, (8, 2, 4, 2, 8))), (128, 8))
        value = gl.convert_layout(value, operand, assert_trivial=True)
    else:
        value = four.slice(PART * 128, 128, dim=0).load(gl.SliceLayout(1, operand))[:, None].broadcast_to(128, 8)
    return ampere.mma_v2(unpacked_operand(word, scale, added, True, PTX), value, total)


@gluon_jit
def _by_half(values):
    """[…, 2, 4, 2, lines]: bits 0 and 3 of a column's number swapped, as `tiles.is_by_half` explains."""
    return gl.permute(values, (0, 3, 2, 1, 4))


@gluon_jit
def _gate_and_up(total):
    parted = gl.reshape(total, (total.shape[0] // 16, 2, 8, 8))
    return gl.split(gl.permute(parted, (0, 2, 3, 1)))


@gluon_jit
def _fill_row(source, norm, values, eps, INPUTS: gl.constexpr, NORM: gl.constexpr):
    """The values of one row times the norm's weights. → the norm's factor"""
    FOURS_BLOCK: gl.constexpr = values.shape[0]
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    four = gl.arange(0, FOURS_BLOCK, gl.SliceLayout(1, lines))
    column = (four * 512)[:, None] + gl.arange(0, 512, gl.SliceLayout(0, lines))[None, :]
    inside = column < INPUTS
    value = gl.load(source + column, mask=inside, other=0.0)
    factor = 1.0
    if NORM:
        exact = value.to(gl.float32)
        factor = gl.rsqrt(gl.sum(gl.sum(exact * exact, 1), 0) / INPUTS + eps)
        value = (exact * gl.load(norm + column, mask=inside, other=0.0).to(gl.float32)).to(value.dtype)
    value = _by_half(gl.reshape(value, (FOURS_BLOCK * 32, 2, 4, 2, 1)))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    reinterpreted(values, value.dtype, [FOURS_BLOCK, 512], plain).store(gl.reshape(value, (FOURS_BLOCK, 512)))
    return factor


@gluon_jit
def _fill_rows(x, pairs, count, values, INPUTS: gl.constexpr, PAIRS_PER_ROW: gl.constexpr):
    """The values of up to eight pairs."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    each = gl.arange(0, 8, gl.SliceLayout(1, lines))
    pair = gl.load(pairs + each, mask=each < count, other=0)
    source = x + (pair // PAIRS_PER_ROW * INPUTS)[:, None]
    for four in range(values.shape[0]):
        column = four * 512 + gl.arange(0, 512, gl.SliceLayout(0, lines))
        inside = (each < count)[:, None] & (column < INPUTS)[None, :]
        ampere.async_copy.async_copy_global_to_shared(values.index(four), source + column[None, :], mask=inside)
    ampere.async_copy.commit_group()
    ampere.async_copy.wait_group(0)


@gluon_jit
def _own_tile(counts, EXPERTS: gl.constexpr, EXPERTS_BLOCK: gl.constexpr):
    """As `grouped.own_tile`, for tiles of eight pairs."""
    each = gl.arange(0, EXPERTS_BLOCK, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    count = gl.load(counts + each, mask=each < EXPERTS, other=0)
    tiles = (count + 7) // 8
    ends = gl.associative_scan(tiles, 0, _sum)
    tile = gl.program_id(1)
    expert = gl.sum((ends <= tile).to(gl.int32), 0)
    is_own = each == expert
    first = (tile - gl.sum(gl.where(is_own, ends - tiles, 0), 0)) * 8
    return expert, first, gl.sum(gl.where(is_own, count, 0), 0)


@gluon_jit
def _sum(a, b):
    return a + b


@gluon_jit
def _wait():
    """As `gdc_wait`."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def _launch_dependents():
    """As `gdc_launch_dependents`."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
