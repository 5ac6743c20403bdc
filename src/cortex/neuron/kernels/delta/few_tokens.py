"""Rows of a few tokens of a gated delta net: steps that check draft tokens (`recurrent/few_tokens.py`).

A program takes some columns of one value head of one sequence: it reads their memory once, takes in the tokens one
after the other, and writes the memory once. Reference: `gated_delta.gated_delta_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.delta.norm import gated_norm
from cortex.neuron.kernels.delta.rules import L2_EPS, DeltaRules, DeltaState
from cortex.neuron.kernels.delta.step import log_decay_of
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.recurrent.few_tokens import (
    convolution_in_sequence,
    follows_another,
    keep_recent,
    sequence_length,
)

COLUMNS = 32


def delta_few_tokens(projected: Tensor, rules: DeltaRules, batch: Batch, state: DeltaState, out: Tensor) -> None:
    """projected: [tokens, projected size], out: [tokens, value size], contiguous. Advances the state of the rows."""
    tokens, taps = len(projected), len(rules.conv_weight)
    columns = min(COLUMNS, triton.next_power_of_2(rules.value_dim))
    mixed = torch.empty((tokens, rules.value_size), dtype=torch.float32, device=projected.device)
    _tokens_kernel[(tokens, rules.value_heads, triton.cdiv(rules.value_dim, columns))](
        projected,
        batch.rows,
        batch.positions,
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
        **launch_options(projected.device),
    )
    keep_recent(projected[:, : rules.channels], batch, state.recent)
    gated_norm(mixed, projected[:, rules.channels : rules.channels + rules.value_size], rules, out)


@jit
def _convolved(
    token, ring, weight, channel, inside, position, first, stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    total = convolution_in_sequence(token, ring, weight, channel, inside, position, first, stride, CHANNELS, TAPS)
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
    if follows_another(rows, positions, index):
        return
    count = sequence_length(rows, positions, index, tokens, MOST)

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
