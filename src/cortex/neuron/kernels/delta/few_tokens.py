"""Rows of a few tokens of a gated delta net: steps that check draft tokens (`recurrent/few_tokens.py`).

First all tokens are convolved at once. Then a program takes some columns of one value head of one sequence: it reads
their memory once, takes in the tokens one after the other, and writes the memory once. Between two tokens it waits for
nothing: it loads each one while it computes the one before. One token takes less time in `step.py`. Reference:
`gated_delta.gated_delta_reference`.
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
    first_of_convolution,
    follows_another,
    keep_recent,
    sequence_length,
)

COLUMNS, WARPS = 32, 1
"""Columns of one program. One warp needs no synchronisation for its sums."""


def delta_few_tokens(projected: Tensor, rules: DeltaRules, batch: Batch, state: DeltaState, out: Tensor) -> None:
    """projected: [tokens, projected size], out: [tokens, value size], contiguous. Advances the state of the rows."""
    tokens = len(projected)
    columns = min(COLUMNS, triton.next_power_of_2(rules.value_dim))
    size = rules.channels + 2 * rules.value_heads
    convolved = torch.empty((tokens, size), dtype=torch.float32, device=projected.device)
    mixed = torch.empty((tokens, rules.value_size), dtype=torch.float32, device=projected.device)
    sizes = {
        "KEY_HEADS": rules.key_heads,
        "VALUE_HEADS": rules.value_heads,
        "KEY_DIM": rules.key_dim,
        "KEY_BLOCK": triton.next_power_of_2(rules.key_dim),
        "VALUE_DIM": rules.value_dim,
        **launch_options(projected.device),
    }
    _convolve_kernel[(tokens, rules.key_heads + rules.value_heads)](
        projected,
        batch.rows,
        batch.positions,
        rules.conv_weight,
        rules.decay_rate,
        rules.decay_bias,
        state.recent,
        convolved,
        projected.stride(0),
        state.recent.stride(0),
        VALUE_BLOCK=triton.next_power_of_2(rules.value_dim),
        TAPS=len(rules.conv_weight),
        L2_EPS=L2_EPS,
        num_warps=1,
        **sizes,
    )
    _tokens_kernel[(tokens, rules.value_heads, triton.cdiv(rules.value_dim, columns))](
        convolved,
        batch.rows,
        batch.positions,
        state.memory,
        mixed,
        state.memory.stride(0),
        tokens,
        MOST=triton.next_power_of_2(tokens),
        COLUMNS=columns,
        num_warps=WARPS,
        **sizes,
    )
    keep_recent(projected[:, : rules.channels], batch, state.recent)
    gated_norm(mixed, projected[:, rules.channels : rules.channels + rules.value_size], rules, out)


@jit
def _convolved(
    token, ring, weight, channel, inside, position, first, stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    total = convolution_in_sequence(token, ring, weight, channel, inside, position, first, stride, CHANNELS, TAPS)
    return total * tl.sigmoid(total)


@jit
def _convolve_kernel(
    projected,
    rows,
    positions,
    conv_weight,
    decay_rate,
    decay_bias,
    recent,
    out,
    projected_stride,
    recent_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    L2_EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Queries and keys at unit length, values, the factors of the memory and the write strengths, in this order. One
    program per token and head: the key heads, then the value heads."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + index)
    first = first_of_convolution(rows, positions, index, TAPS)
    ring = recent + tl.load(rows + index) * recent_stride
    token = projected + index * projected_stride
    target = out + index * (CHANNELS + 2 * VALUE_HEADS)
    if head < KEY_HEADS:
        dim = tl.arange(0, KEY_BLOCK)
        inside = dim < KEY_DIM
        channel = head * KEY_DIM + dim
        q = _convolved(token, ring, conv_weight, channel, inside, position, first, projected_stride, CHANNELS, TAPS)
        tl.store(target + channel, q * tl.rsqrt((tl.sum(q * q, 0) + L2_EPS) * KEY_DIM), mask=inside)
        channel += KEY_SIZE
        k = _convolved(token, ring, conv_weight, channel, inside, position, first, projected_stride, CHANNELS, TAPS)
        tl.store(target + channel, k * tl.rsqrt(tl.sum(k * k, 0) + L2_EPS), mask=inside)
    else:
        head -= KEY_HEADS
        value_dim = tl.arange(0, VALUE_BLOCK)  # names of their own: both branches may differ in their blocks
        is_value = value_dim < VALUE_DIM
        value = 2 * KEY_SIZE + head * VALUE_DIM + value_dim
        v = _convolved(token, ring, conv_weight, value, is_value, position, first, projected_stride, CHANNELS, TAPS)
        tl.store(target + value, v, mask=is_value)
        gates = token + CHANNELS + VALUE_SIZE + head
        rate, bias = tl.load(decay_rate + head), tl.load(decay_bias + head)
        decay = tl.exp(log_decay_of(tl.load(gates + VALUE_HEADS).to(tl.float32), rate, bias))
        tl.store(target + CHANNELS + head, decay)
        tl.store(target + CHANNELS + VALUE_HEADS + head, tl.sigmoid(tl.load(gates).to(tl.float32)))


@jit(do_not_specialize=["tokens"])
def _tokens_kernel(
    convolved,
    rows,
    positions,
    memory,
    mixed,
    memory_stride,
    tokens,
    MOST: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    SIZE: tl.constexpr = CHANNELS + 2 * VALUE_HEADS
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if follows_another(rows, positions, index):
        return
    count = sequence_length(rows, positions, index, tokens, MOST)
    row, first = tl.load(rows + index), tl.load(positions + index)
    key_dim = tl.arange(0, KEY_BLOCK)
    key_inside = key_dim < KEY_DIM
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < VALUE_DIM
    where = memory + row * memory_stride + head * KEY_DIM * VALUE_DIM
    where = where + key_dim[:, None] * VALUE_DIM + column[None, :]
    inside = key_inside[:, None] & column_inside[None, :]
    known = tl.load(where, mask=inside, other=0.0)  # [key dim, columns]
    known = tl.where(first > 0, known, 0.0)
    query = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key_dim
    value = 2 * KEY_SIZE + head * VALUE_DIM + column
    if OVERLAP:
        gdc_wait()
    token = convolved + index * SIZE
    q = tl.load(token + query, mask=key_inside, other=0.0)
    k = tl.load(token + KEY_SIZE + query, mask=key_inside, other=0.0)
    v = tl.load(token + value, mask=column_inside, other=0.0)
    decay, strength = tl.load(token + CHANNELS + head), tl.load(token + CHANNELS + VALUE_HEADS + head)
    for number in range(count):
        token = convolved + (index + tl.minimum(number + 1, count - 1)) * SIZE
        next_q = tl.load(token + query, mask=key_inside, other=0.0)
        next_k = tl.load(token + KEY_SIZE + query, mask=key_inside, other=0.0)
        next_v = tl.load(token + value, mask=column_inside, other=0.0)
        next_decay, next_strength = tl.load(token + CHANNELS + head), tl.load(token + CHANNELS + VALUE_HEADS + head)
        known *= decay
        correction = (v - tl.sum(known * k[:, None], 0)) * strength
        known += k[:, None] * correction[None, :]
        target = mixed + (index + number) * VALUE_SIZE + head * VALUE_DIM + column
        tl.store(target, tl.sum(known * q[:, None], 0), mask=column_inside)
        q, k, v, decay, strength = next_q, next_k, next_v, next_decay, next_strength
    tl.store(where, known, mask=inside)
