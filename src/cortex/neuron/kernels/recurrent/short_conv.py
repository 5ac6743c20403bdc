"""The gated short convolution for a whole step: c · conv(b · x), and its reference.

A projected token has b, c and x, each of the layer's channels. The state is the latest b · x of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton
from cortex.neuron.kernels.recurrent.causal_conv import (
    conv_chunk_reference,
    conv_chunks,
    conv_rows_reference,
    weighted_earlier,
)
from cortex.neuron.kernels.recurrent.few_tokens import convolution_in_sequence, first_of_convolution, keep_recent
from cortex.neuron.kernels.recurrent.rows import advance_rows, one_by_one, pieces

CHANNEL_BLOCK = 256


def short_conv(projected: Tensor, weight: Tensor, batch: Batch, recent: Tensor) -> Tensor:
    """projected: [tokens, 3 · channels] → [tokens, channels]. Advances the state of the rows by their tokens.

    weight: [taps, channels]; recent: [slots, taps, channels], each slot dense.
    """
    if not has_kernels(projected):
        return short_conv_reference(projected, weight, batch, recent)

    def step(projected: Tensor, batch: Batch, out: Tensor) -> None:
        short_conv_step(projected, weight, batch, recent, out)

    def chunks(projected: Tensor, batch: Batch, out: Tensor) -> None:
        before, after, x = projected.chunk(3, dim=-1)
        mixed = batch.empty("convolved", x.shape, x)
        conv_chunks(before * x, weight, recent, batch, mixed, activates=False)
        torch.mul(after, mixed, out=out)

    def few_tokens(projected: Tensor, batch: Batch, out: Tensor) -> None:
        short_conv_few_tokens(projected, weight, batch, recent, out)

    out = torch.empty((len(projected), weight.shape[1]), dtype=projected.dtype, device=projected.device)
    return advance_rows(projected, batch, out, step=step, chunks=chunks, few_tokens=few_tokens)


def short_conv_reference(projected: Tensor, weight: Tensor, batch: Batch, recent: Tensor) -> Tensor:
    if batch.shares_rows:
        tokens = zip(projected.split(1), one_by_one(batch), strict=True)
        return torch.cat([short_conv_reference(token, weight, turn, recent) for token, turn in tokens])
    before, after, x = projected.chunk(3, dim=-1)
    x = before * x
    decodes = batch.num_decodes
    parts = []
    if decodes:
        rows, positions = batch.rows[:decodes], batch.positions[:decodes]
        parts.append(conv_rows_reference(x[:decodes], weight, recent, rows, positions, activates=False))
    for row in pieces(batch, recent):
        here = slice(row.offset, row.offset + row.count)
        parts.append(conv_chunk_reference(x[here], weight, recent, row, activates=False))
    return after * (parts[0] if len(parts) == 1 else torch.cat(parts))


def short_conv_step(projected: Tensor, weight: Tensor, batch: Batch, recent: Tensor, out: Tensor) -> None:
    """The first `batch.num_decodes` tokens, one of each row."""
    taps, channels = weight.shape
    _step_kernel[(batch.num_decodes, triton.cdiv(channels, CHANNEL_BLOCK))](
        projected,
        batch.rows,
        batch.positions,
        weight,
        recent,
        out,
        projected.stride(0),
        recent.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        BLOCK=CHANNEL_BLOCK,
        num_warps=4,
        **launch_options(projected.device),
    )


def short_conv_few_tokens(projected: Tensor, weight: Tensor, batch: Batch, recent: Tensor, out: Tensor) -> None:
    """Decode rows; several may be of one sequence: see `few_tokens`. Each is computed by itself."""
    before, after, x = projected.chunk(3, dim=-1)
    x = before * x
    tokens, (taps, channels) = len(x), weight.shape
    _few_tokens_kernel[(tokens, triton.cdiv(channels, CHANNEL_BLOCK))](
        x,
        after,
        batch.rows,
        batch.positions,
        weight,
        recent,
        out,
        after.stride(0),
        recent.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        BLOCK=CHANNEL_BLOCK,
        num_warps=4,
        **launch_options(projected.device),
    )
    keep_recent(x, batch, recent)


@jit
def _few_tokens_kernel(
    x,
    after,
    rows,
    positions,
    weight,
    recent,
    out,
    after_stride,
    recent_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per token and BLOCK channels. Rounds where the reference does."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    kind: tl.constexpr = out.dtype.element_ty
    index = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    row, position = tl.load(rows + index), tl.load(positions + index)
    first = first_of_convolution(rows, positions, index, TAPS)
    ring, token = recent + row * recent_stride, x + index * CHANNELS
    total = convolution_in_sequence(token, ring, weight, channel, inside, position, first, CHANNELS, CHANNELS, TAPS)
    gate = tl.load(after + index * after_stride + channel, mask=inside, other=0.0).to(tl.float32)
    mixed = gate * total.to(kind).to(tl.float32)
    tl.store(out + index * CHANNELS + channel, mixed.to(kind), mask=inside)


@jit
def _step_kernel(
    projected,
    rows,
    positions,
    weight,
    recent,
    out,
    projected_stride,
    recent_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and BLOCK channels. Rounds where the reference does."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    kind: tl.constexpr = out.dtype.element_ty
    index = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    position = tl.load(positions + index)
    ring = recent + tl.load(rows + index) * recent_stride
    token = projected + index * projected_stride + channel
    before = tl.load(token, mask=inside, other=0.0).to(tl.float32)
    after = tl.load(token + CHANNELS, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(token + 2 * CHANNELS, mask=inside, other=0.0).to(tl.float32)
    x = (before * x).to(kind)
    own = tl.load(weight + (TAPS - 1) * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    total = x.to(tl.float32) * own + weighted_earlier(ring, weight, channel, inside, position, CHANNELS, TAPS)
    tl.store(ring + (position % TAPS) * CHANNELS + channel, x, mask=inside)
    mixed = after * total.to(kind).to(tl.float32)
    tl.store(out + index * CHANNELS + channel, mixed.to(kind), mask=inside)
