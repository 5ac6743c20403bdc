"""Checks that quantised tensors have finite scales, and FP8 ones finite weights, while the tensors are read."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cortex.neuron.weights.errors import Malformed
from cortex.neuron.weights.stored import StoredTensor

_NAN = 0x7F
"""The code of NaN in FP8 (e4m3), without its sign. Some kernels would read it as 480."""


class ScaleCheck:
    """The check of one tensor. On a GPU its result is read once, after the last piece: reading it waits for the GPU."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self.finite: torch.Tensor | None = None
        """[] bool on a GPU, or None: all is checked."""

    def add(self, scales: torch.Tensor) -> None:
        """`scales`: values of one piece; if a scale is not finite, one of them is not. Raises Malformed on the CPU."""
        self._add(torch.isfinite(scales.sum()))

    def add_float8(self, codes: torch.Tensor) -> None:
        """`codes`: weights of one piece. Raises Malformed on the CPU."""
        self._add((codes.view(torch.uint8) & _NAN).amax() != _NAN)

    def _add(self, finite: torch.Tensor) -> None:
        """finite: [] bool"""
        if finite.device.type == "cpu":
            if not bool(finite):
                raise self.error()
        else:
            self.finite = finite if self.finite is None else self.finite & finite

    def error(self) -> Malformed:
        stored = self._stored
        what = "weights" if stored.format == "FP8" else "scales"  # its scales are checked where they are read
        return Malformed(
            f"{stored.file.path}: {stored.name} in {stored.format} has {what} that are not finite; download it again"
        )


def finish(checks: Iterable[ScaleCheck]) -> None:
    """Raises Malformed if a scale or a weight was not finite."""
    pending = [(check, check.finite) for check in checks if check.finite is not None]
    if not pending:
        return
    results: list[bool] = torch.stack([finite for _, finite in pending]).tolist()
    for (check, _), is_finite in zip(pending, results, strict=True):
        if not is_finite:
            raise check.error()
