"""Rows of a few tokens of a gated delta net: steps that check draft tokens.

Each token is a row of the batch; the tokens of one sequence follow each other. A program takes some columns of one
value head of one sequence: it reads their memory once, takes in the tokens one after the other, and writes the memory
once. Reference: `gated_delta.gated_delta_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.delta.norm import gated_norm
from cortex.neuron.kernels.delta.rules import L2_EPS, DeltaRules, DeltaState
from cortex.neuron.kernels.delta.step import log_decay_of
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.recurrent.causal_conv import CHANNEL_BLOCK

COLUMNS = 32


def delta_few_tokens(projected: Tensor, rules: DeltaRules, batch: Batch, state: DeltaState, out: Tensor) -> None:
    """projected: [tokens, projected size], out: [tokens, value size], contiguous. Advances the state of the rows."""
    tokens, taps = len(projected), len(rules.conv_weight)
    columns = min(COLUMNS, triton.next_power_of_2(rules.value_dim))
    mixed = torch.empty((tokens, rules.value_size), dtype=torch.float32, device=projected.device)
    options = launch_options(projected.device)
    sequences = (batch.rows, batch.positions)
    _tokens_kernel[(tokens, rules.value_heads, triton.cdiv(rules.value_dim, columns))](
        projected,
        *sequences,
        rules.conv_weight,
        rules.decay_rate,
        rules.decay_bias,
        state.recent,
        state.memory,
        mixed,
        projected.stride(0),
        state.recent.stride(0),
        state.memory.stride(0),
        tokens,
        MOST=triton.next_power_of_2(tokens),
        VALUE_HEADS=rules.value_heads,
        SHARED=rules.value_heads // rules.key_heads,
        KEY_SIZE=rules.key_size,
        KEY_DIM=rules.key_dim,
        KEY_BLOCK=triton.next_power_of_2(rules.key_dim),
        VALUE_DIM=rules.value_dim,
        COLUMNS=columns,
        TAPS=taps,
        L2_EPS=L2_EPS,
        num_warps=4,
        **options,
    )
    # A separate launch, because the programs of a sequence read what this overwrites.
    _keep_kernel[(tokens, triton.cdiv(rules.channels, CHANNEL_BLOCK))](
        projected,
        *sequences,
        state.recent,
        projected.stride(0),
        state.recent.stride(0),
        tokens,
        CHANNELS=rules.channels,
        TAPS=taps,
        CHANNEL_BLOCK=CHANNEL_BLOCK,
        num_warps=1,
        **options,
    )
    gated_norm(mixed, projected[:, rules.channels : rules.channels + rules.value_size], rules, out)


@jit
def _convolved(
    token, ring, weight, channel, inside, position, first, stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    """silu of the convolution of a token at `channel`, float32. `first`: the position of the sequence's first token in
    this step; earlier ones are in the ring."""
    total = tl.load(token + channel, mask=inside, other=0.0).to(tl.float32)
    total *= tl.load(weight + (TAPS - 1) * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        before = position - (TAPS - 1 - tap)
        new = inside & (channel < tl.where(before >= first, CHANNELS, 0))
        here = tl.load(token - (TAPS - 1 - tap) * stride + channel, mask=new, other=0.0).to(tl.float32)
        kept = inside & (channel < tl.where((before < first) & (before >= 0), CHANNELS, 0))
        there = tl.load(ring + ((before + TAPS) % TAPS) * CHANNELS + channel, mask=kept, other=0.0).to(tl.float32)
        gain = tl.load(weight + tap * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
        total += (here + there) * gain
    return total * tl.sigmoid(total)


@jit(do_not_specialize=["tokens"])
def _tokens_kernel(
    projected,
    rows,
    positions,
    conv_weight,
    decay_rate,
    decay_bias,
    recent,
    memory,
    mixed,
    projected_stride,
    recent_stride,
    memory_stride,
    tokens,
    MOST: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
    L2_EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    VALUE_SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(rows + index)
    first = tl.load(positions + index)
    before = tl.maximum(index - 1, 0)  # the first token is not the one before itself: its position would differ
    if (tl.load(rows + before) == row) & (tl.load(positions + before) + 1 == first):
        return  # computed with the sequence's first token
    offset = tl.arange(0, MOST)
    is_token = index + offset < tokens
    theirs = tl.load(rows + index + offset, mask=is_token, other=-1)
    places = tl.load(positions + index + offset, mask=is_token, other=-1)
    count = tl.min(tl.where((theirs == row) & (places == first + offset), MOST, offset), 0)

    key_dim = tl.arange(0, KEY_BLOCK)
    key_inside = key_dim < KEY_DIM
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < VALUE_DIM
    where = memory + row * memory_stride + head * KEY_DIM * VALUE_DIM
    where = where + key_dim[:, None] * VALUE_DIM + column[None, :]
    inside = key_inside[:, None] & column_inside[None, :]
    known = tl.load(where, mask=inside, other=0.0)  # [key dim, columns]
    known = tl.where(first > 0, known, 0.0)
    rate, bias = tl.load(decay_rate + head), tl.load(decay_bias + head)
    ring = recent + row * recent_stride
    key_channel = head // SHARED * KEY_DIM + key_dim
    value_channel = 2 * KEY_SIZE + head * VALUE_DIM + column
    if OVERLAP:
        gdc_wait()
    for number in range(count):
        token = projected + (index + number) * projected_stride
        position = first + number
        q = _convolved(
            token, ring, conv_weight, key_channel, key_inside, position, first, projected_stride, CHANNELS, TAPS
        )
        k = _convolved(
            token, ring, conv_weight, KEY_SIZE + key_channel, key_inside, position, first, projected_stride, CHANNELS,
            TAPS,
        )  # fmt: skip
        v = _convolved(
            token, ring, conv_weight, value_channel, column_inside, position, first, projected_stride, CHANNELS, TAPS
        )
        q = q * tl.rsqrt((tl.sum(q * q, 0) + L2_EPS) * KEY_DIM)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
        gates = token + CHANNELS + VALUE_SIZE + head
        strength = tl.sigmoid(tl.load(gates).to(tl.float32))
        known *= tl.exp(log_decay_of(tl.load(gates + VALUE_HEADS).to(tl.float32), rate, bias))
        correction = (v - tl.sum(known * k[:, None], 0)) * strength
        known += k[:, None] * correction[None, :]
        target = mixed + (index + number) * VALUE_SIZE + head * VALUE_DIM + column
        tl.store(target, tl.sum(known * q[:, None], 0), mask=column_inside)
    tl.store(where, known, mask=inside)


@jit(do_not_specialize=["tokens"])
def _keep_kernel(
    projected,
    rows,
    positions,
    recent,
    projected_stride,
    recent_stride,
    tokens,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Stores the latest tokens of each sequence in its ring: those whose place no later token of this step takes."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0).to(tl.int64)
    row, position = tl.load(rows + index), tl.load(positions + index)
    later = tl.minimum(index + TAPS, tokens - 1)  # if it is nearer, its position is another one
    is_taken = (tl.load(rows + later) == row) & (tl.load(positions + later) == position + TAPS)
    channel = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    inside = channel < tl.where(is_taken, 0, CHANNELS)
    value = tl.load(projected + index * projected_stride + channel, mask=inside, other=0.0)
    tl.store(recent + row * recent_stride + (position % TAPS) * CHANNELS + channel, value, mask=inside)
