"""A short causal convolution over each channel. The latest tokens of each row are kept between steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.batch import PREFILL_TILE, Batch, PrefillRow
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton

CHANNEL_BLOCK, TOKEN_BLOCK = 1024, 8


def conv_chunks(
    x: Tensor,
    weight: Tensor,
    recent: Tensor,
    batch: Batch,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    activates: bool = True,
) -> None:
    """The prefill rows of a step. x: [prefill tokens, channels], each token dense; out: the same, contiguous, becomes
    silu(convolution + bias), or without the silu, for the tokens of rows. Stores the latest tokens in `recent`,
    and those before a cut in its slot.

    weight: [taps, channels]; recent: [slots, taps, channels], each slot dense; bias: [channels].
    """
    taps, channels = weight.shape
    assert batch.prefill_tiles is not None
    assert batch.prefill_cuts is not None
    first = batch.num_decodes
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
    _store_recent_kernel[(batch.num_prefills, blocks)](x, recent, *rows, batch.prefill_cuts, *strides, **shared)


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
    """Consecutive tokens of one row. x: [count, channels] → as `conv_chunks`, same shape. Stores them in `recent`.

    Tap by tap: the convolution of torch has given wrong values on ARM while another thread ran one, and is slower.
    """
    taps = len(weight)
    first = torch.tensor([row.start], device=x.device)
    earlier = _earlier(recent, torch.tensor([row.row], device=x.device), first)[0]
    window = torch.cat((earlier, x)).float()  # [taps − 1 + count, channels]
    mixed = window[taps - 1 :] * weight[-1].float()
    for tap in range(taps - 1):
        mixed.addcmul_(window[tap:][: row.count], weight[tap].float())
    if bias is not None:
        mixed += bias.float()
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
def silu(x):
    return x * tl.sigmoid(x)


@jit
def convolution(token, ring, weight, channel, inside, keeps, position, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """The convolution of one token at `channel`, float32. Where `keeps`, stores the token in the row's ring."""
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
    count = (tl.load(offsets + prefill + 1) - offset).to(tl.int32)
    if first >= count:
        return
    start = tl.load(lengths + prefill) - count
    ring = recent + tl.load(rows + prefill) * recent_stride
    channel = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    channel_inside = channel < CHANNELS
    gains = ()
    for tap in tl.static_range(TAPS):
        gain = tl.load(weight + tap * CHANNELS + channel, mask=channel_inside, other=0.0).to(tl.float32)
        gains += (gain,)  # type: ignore[assignment]  # a tuple of Triton's, which grows
    window = ()
    for place in tl.static_range(TOKEN_BLOCK + TAPS - 1):
        token = first + place - (TAPS - 1)  # negative: of an earlier step
        position = start + token
        kept = ring + (position + TAPS) % TAPS * CHANNELS
        source = tl.where(token >= 0, x + (offset + token) * x_stride, kept)
        inside = channel < tl.where((position >= 0) & (token < count), CHANNELS, 0)
        window += (tl.load(source + channel, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    for place in tl.static_range(TOKEN_BLOCK):
        total = window[place] * gains[0]  # type: ignore[misc]
        for tap in tl.static_range(1, TAPS):
            total += window[place + tap] * gains[tap]
        if BIASED:
            total += tl.load(bias + channel, mask=channel_inside, other=0.0).to(tl.float32)
        if ACTIVATES:
            total *= tl.sigmoid(total)
        inside = channel < tl.where(first + place < count, CHANNELS, 0)
        target = out + (offset + first + place) * CHANNELS + channel
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize_on_alignment=["rows", "lengths", "cuts"])
def _store_recent_kernel(
    x,
    recent,
    rows,
    lengths,
    offsets,
    cuts,
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
    cut = tl.load(cuts + prefill * 2)
    if cut > 0:  # first: earlier tokens are in the ring, which is overwritten below
        saved = recent + tl.load(cuts + prefill * 2 + 1).to(tl.int64) * recent_stride
        for back in tl.static_range(TAPS):
            token = cut - 1 - back
            place = (start + token + TAPS) % TAPS * CHANNELS + channel
            here = channel < tl.where(token >= 0, CHANNELS, 0)
            value = tl.load(x + (offset + token) * x_stride + channel, mask=here, other=0.0)
            there = channel < tl.where(token < 0, CHANNELS, 0)
            value += tl.load(ring + place, mask=there, other=0.0)
            tl.store(saved + place, value, mask=here | there)
    for back in tl.static_range(TAPS):
        token = count - 1 - back
        inside = channel < tl.where(token >= 0, CHANNELS, 0)
        value = tl.load(x + (offset + token) * x_stride + channel, mask=inside, other=0.0)
        tl.store(ring + ((start + token) % TAPS) * CHANNELS + channel, value, mask=inside)
