"""Rows of a few tokens of a recurrent layer: steps that check draft tokens.

Each token is a row of the batch; the tokens of one sequence follow each other. What the convolution has of the tokens
before them is in the ring of their row, as `causal_conv` keeps it.
"""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.recurrent.causal_conv import CHANNEL_BLOCK


def keep_recent(x: Tensor, batch: Batch, recent: Tensor) -> None:
    """Stores the latest tokens of each sequence in its ring. x: [tokens, channels], each token dense; recent: [slots,
    taps, channels]. A launch of its own: the programs that compute a sequence read what it overwrites."""
    tokens, channels = x.shape
    _keep_kernel[(tokens, triton.cdiv(channels, CHANNEL_BLOCK))](
        x,
        batch.rows,
        batch.positions,
        recent,
        x.stride(0),
        recent.stride(0),
        tokens,
        CHANNELS=channels,
        TAPS=recent.shape[1],
        CHANNEL_BLOCK=CHANNEL_BLOCK,
        num_warps=1,
        **launch_options(x.device),
    )


@jit
def follows_another(rows, positions, index):
    """Whether the token is computed with an earlier one of its sequence."""
    before = tl.maximum(index - 1, 0)  # the first token is not the one before itself: its position would differ
    is_same = tl.load(rows + before) == tl.load(rows + index)
    return is_same & (tl.load(positions + before) + 1 == tl.load(positions + index))


@jit
def first_of_convolution(rows, positions, index, TAPS: tl.constexpr):
    """The first position of the token's sequence in this step, as far back as its convolution reaches."""
    row, position = tl.load(rows + index), tl.load(positions + index)
    first = position
    for number in tl.static_range(1, TAPS):
        there = tl.maximum(index - number, 0)
        is_same = (tl.load(rows + there) == row) & (tl.load(positions + there) == position - number)
        first = tl.where(is_same & (first == position - number + 1), position - number, first)
    return first


@jit
def sequence_length(rows, positions, index, tokens, MOST: tl.constexpr):
    """How many tokens the sequence has of which `index` is the first."""
    offset = tl.arange(0, MOST)
    inside = index + offset < tokens
    theirs = tl.load(rows + index + offset, mask=inside, other=-1)
    places = tl.load(positions + index + offset, mask=inside, other=-1)
    is_same = (theirs == tl.load(rows + index)) & (places == tl.load(positions + index) + offset)
    return tl.min(tl.where(is_same, MOST, offset), 0)


@jit
def convolution_in_sequence(
    token, ring, weight, channel, inside, position, first, stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    """The convolution of a token at `channel`, float32. `first`: the position of the sequence's first token in this
    step; earlier ones are in the ring."""
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
    return total


@jit(do_not_specialize=["tokens"])
def _keep_kernel(
    x,
    rows,
    positions,
    recent,
    x_stride,
    recent_stride,
    tokens,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Those whose place in the ring no later token of this step takes."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0).to(tl.int64)
    row, position = tl.load(rows + index), tl.load(positions + index)
    later = tl.minimum(index + TAPS, tokens - 1)  # if it is nearer, its position is another one
    is_taken = (tl.load(rows + later) == row) & (tl.load(positions + later) == position + TAPS)
    channel = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    inside = channel < tl.where(is_taken, 0, CHANNELS)
    value = tl.load(x + index * x_stride + channel, mask=inside, other=0.0)
    tl.store(recent + row * recent_stride + (position % TAPS) * CHANNELS + channel, value, mask=inside)
