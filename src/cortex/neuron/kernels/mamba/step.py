"""A decode step of Mamba-2 in one launch: convolution, time step, memory and output gate.

Each program takes one head of one row and reads and writes its memory once: bound by bandwidth. In small batches it
loads the whole memory at once, before the projection is done. In large batches it loads the memory in parts, so that
several programs share a processor. From eight rows on it takes 7 to 20 % less time than `few_tokens.py` for the same
work. Reference: `scan.mamba_reference`.
"""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, num_processors, tl, triton
from cortex.neuron.kernels.mamba.rules import MambaRules, MambaState
from cortex.neuron.kernels.recurrent.causal_conv import convolution


def mamba_step(projected: Tensor, rules: MambaRules, batch: Batch, state: MambaState, out: Tensor) -> None:
    """Writes the first `batch.num_decodes` rows of `out` ([tokens, inner] float32); advances their state."""
    block = triton.next_power_of_2(rules.head_dim)
    fills = batch.batch_invariant or batch.num_decodes * rules.heads > 2 * num_processors(projected.device)
    columns = min(32, block) if fills else block
    _step_kernel[(batch.num_decodes, rules.heads)](
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
        HEADS=rules.heads,
        SHARED=rules.heads // rules.groups,
        DIM=rules.head_dim,
        STATE=rules.state_dim,
        STATE_BLOCK=triton.next_power_of_2(rules.state_dim),
        PARTS=block // columns,
        COLUMNS=columns,
        TAPS=len(rules.conv_weight),
        BIASED=rules.conv_bias is not None,
        num_warps=4 if fills else 8,
        **launch_options(projected.device),
    )


@jit
def time_step(given, bias):
    """softplus(given + bias), float32"""
    x = given.to(tl.float32) + bias
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@jit
def _convolved(
    token,
    ring,
    weight,
    bias,
    channel,
    inside,
    keeps,
    position,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BIASED: tl.constexpr,
):
    total = convolution(token, ring, weight, channel, inside, keeps, position, CHANNELS, TAPS)
    if BIASED:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    return total * tl.sigmoid(total)


@jit
def _step_kernel(
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
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
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
    position = tl.load(positions + index)
    place, column = tl.arange(0, STATE_BLOCK), tl.arange(0, COLUMNS)
    place_inside = place < STATE
    where = memory + row * memory_stride + head * STATE * DIM
    where = where + place[:, None] * DIM + column[None, :]
    known = tl.load(where, mask=place_inside[:, None] & (column < DIM)[None, :], other=0.0)  # [state, columns]
    if OVERLAP:
        gdc_wait()

    token = projected + index * projected_stride
    x = token + INNER
    ring = recent + row * recent_stride
    channel = INNER + head // SHARED * STATE + place
    keeps = place < tl.where(head % SHARED == 0, STATE, 0)  # only one of the heads of a group
    k = _convolved(x, ring, conv_weight, conv_bias, channel, place_inside, keeps, position, CHANNELS, TAPS, BIASED)
    channel += KEYS
    q = _convolved(x, ring, conv_weight, conv_bias, channel, place_inside, keeps, position, CHANNELS, TAPS, BIASED)
    size = time_step(tl.load(x + CHANNELS + head), tl.load(step_bias + head))
    decay = tl.exp(-tl.load(decay_rate + head) * size)
    share = tl.load(skip + head)

    for number in tl.static_range(PARTS):
        here = number * COLUMNS + column
        if number + 1 < PARTS:
            there = place_inside[:, None] & (here + COLUMNS < DIM)[None, :]
            upcoming = tl.load(where + (number + 1) * COLUMNS, mask=there, other=0.0)
        inside = here < DIM
        channel = head * DIM + here
        v = _convolved(x, ring, conv_weight, conv_bias, channel, inside, inside, position, CHANNELS, TAPS, BIASED)
        known = tl.where(position > 0, known, 0.0) * decay
        known += k[:, None] * (v * size)[None, :]
        tl.store(where + number * COLUMNS, known, mask=place_inside[:, None] & inside[None, :])
        mixed = tl.sum(known * q[:, None], 0) + share * v
        gate = tl.load(token + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + index * INNER + channel, mixed * gate * tl.sigmoid(gate), mask=inside)
        if number + 1 < PARTS:
            known = upcoming
