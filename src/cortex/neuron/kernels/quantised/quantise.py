"""Dense weights to codes: what a load does when the operator asks for fewer bits than the checkpoint has."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.quantised.layout import Layout

_SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)
"""Fractions of a group's range that are tried: fewer bits are spent on outliers where that lowers the squared error."""
_TINY = 1e-30


def quantised(numbers: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """numbers: [rows, columns], whole groups → code [rows, columns] uint8; scale, minimum [rows, groups] float32

    Scales are rounded to bfloat16 before codes are chosen, so that the codes make up for it.
    """
    groups = numbers.float().view(len(numbers), -1, layout.group)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.full(groups.shape[:2], torch.inf, device=numbers.device)
    for shrink in _SHRINKS if layout.bits <= 5 else _SHRINKS[:1]:
        scale, minimum = _range(groups, layout, shrink)
        code = ((groups - minimum[..., None]) / scale[..., None]).round_().clamp_(0, (1 << layout.bits) - 1)
        error = (code * scale[..., None] + minimum[..., None] - groups).square_().sum(-1)
        if best is None:
            best, least = (code, scale, minimum), error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = (
            torch.where(better[..., None], code, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, minimum, best[2]),
        )
    assert best is not None
    return best[0].to(torch.uint8).flatten(1), best[1], best[2]


def _range(groups: Tensor, layout: Layout, shrink: float) -> tuple[Tensor, Tensor]:
    """A scale and a minimum for each group that cover `shrink` of its range; neither is zero where a number is not."""
    if layout.zero is not None:
        # The code furthest from zero stands for the number furthest from it, whatever its sign.
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
        scale = _rounded(extreme * (-shrink / layout.zero))
        scale = torch.where(scale.abs() < _TINY, torch.ones_like(scale), scale)
        return scale, scale * -layout.zero
    low, high = groups.amin(-1), groups.amax(-1)
    middle, half = (low + high) / 2, (high - low) / 2 * shrink
    scale = _rounded(half * 2 / ((1 << layout.bits) - 1))
    scale = torch.where(scale < _TINY, torch.ones_like(scale), scale)
    return scale, _rounded(middle - half)


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.bfloat16().float()
