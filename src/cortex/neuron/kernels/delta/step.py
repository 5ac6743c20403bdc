"""A decode step of a gated delta net in one launch: convolution, gates, memory, norm and output gate.

Each program takes one value head of one row, or in the smallest batches some of its columns: then the last program of a
head to finish makes the norm. It loads the memory before the projection is done, and reads and writes it once: bound by
bandwidth. It takes 17 to 47 % less time than `few_tokens.py` for the same work. Reference:
`gated_delta.gated_delta_reference`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.delta.rules import L2_EPS, DeltaRules, DeltaState
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, num_processors, tl, triton
from cortex.neuron.kernels.recurrent.causal_conv import silu, weighted_earlier

MAX_SPLIT_HEADS = 1024
"""Largest number of heads, of all rows, whose columns are divided."""
SPLIT_COLUMNS = 32


def delta_step(projected: Tensor, rules: DeltaRules, batch: Batch, state: DeltaState, out: Tensor) -> None:
    """Writes the first `batch.num_decodes` rows of `out` ([tokens, value size], contiguous); advances their state."""
    value_block = triton.next_power_of_2(rules.value_dim)
    heads = batch.num_decodes * rules.value_heads
    processors = 0 if batch.batch_invariant else num_processors(projected.device)
    columns = num_columns(heads, value_block, processors)
    splits = value_block // columns
    partial = out.new_empty((heads if splits > 1 else 0, value_block), dtype=torch.float32)
    _step_kernel[(batch.num_decodes, rules.value_heads, splits)](
        projected,
        batch.rows,
        batch.positions,
        rules.conv_weight,
        rules.decay_rate,
        rules.decay_bias,
        rules.norm_weight,
        state.recent,
        state.memory,
        out,
        partial,
        _counters(projected.device),
        rules.eps,
        projected.stride(0),
        state.recent.stride(0),
        state.memory.stride(0),
        VALUE_HEADS=rules.value_heads,
        SHARED=rules.value_heads // rules.key_heads,
        KEY_SIZE=rules.key_size,
        KEY_DIM=rules.key_dim,
        KEY_BLOCK=triton.next_power_of_2(rules.key_dim),
        VALUE_DIM=rules.value_dim,
        SPLITS=splits,
        COLUMNS=columns,
        TAPS=len(rules.conv_weight),
        L2_EPS=L2_EPS,
        num_warps=max(2, columns // 32),
        **launch_options(projected.device),
    )


def num_columns(heads: int, value_block: int, processors: int) -> int:
    """Columns of one program: all of a head, or a part where there is a processor for each head."""
    is_split = heads <= min(processors, MAX_SPLIT_HEADS)
    return min(SPLIT_COLUMNS, value_block) if is_split else value_block


@cache
def _counters(device: torch.device) -> Tensor:
    """The number of finished programs of each head of a row. Every launch resets them to zero."""
    return torch.zeros(MAX_SPLIT_HEADS, dtype=torch.int32, device=device)


@jit
def log_decay_of(decay_input, rate, bias):
    """The logarithm of the factor of the memory: −rate · softplus(decay_input + bias), all float32."""
    x = decay_input + bias
    return -rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@jit
def _step_kernel(
    projected,
    rows,
    positions,
    conv_weight,
    decay_rate,
    decay_bias,
    norm_weight,
    recent,
    memory,
    out,
    partial,
    counters,
    eps,
    projected_stride,
    recent_stride,
    memory_stride,
    VALUE_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
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
    position = tl.load(positions + index)
    split = tl.program_id(2)
    key_dim, column = tl.arange(0, KEY_BLOCK), split * COLUMNS + tl.arange(0, COLUMNS)
    key_inside = key_dim < KEY_DIM
    where = memory + row * memory_stride + head * KEY_DIM * VALUE_DIM
    where = where + key_dim[:, None] * VALUE_DIM + column[None, :]
    inside = key_inside[:, None] & (column < VALUE_DIM)[None, :]
    known = tl.load(where, mask=inside, other=0.0)  # [key dim, columns]
    # Whatever does not depend on the projection is on its way before the wait.
    ring = recent + row * recent_stride
    channel = head // SHARED * KEY_DIM + key_dim
    q_earlier = weighted_earlier(ring, conv_weight, channel, key_inside, position, CHANNELS, TAPS)
    k_earlier = weighted_earlier(ring, conv_weight, KEY_SIZE + channel, key_inside, position, CHANNELS, TAPS)
    v_channel = 2 * KEY_SIZE + head * VALUE_DIM + column
    v_inside = column < VALUE_DIM
    v_earlier = weighted_earlier(ring, conv_weight, v_channel, v_inside, position, CHANNELS, TAPS)
    own_tap = conv_weight + (TAPS - 1) * CHANNELS
    q_gain = tl.load(own_tap + channel, mask=key_inside, other=0.0).to(tl.float32)
    k_gain = tl.load(own_tap + KEY_SIZE + channel, mask=key_inside, other=0.0).to(tl.float32)
    v_gain = tl.load(own_tap + v_channel, mask=v_inside, other=0.0).to(tl.float32)
    rate, bias = tl.load(decay_rate + head), tl.load(decay_bias + head)
    value_dim = tl.arange(0, SPLITS * COLUMNS)
    value_inside = value_dim < VALUE_DIM
    norm_gain = tl.load(norm_weight + value_dim, mask=value_inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()

    token = projected + index * projected_stride
    own_q = tl.load(token + channel, mask=key_inside, other=0.0)
    own_k = tl.load(token + KEY_SIZE + channel, mask=key_inside, other=0.0)
    own_v = tl.load(token + v_channel, mask=v_inside, other=0.0)
    gates = token + CHANNELS + VALUE_SIZE + head
    strength = tl.sigmoid(tl.load(gates).to(tl.float32))
    decay_input = tl.load(gates + VALUE_HEADS).to(tl.float32)
    gate = tl.load(token + CHANNELS + head * VALUE_DIM + value_dim, mask=value_inside, other=0.0).to(tl.float32)
    # Only one of the programs and value heads that share a key head keeps its token.
    keeps = key_dim < tl.where((head % SHARED == 0) & (split == 0), KEY_DIM, 0)
    kept = ring + (position % TAPS) * CHANNELS
    tl.store(kept + channel, own_q, mask=keeps)
    tl.store(kept + KEY_SIZE + channel, own_k, mask=keeps)
    tl.store(kept + v_channel, own_v, mask=v_inside)
    q, k = silu(q_earlier + own_q.to(tl.float32) * q_gain), silu(k_earlier + own_k.to(tl.float32) * k_gain)
    v = silu(v_earlier + own_v.to(tl.float32) * v_gain)
    q = q * tl.rsqrt((tl.sum(q * q, 0) + L2_EPS) * KEY_DIM)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
    decay = tl.exp(log_decay_of(decay_input, rate, bias))

    known = tl.where(position > 0, known, 0.0) * decay
    correction = (v - tl.sum(known * k[:, None], 0)) * strength
    known += k[:, None] * correction[None, :]
    tl.store(where, known, mask=inside)
    mixed = tl.sum(known * q[:, None], 0)
    if SPLITS > 1:
        cell = index * VALUE_HEADS + head
        own = partial + cell * (SPLITS * COLUMNS)
        tl.store(own + column, mixed)
        tl.debug_barrier()
        if tl.atomic_add(counters + cell, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(counters + cell, 0)
        mixed = tl.load(own + value_dim, cache_modifier=".cg")
    mixed *= tl.rsqrt(tl.sum(mixed * mixed, 0) / VALUE_DIM + eps)
    mixed *= norm_gain * gate * tl.sigmoid(gate)
    target = out + index * VALUE_SIZE + head * VALUE_DIM + value_dim
    tl.store(target, mixed.to(out.dtype.element_ty), mask=value_inside)
