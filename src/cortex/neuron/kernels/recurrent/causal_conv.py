"""A short causal convolution over each channel. The latest tokens of each row are kept between steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.batch import PREFILL_TILE, Batch, PrefillRow
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton

CHANNEL_BLOCK, TOKEN_BLOCK = 64, 32


def conv_chunks(
    x: Tensor, weight: Tensor, recent: Tensor, batch: Batch, bias: Tensor | None = None, *, activates: bool = True
) -> Tensor:
    """The prefill rows of a step. x: [prefill tokens, channels], each token dense → silu(convolution + bias), or
    without the silu, contiguous. Stores the latest tokens in `recent`.

    weight: [taps, channels]; recent: [slots, taps, channels], each slot dense; bias: [channels].
    """
    taps, channels = weight.shape
    assert batch.prefill_tiles is not None
    first = batch.num_decodes
    out = batch.empty((len(x), channels), x)
    rows = (batch.rows[first:], batch.lengths[first:], batch.prefill_offsets)
    strides = (x.stride(0), recent.stride(0))
    shared = {
        "CHANNELS": channels,
        "TAPS": taps,
        "CHANNEL_BLOCK": CHANNEL_BLOCK,
        "num_warps": 4,
        **launch_options(x.device),
    }
    blocks = triton.cdiv(channels, CHANNEL_BLOCK)
    parts = PREFILL_TILE // TOKEN_BLOCK
    _conv_kernel[(len(batch.prefill_tiles) * parts, blocks)](
        x,
        weight,
        bias,
        recent,
        *rows,
        batch.prefill_tiles,
        out,
        *strides,
        TOKEN_BLOCK=TOKEN_BLOCK,
        PARTS=parts,
        BIASED=bias is not None,
        ACTIVATES=activates,
        **shared,
    )
    # A separate launch, because the tiles of a row read what this overwrites.
    _store_recent_kernel[(batch.num_prefills, blocks)](x, recent, *rows, *strides, **shared)
    return out


def conv_rows_reference(
    x: Tensor,
    weight: Tensor,
    recent: Tensor,
    rows: Tensor,
    positions: Tensor,
    bias: Tensor | None = None,
    *,
    activates: bool = True,
) -> Tensor:
    """One token of each row. x: [rows, channels] → as `conv_chunks`, same shape. Stores the tokens in `recent`.

    weight: [taps, channels]; recent: [slots, taps, channels]; rows and positions: [rows] int64.
    """
    window = torch.cat((_earlier(recent, rows, positions), x[:, None]), dim=1)
    recent[rows, positions % len(weight)] = x
    mixed = (window.float() * weight.float()).sum(1)
    mixed = mixed if bias is None else mixed + bias.float()
    return (F.silu(mixed) if activates else mixed).to(x.dtype)


def conv_chunk_reference(
    x: Tensor, weight: Tensor, recent: Tensor, row: PrefillRow, bias: Tensor | None = None, *, activates: bool = True
) -> Tensor:
    """Consecutive tokens of one row. x: [count, channels] → as `conv_chunks`, same shape. Stores them in `recent`."""
    taps, channels = weight.shape
    first = torch.tensor([row.start], device=x.device)
    earlier = _earlier(recent, torch.tensor([row.row], device=x.device), first)[0]
    window = torch.cat((earlier, x)).float().t()[None]  # [1, channels, taps − 1 + count]
    own_bias = None if bias is None else bias.float()
    mixed = F.conv1d(window, weight.float().t()[:, None], own_bias, groups=channels)[0].t()
    kept = torch.arange(max(0, row.count - taps), row.count, device=x.device)
    recent[row.row, (row.start + kept) % taps] = x[kept]
    return (F.silu(mixed) if activates else mixed).to(x.dtype)


def _earlier(recent: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """The tokens before `positions`, oldest first, zeros before position 0: [rows, taps − 1, channels]"""
    taps = recent.shape[1]
    before = positions[:, None] + torch.arange(1 - taps, 0, device=recent.device)
    found = recent[rows[:, None], before % taps]
    return found.masked_fill((before < 0)[..., None], 0)


@jit
def convolved(token, ring, weight, channel, inside, keeps, position, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """silu of the convolution of one token at `channel`, float32. Where `keeps`, stores the token in the row's ring."""
    return silu(convolution(token, ring, weight, channel, inside, keeps, position, CHANNELS, TAPS))


