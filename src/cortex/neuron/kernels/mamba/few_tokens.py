"""Rows of a few tokens of Mamba-2: steps that check draft tokens (`recurrent/few_tokens.py`).

A program takes some columns of one head of one sequence: it reads their memory once, takes in the tokens one after the
other, and writes the memory once. From eight rows on, one token takes less time in `step.py`. Reference:
`scan.mamba_reference`.
"""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.mamba.rules import MambaRules, MambaState
from cortex.neuron.kernels.mamba.step import time_step
from cortex.neuron.kernels.recurrent.few_tokens import (
    convolution_in_sequence,
    follows_another,
    keep_recent,
    sequence_length,
)

COLUMNS = 32


def mamba_few_tokens(projected: Tensor, rules: MambaRules, batch: Batch, state: MambaState, out: Tensor) -> None:
    """projected: [tokens, projected size], out: [tokens, inner] float32. Advances the state of the rows."""
    tokens = len(projected)
    columns = min(COLUMNS, triton.next_power_of_2(rules.head_dim))
    _tokens_kernel[(tokens, rules.heads, triton.cdiv(rules.head_dim, columns))](
        projected,
        batch.rows,
        batch.positions,
        rules.conv_weight,
        rules.conv_bias,
        rules.decay_rate,
        rules.step_bias,
        rules.skip,
        state.recent,
        state.memory,
        out,
        projected.stride(0),
        state.recent.stride(0),
        state.memory.stride(0),
        tokens,
        MOST=triton.next_power_of_2(tokens),
        HEADS=rules.heads,
        SHARED=rules.heads // rules.groups,
        DIM=rules.head_dim,
        STATE=rules.state_dim,
        STATE_BLOCK=triton.next_power_of_2(rules.state_dim),
        COLUMNS=columns,
        TAPS=len(rules.conv_weight),
        BIASED=rules.conv_bias is not None,
        num_warps=4,
        **launch_options(projected.device),
    )
    keep_recent(projected[:, rules.inner : rules.inner + rules.channels], batch, state.recent)


@jit
def _convolved(
    token,
    ring,
    weight,
    bias,
    channel,
    inside,
    position,
    first,
    stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BIASED: tl.constexpr,
):
    total = convolution_in_sequence(token, ring, weight, channel, inside, position, first, stride, CHANNELS, TAPS)
    if BIASED:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    return total * tl.sigmoid(total)


@jit(do_not_specialize=["tokens"])
def _tokens_kernel(
    projected,
    rows,
    positions,
    conv_weight,
    conv_bias,
    decay_rate,
    step_bias,
    skip,
    recent,
    memory,
    out,
    projected_stride,
    recent_stride,
    memory_stride,
    tokens,
    MOST: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    INNER: tl.constexpr = HEADS * DIM
    KEYS: tl.constexpr = HEADS // SHARED * STATE
    CHANNELS: tl.constexpr = INNER + 2 * KEYS
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(rows + index)
    first = tl.load(positions + index)
    if follows_another(rows, positions, index):
        return
    count = sequence_length(rows, positions, index, tokens, MOST)

    place = tl.arange(0, STATE_BLOCK)
    place_inside = place < STATE
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < DIM
    where = memory + row * memory_stride + head * STATE * DIM
    where = where + place[:, None] * DIM + column[None, :]
    inside = place_inside[:, None] & column_inside[None, :]
    known = tl.load(where, mask=inside, other=0.0)  # [state, columns]
    known = tl.where(first > 0, known, 0.0)
    rate, bias, share = tl.load(decay_rate + head), tl.load(step_bias + head), tl.load(skip + head)
    ring = recent + row * recent_stride
    value_channel = head * DIM + column
    key_channel = INNER + head // SHARED * STATE + place
    if OVERLAP:
        gdc_wait()
    for number in range(count):
        token = projected + (index + number) * projected_stride
        x, position = token + INNER, first + number
        k = _convolved(
            x, ring, conv_weight, conv_bias, key_channel, place_inside, position, first, projected_stride, CHANNELS,
            TAPS, BIASED,
        )  # fmt: skip
        q = _convolved(
            x, ring, conv_weight, conv_bias, key_channel + KEYS, place_inside, position, first, projected_stride,
            CHANNELS, TAPS, BIASED,
        )  # fmt: skip
        v = _convolved(
            x, ring, conv_weight, conv_bias, value_channel, column_inside, position, first, projected_stride, CHANNELS,
            TAPS, BIASED,
        )  # fmt: skip
        size = time_step(tl.load(x + CHANNELS + head), bias)
        known *= tl.exp(-rate * size)
        known += k[:, None] * (v * size)[None, :]
        mixed = tl.sum(known * q[:, None], 0) + share * v
        gate = tl.load(token + value_channel, mask=column_inside, other=0.0).to(tl.float32)
        target = out + (index + number) * INNER + value_channel
        tl.store(target, mixed * gate * tl.sigmoid(gate), mask=column_inside)
    tl.store(where, known, mask=inside)
