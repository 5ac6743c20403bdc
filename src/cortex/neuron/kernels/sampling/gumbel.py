"""Reproducible noise for sampling tokens: a hash of (seed, position, token), so that the samples of a request do not
depend on the rest of its batch. The argmax of log-probability + Gumbel noise is a sample from the distribution."""

from __future__ import annotations

import torch
from torch import Tensor

MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
POSITION_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
TOKEN_STRIDE = 0xD6E8FEB86659FD93 - (1 << 64)

NOISE_BITS = 63
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1."""


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """seeds and positions: [rows] int64 → standard Gumbel noise [rows, vocab] float32, every value finite"""
    # Tokens and positions count from 1. The hash of 0 is 0, which would give token 0 at position 0 of seed 0 the
    # largest noise.
    tokens = torch.arange(1, vocab + 1, device=seeds.device)
    base = _mix(seeds + (positions + 1) * POSITION_STRIDE)
    return noise_of_bits(_shift(_mix(base[:, None] + tokens * TOKEN_STRIDE), 64 - NOISE_BITS))


def noise_of_bits(bits: Tensor) -> Tensor:
    """int64 from 0 up to 2**NOISE_BITS - 1 → standard Gumbel noise, float32. The smallest bits give the largest noise.

    The bits are the distance of the uniform number below 1, because float32 is dense near 0 and coarse near 1. So the
    tail of large noise, which decides the samples of unlikely tokens, reaches 44 and has hardly any ties. The
    conversion rounds the largest bits up to 1, whose noise would be infinite, so they are clamped to the largest
    float32 below 1. Because the noise is finite, a masked token (-inf) is never sampled and an allowed one can be.
    """
    below_one = (bits.to(torch.float32) + 0.5).mul_(2.0**-NOISE_BITS).clamp_(max=_LARGEST_BELOW_ONE)
    return below_one.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """Spreads every input bit over the word; int64 arithmetic wraps."""
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right. The operator `>>` of torch is arithmetic: it keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
