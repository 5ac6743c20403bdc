"""Dense weights to codes: what a load does when the operator asks for fewer bits than the checkpoint has.

Plain torch; on a GPU, a kernel of `codes.py` does the same in one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.quantised.layout import Layout

FITTED_BITS = 6
"""Scales are fitted to their codes up to this many bits: more gain nothing."""
TINY = 1e-30


def extra_steps(layout: Layout) -> int:
    """The range of a group is divided into the layout's steps, and into this many more; the better division counts.

    More steps cut off the outermost values, so that the others are finer: worth it with few bits. Fewer leave room at
    the ends.
    """
    assert not layout.codebook, "codebooks are for formats that come with their codes"
    return 1 if layout.bits < 5 else -1


def quantised(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """values: [rows, columns], whole groups → code [rows, columns] uint8; scale, minimum [rows, groups] float32

    Scales are rounded as the layout keeps them before codes are chosen, so that the codes make up for it.
    """
    groups = values.float().view(len(values), -1, layout.group)
    low, high, total = groups.amin(-1), groups.amax(-1), groups.sum(-1)
    scale, minimum, error = _fit(groups, layout, low, high, total, 0)
    other_scale, other_minimum, other_error = _fit(groups, layout, low, high, total, extra_steps(layout))
    is_better = other_error < error
    scale, minimum = torch.where(is_better, other_scale, scale), torch.where(is_better, other_minimum, minimum)
    return _codes(groups, layout, scale, minimum).to(torch.uint8).flatten(1), scale, minimum


def _fit(
    groups: Tensor, layout: Layout, low: Tensor, high: Tensor, total: Tensor, extra: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The scale and minimum of each group for the layout's steps and `extra` more, and their squared errors."""
    scale, minimum = _stored(layout, *_spread(layout, low, high, extra))
    code = _codes(groups, layout, scale, minimum)
    if layout.bits <= FITTED_BITS:
        scale, minimum = _stored(layout, *_fitted(groups, layout, code, scale, total))
        code = _codes(groups, layout, scale, minimum)
    residual = code.mul_(scale[..., None]).add_(minimum[..., None]).sub_(groups)
    return scale, minimum, residual.square_().sum(-1)


def _stored(layout: Layout, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums as they are stored."""
    if layout.has_zeros:
        scale = kept_scale(scale)
        scale = torch.where(scale.abs() < TINY, 1.0, scale)
        return scale, -zeros_of(scale, minimum) * scale
    scale = scale.bfloat16().float()
    scale = torch.where(scale.abs() < TINY, 1.0, scale)
    return scale, minimum.bfloat16().float() if layout.zero is None else scale * -layout.zero


def kept_scale(scale: Tensor) -> Tensor:
    """Scales rounded to the 24 bits that a layout with zeros keeps: sixteen of the fraction with its first one."""
    bits = scale.float().view(torch.int32)
    rounded = ((bits + 0x7F + ((bits >> 8) & 1)) & -256).view(torch.float32)
    return torch.where(scale.isnan(), torch.nan, rounded)


def zeros_of(scale: Tensor, minimum: Tensor) -> Tensor:
    """The zeros of groups, of which the minimum is `-zero · scale`."""
    return (-minimum / torch.where(scale == 0, 1.0, scale)).nan_to_num(0).round().clamp(0, 255)


def _codes(groups: Tensor, layout: Layout, scale: Tensor, minimum: Tensor) -> Tensor:
    """The best codes for these scales and minimums."""
    codes = (groups - minimum[..., None]).mul_(scale.reciprocal()[..., None])
    return codes.clamp_(0, (1 << layout.bits) - 1).round_()


def _spread(layout: Layout, low: Tensor, high: Tensor, extra: int) -> tuple[Tensor, Tensor]:
    """A scale and a minimum for each group that divide its range into the layout's steps and `extra` more."""
    if layout.zero is not None:
        # The code furthest from zero stands for the number furthest from it, whatever its sign.
        scale = torch.where(high > -low, high, low) * (-1 / (layout.zero + extra))
        return scale, scale
    steps = (1 << layout.bits) - 1
    scale = (high - low) * (1 / (steps + extra))
    return scale, (low + high - scale * steps) * 0.5


def _fitted(groups: Tensor, layout: Layout, codes: Tensor, scale: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum of each group with the least squared error for the codes that it has."""
    products = (codes * groups).sum(-1)
    if layout.zero is not None:
        scale = (products - layout.zero * total) / (codes - layout.zero).square_().sum(-1).clamp_min_(1.0)
        return scale, scale
    size, code_sum = layout.group, codes.sum(-1)
    spread = size * codes.square().sum(-1) - code_sum.square()  # an integer; 0 if all codes are equal
    slope = (size * products - code_sum * total) / spread.clamp_min(1.0)
    scale = torch.where(spread > 0, slope, scale)
    return scale, (total - scale * code_sum) * (1 / size)
