"""Dense weights to codes: what a load does when the operator asks for fewer bits than the checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortex.neuron.kernels.quantised.layout import Layout

_FITTED_BITS = 6
"""Scales are fitted to their codes up to this many bits: more gain nothing."""
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class _Fit:
    """Codes, scales and minimums of groups, and their squared errors."""

    code: Tensor
    """[rows, groups, group]"""
    scale: Tensor
    """[rows, groups]"""
    minimum: Tensor
    error: Tensor

    def better(self, other: _Fit) -> _Fit:
        """Of each group, the fit with the smaller error."""
        is_better = other.error < self.error
        return _Fit(
            torch.where(is_better[..., None], other.code, self.code),
            torch.where(is_better, other.scale, self.scale),
            torch.where(is_better, other.minimum, self.minimum),
            torch.where(is_better, other.error, self.error),
        )


def quantised(numbers: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """numbers: [rows, columns], whole groups → code [rows, columns] uint8; scale, minimum [rows, groups] float32

    Scales are rounded to bfloat16 before codes are chosen, so that the codes make up for it.
    """
    assert not layout.levels, "levels are for formats that come with their codes"
    groups = numbers.float().view(len(numbers), -1, layout.group)
    # The range of a group is divided into the layout's steps, and into one more or less. More steps cut off the
    # outermost numbers, so that the others are finer: worth it with few bits. Fewer leave room at the ends.
    best = _fit(groups, layout, 0).better(_fit(groups, layout, 1 if layout.bits < 5 else -1))
    return best.code.to(torch.uint8).flatten(1), best.scale, best.minimum


def _fit(groups: Tensor, layout: Layout, extra: int) -> _Fit:
    """The scales and codes for the layout's steps and `extra` more, fitted to each other."""
    scale, minimum = _stored(layout, *_spread(groups, layout, extra))
    code = _codes(groups, layout, scale, minimum)
    if layout.bits <= _FITTED_BITS:
        scale, minimum = _stored(layout, *_fitted(groups, layout, code, scale))
        code = _codes(groups, layout, scale, minimum)
    error = torch.addcmul(minimum[..., None] - groups, code, scale[..., None]).square_().sum(-1)
    return _Fit(code, scale, minimum, error)


def _stored(layout: Layout, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums as they are stored."""
    scale = _rounded(scale)
    scale = torch.where(scale.abs() < _TINY, torch.ones_like(scale), scale)
    return scale, _rounded(minimum) if layout.zero is None else scale * -layout.zero


def _codes(groups: Tensor, layout: Layout, scale: Tensor, minimum: Tensor) -> Tensor:
    """The best codes for these scales and minimums."""
    return (groups - minimum[..., None]).div_(scale[..., None]).round_().clamp_(0, (1 << layout.bits) - 1)


def _spread(groups: Tensor, layout: Layout, extra: int) -> tuple[Tensor, Tensor]:
    """A scale and a minimum for each group that divide its range into the layout's steps and `extra` more."""
    if layout.zero is not None:
        # The code furthest from zero stands for the number furthest from it, whatever its sign.
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
        scale = extreme / -(layout.zero + extra)
        return scale, scale * -layout.zero
    low, high = groups.amin(-1), groups.amax(-1)
    steps = (1 << layout.bits) - 1
    scale = (high - low) / (steps + extra)
    return scale, (low + high - scale * steps) / 2


def _fitted(groups: Tensor, layout: Layout, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum of each group with the least squared error for the codes that it has."""
    if layout.zero is not None:
        code = codes - layout.zero
        scale = (code * groups).sum(-1) / code.square().sum(-1).clamp_min(1.0)
        return scale, scale * -layout.zero
    size, code_sum, total = layout.group, codes.sum(-1), groups.sum(-1)
    spread = size * codes.square().sum(-1) - code_sum.square()  # an integer; 0 if all codes are equal
    slope = (size * (codes * groups).sum(-1) - code_sum * total) / spread.clamp_min(1.0)
    scale = torch.where(spread > 0, slope, scale)
    return scale, (total - scale * code_sum) / size


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.bfloat16().float()
