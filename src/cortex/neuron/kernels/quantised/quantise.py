"""Dense weights to codes: what a load does when the operator asks for fewer bits than the checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortex.neuron.kernels.quantised.layout import Layout

_EXTRA_STEPS = (0, 1, -1)
"""The range of a group is divided into the layout's steps and this many more. Fewer steps than codes leave room at the
ends; more steps cut off the outermost numbers, so that the others are finer. Each is then fitted to its codes."""
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
    groups = numbers.float().view(len(numbers), -1, layout.group)
    best: _Fit | None = None
    for extra in _EXTRA_STEPS:
        first = _fit(groups, layout, *_spread(groups, layout, extra))
        for fit in (first, _fit(groups, layout, *_fitted(groups, layout, first))):
            best = fit if best is None else best.better(fit)
    assert best is not None
    return best.code.to(torch.uint8).flatten(1), best.scale, best.minimum


def _fit(groups: Tensor, layout: Layout, scale: Tensor, minimum: Tensor) -> _Fit:
    """The best codes for these scales and minimums, as they are stored."""
    scale = _rounded(scale)
    scale = torch.where(scale.abs() < _TINY, torch.ones_like(scale), scale)
    minimum = _rounded(minimum) if layout.zero is None else scale * -layout.zero
    code = ((groups - minimum[..., None]) / scale[..., None]).round_().clamp_(0, (1 << layout.bits) - 1)
    error = (code * scale[..., None] + minimum[..., None] - groups).square_().sum(-1)
    return _Fit(code, scale, minimum, error)


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


def _fitted(groups: Tensor, layout: Layout, fit: _Fit) -> tuple[Tensor, Tensor]:
    """The scale and minimum of each group with the least squared error for the codes that it has."""
    if layout.zero is not None:
        code = fit.code - layout.zero
        scale = (code * groups).sum(-1) / code.square().sum(-1).clamp_min(1.0)
        return scale, scale * -layout.zero
    size, code_sum, total = layout.group, fit.code.sum(-1), groups.sum(-1)
    spread = size * fit.code.square().sum(-1) - code_sum.square()  # an integer; 0 if all codes are equal
    slope = (size * (fit.code * groups).sum(-1) - code_sum * total) / spread.clamp_min(1.0)
    scale = torch.where(spread > 0, slope, fit.scale)
    return scale, (total - scale * code_sum) / size


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.bfloat16().float()
