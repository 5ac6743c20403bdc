"""Reproducible noise for drawing tokens: a hash of (seed, position, token), so that a request's draws do not depend on
what else is in its batch. The largest of log-probability + Gumbel noise is a draw from the distribution."""

from __future__ import annotations

import torch
from torch import Tensor

_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_POSITION_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_TOKEN_STRIDE = 0xD6E8FEB86659FD93 - (1 << 64)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """seeds and positions: [rows] int64 → standard Gumbel noise [rows, vocab] float32"""
    tokens = torch.arange(vocab, device=seeds.device)
    base = _mix(seeds + positions * _POSITION_STRIDE)
    bits = _mix(base[:, None] + tokens * _TOKEN_STRIDE) & 0xFFFFFF
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-24
    return uniform.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """Spreads every input bit over the word; int64 arithmetic wraps."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
