"""The down projections of a row's experts and their weighted sum, in one launch: a GEMV with the row of every expert
side by side.

The vectors of all experts of a row are one vector to a program, which takes it at once. So the words of all experts are
on their way together, and the sum over the experts is part of the sum over columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.expert_pairs import ExpertChoice
from cortex.neuron.kernels.jit import INTERPRETED, gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.quantised.codes import PackedCodes
from cortex.neuron.kernels.quantised.unpack import high_half, layout_options, low_half
from cortex.neuron.kernels.quantised.vector import as_integers, by_slot, times_vector

MAX_CHUNKS = 64
"""Chunks of 128 columns, of all experts of a row: longer vectors are faster in one GEMV for each expert."""
_BLOCK_OUT = 8


def contract_rows_product(
    inner: Tensor, codes: PackedCodes, choice: ExpertChoice, residual: Tensor, bias: Tensor | None
) -> Tensor:
    """See `ExpertMatrix.contract_rows`. The experts of a row have at most MAX_CHUNKS chunks."""
    (rows, hidden), slots = residual.shape, choice.experts.shape[1]
    chunks = codes.low.shape[1] // 16
    block_chunks = max(8, triton.next_power_of_2(slots * chunks))
    low, high = codes.low.view(torch.int32), codes.high.view(torch.int32) if codes.high.numel() else None
    out = torch.empty(rows, hidden, dtype=inner.dtype, device=inner.device)
    is_paired = inner.dtype == torch.bfloat16
    _contract_kernel[(triton.cdiv(hidden, _BLOCK_OUT), rows)](
        inner.view(torch.int32) if is_paired else inner,
        low,
        high,
        codes.scales,
        choice.experts,
        choice.weights,
        bias,
        residual,
        out,
        hidden,
        INPUTS=codes.inputs,
        CHUNKS=chunks,
        SLOTS=slots,
        PAIRED=is_paired,
        BIAS=bias is not None,
        LOW_WORDS=low.shape[1] // chunks,
        HIGH_WORDS=0 if high is None else high.shape[1] // chunks,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_CHUNKS=block_chunks,
        num_warps=block_chunks // 8,  # a thread takes four units of eight columns
        **layout_options(codes.layout) | {"PTX": not INTERPRETED},
        **launch_options(inner.device),
    )
    return out


@jit
def _contract_kernel(
    inner,
    low,
    high,
    scales,
    chosen,
    weights,
    bias,
    residual,
    out,
    hidden,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    LOW_WORDS: tl.constexpr,
    HIGH_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for BLOCK_OUT outputs of one row. Chunk c of the row is chunk c mod CHUNKS of slot c / CHUNKS.

    The kernel that expanded the rows lets this one start only after the experts are chosen, so that their words are on
    their way before it ends.
    """
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    chosen += row * SLOTS
    weights += row * SLOTS
    inner += row * SLOTS * (INPUTS // 2 if PAIRED else INPUTS)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    line = tl.minimum(output, hidden - 1)
    words = _words(
        low, high, scales, chosen, line, hidden, CHUNKS, SLOTS, LOW_WORDS, HIGH_WORDS, SCALE_WORDS, BLOCK_CHUNKS
    )  # fmt: skip
    if OVERLAP:
        gdc_wait()
    added = tl.load(residual + row * hidden + output, mask=output < hidden, other=0.0).to(tl.float32)
    vector = _vector(inner, weights, INPUTS, CHUNKS, SLOTS, PAIRED, GROUP, ZERO, BLOCK_CHUNKS, PTX)
    total = times_vector(words, vector, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, PTX)
    if BIAS:
        for slot in tl.static_range(SLOTS):
            own = bias + tl.load(chosen + slot).to(tl.int64) * hidden + line
            added += tl.load(own).to(tl.float32) * tl.load(weights + slot)
    y = tl.sum(total, 1) + added
    tl.store(out + row * hidden + output, y.to(out.dtype.element_ty), mask=output < hidden)


@jit
def _words(
    low,
    high,
    scales,
    chosen,
    line,
    hidden,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    LOW_WORDS: tl.constexpr,
    HIGH_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """The words of some rows of the chosen experts: of both planes and of the scales, which are 0 beyond the
    last slot."""
    word = _plane(low, chosen, line, hidden, CHUNKS, SLOTS, LOW_WORDS, BLOCK_CHUNKS)
    above = word
    if HIGH_WORDS > 0:
        above = _plane(high, chosen, line, hidden, CHUNKS, SLOTS, HIGH_WORDS, BLOCK_CHUNKS)
    unit = tl.arange(0, BLOCK_CHUNKS * 16)[None, :]
    chunk = unit // 16
    expert = _by_slot_of(chosen, chunk // CHUNKS, SLOTS).to(tl.int64)
    group = (expert * hidden * CHUNKS + chunk % CHUNKS) * 4 + unit % 4
    where = scales + (group + line[:, None] * (CHUNKS * 4)) * SCALE_WORDS
    inside = chunk < SLOTS * CHUNKS
    scale_0 = tl.load(where, mask=inside, other=0).to(tl.int32)
    scale_1 = scale_0
    if SCALE_WORDS == 2:
        scale_1 = tl.load(where + 1, mask=inside, other=0)
    return word, above, scale_0, scale_1


@jit
def _plane(
    plane,
    chosen,
    line,
    hidden,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """The words of one plane, WORDS of a chunk."""
    word = tl.arange(0, BLOCK_CHUNKS * WORDS)[None, :]
    chunk = word // WORDS
    expert = _by_slot_of(chosen, chunk // CHUNKS, SLOTS).to(tl.int64)
    where = (expert * hidden * CHUNKS + chunk % CHUNKS) * WORDS + word % WORDS
    where += line[:, None] * (CHUNKS * WORDS)
    if WORDS < 16:  # the words of four units, as in `one_row.py`
        where = tl.multiple_of(where, (1, WORDS // 4))
    return tl.load(plane + where, mask=chunk < SLOTS * CHUNKS)


@jit
def _by_slot_of(values, slot, SLOTS: tl.constexpr):
    """The value of each slot. Loaded one by one, they need no exchange between threads."""
    found = tl.zeros_like(slot).to(values.dtype.element_ty)
    for number in tl.static_range(SLOTS):
        found = tl.where(slot == number, tl.load(values + number, cache_modifier=".cg"), found)
    return found


@jit
def _vector(
    inner,
    weights,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRED: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PTX: tl.constexpr,
):
    """The values of all slots, as `times_vector` takes them, times the weights of the slots."""
    pair = tl.arange(0, BLOCK_CHUNKS * 64)
    chunk = pair // 64
    column = chunk % CHUNKS * 64 + pair % 64
    inside = (chunk < SLOTS * CHUNKS) & (column < INPUTS // 2)
    where = chunk // CHUNKS * (INPUTS // 2) + column
    if PAIRED:
        p0, p1, p2, p3 = by_slot(tl.load(inner + where, mask=inside, other=0), BLOCK_CHUNKS)
        a0, a1, a2, a3 = low_half(p0), low_half(p1), low_half(p2), low_half(p3)
        b0, b1, b2, b3 = high_half(p0), high_half(p1), high_half(p2), high_half(p3)
    else:
        a0, a1, a2, a3 = by_slot(tl.load(inner + where * 2, mask=inside, other=0.0).to(tl.float32), BLOCK_CHUNKS)
        b0, b1, b2, b3 = by_slot(tl.load(inner + where * 2 + 1, mask=inside, other=0.0).to(tl.float32), BLOCK_CHUNKS)
    high_0, low_0, high_1, low_1, step, offset_0, offset_1, sum_0, sum_1 = as_integers(
        (a0, a1, a2, a3, b0, b1, b2, b3), GROUP, ZERO, PTX
    )
    slot = tl.arange(0, BLOCK_CHUNKS * 16) // (16 * CHUNKS)
    weight = _by_slot_of(weights, slot, SLOTS)
    step, offset_0, offset_1 = step * weight, offset_0 * weight, offset_1 * weight
    return high_0, low_0, high_1, low_1, step, offset_0, offset_1, sum_0 * weight, sum_1 * weight