@jit
def silu(x):
    return x * tl.sigmoid(x)


@jit
def convolution(token, ring, weight, channel, inside, keeps, position, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """As `convolved`, without the silu."""
    x = tl.load(token + channel, mask=inside, other=0.0)
    own = tl.load(weight + (TAPS - 1) * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    total = x.to(tl.float32) * own + weighted_earlier(ring, weight, channel, inside, position, CHANNELS, TAPS)
    tl.store(ring + (position % TAPS) * CHANNELS + channel, x, mask=keeps)
    return total


@jit
def weighted_earlier(ring, weight, channel, inside, position, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """The part of a convolution that the tokens before `position` have, float32."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS - 1):
        before = position - (TAPS - 1 - tap)
        place = (before + TAPS) % TAPS
        value = tl.load(ring + place * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(weight + tap * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(before >= 0, value, 0.0) * gain
    return total


@jit(do_not_specialize_on_alignment=["rows", "lengths"])
def _conv_kernel(
    x,
    weight,
    bias,
    recent,
    rows,
    lengths,
    offsets,
    tiles,
    out,
    x_stride,
    recent_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    ACTIVATES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0) // PARTS
    prefill = tl.load(tiles + tile * 2)
    first = tl.load(tiles + tile * 2 + 1) + tl.program_id(0) % PARTS * TOKEN_BLOCK
    offset = tl.load(offsets + prefill).to(tl.int64)
    count = tl.load(offsets + prefill + 1) - offset
    start = tl.load(lengths + prefill) - count
    ring = recent + tl.load(rows + prefill) * recent_stride
    token = first + tl.arange(0, TOKEN_BLOCK)
    channel = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    channel_inside = channel < CHANNELS
    inside = (token < count)[:, None] & channel_inside[None, :]
    total = tl.zeros((TOKEN_BLOCK, CHANNEL_BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        before = token - (TAPS - 1 - tap)  # index among the tokens of this step; negative: in an earlier step
        here = inside & (before >= 0)[:, None]
        value = tl.load(x + (offset + before)[:, None] * x_stride + channel[None, :], mask=here, other=0.0)
        position = start + before
        earlier = inside & ((before < 0) & (position >= 0))[:, None]
        place = (position + TAPS) % TAPS
        value += tl.load(ring + place[:, None] * CHANNELS + channel[None, :], mask=earlier, other=0.0)
        gain = tl.load(weight + tap * CHANNELS + channel, mask=channel_inside, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * gain[None, :]
    if BIASED:
        total += tl.load(bias + channel, mask=channel_inside, other=0.0).to(tl.float32)[None, :]
    if ACTIVATES:
        total *= tl.sigmoid(total)
    where = (offset + token)[:, None] * CHANNELS + channel[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize_on_alignment=["rows", "lengths"])
def _store_recent_kernel(
    x,
    recent,
    rows,
    lengths,
    offsets,
    x_stride,
    recent_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    prefill = tl.program_id(0)
    offset = tl.load(offsets + prefill).to(tl.int64)
    count = tl.load(offsets + prefill + 1) - offset
    start = tl.load(lengths + prefill) - count
    ring = recent + tl.load(rows + prefill) * recent_stride
    channel = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    for back in tl.static_range(TAPS):
        token = count - 1 - back
        inside = channel < tl.where(token >= 0, CHANNELS, 0)
        value = tl.load(x + (offset + token) * x_stride + channel, mask=inside, other=0.0)
        tl.store(ring + ((start + token) % TAPS) * CHANNELS + channel, value, mask=inside)
