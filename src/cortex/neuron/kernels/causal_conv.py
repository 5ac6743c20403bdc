"""A short convolution over each channel's latest tokens, with the row's earlier tokens kept between steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.batch import PrefillRow


def conv_rows_reference(x: Tensor, weight: Tensor, recent: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """One token of each row. x: [rows, channels] → silu(convolution), same shape; `recent` takes the tokens in.

    weight: [taps, channels]; recent: [slots, taps, channels]; rows and positions: [rows] int64.
    """
    window = torch.cat((_earlier(recent, rows, positions), x[:, None]), dim=1)
    recent[rows, positions % len(weight)] = x
    return F.silu((window.float() * weight.float()).sum(1)).to(x.dtype)


def conv_chunk_reference(x: Tensor, weight: Tensor, recent: Tensor, row: PrefillRow) -> Tensor:
    """Consecutive tokens of one row. x: [count, channels] → silu(convolution), same shape; `recent` takes them in."""
    taps, channels = weight.shape
    first = torch.tensor([row.start], device=x.device)
    earlier = _earlier(recent, torch.tensor([row.row], device=x.device), first)[0]
    window = torch.cat((earlier, x)).float().t()[None]  # [1, channels, taps − 1 + count]
    mixed = F.conv1d(window, weight.float().t()[:, None], groups=channels)[0].t()
    kept = torch.arange(max(0, row.count - taps), row.count, device=x.device)
    recent[row.row, (row.start + kept) % taps] = x[kept]
    return F.silu(mixed).to(x.dtype)


def _earlier(recent: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """The tokens before `positions`, oldest first, zeros before the beginning: [rows, taps − 1, channels]"""
    taps = recent.shape[1]
    before = positions[:, None] + torch.arange(1 - taps, 0, device=recent.device)
    found = recent[rows[:, None], before % taps]
    return found.masked_fill((before < 0)[..., None], 0)
