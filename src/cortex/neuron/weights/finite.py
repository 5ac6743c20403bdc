"""Checks that the scales of quantised tensors are numbers, while the tensors are read."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cortex.neuron.weights.errors import Malformed
from cortex.neuron.weights.stored import StoredTensor


class ScaleCheck:
    """The check of one tensor. On a GPU its result is read once, after the last piece: reading it waits for the GPU."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self.finite: torch.Tensor | None = None
        """[] bool on a GPU, or None: all is checked."""

    def add(self, scales: torch.Tensor) -> None:
        """`scales`: numbers of one piece; if a scale is not finite, one of them is not. Raises Malformed on the CPU."""
        finite = torch.isfinite(scales.sum())
        if finite.device.type == "cpu":
            if not bool(finite):
                raise self.error()
        else:
            self.finite = finite if self.finite is None else self.finite & finite

    def error(self) -> Malformed:
        stored = self._stored
        return Malformed(
            f"{stored.file.path}: {stored.name} in {stored.format} has scales that are not numbers; download it again"
        )


def finish(checks: Iterable[ScaleCheck]) -> None:
    """Raises Malformed if a scale was not a number."""
    pending = [(check, check.finite) for check in checks if check.finite is not None]
    if not pending:
        return
    results: list[bool] = torch.stack([finite for _, finite in pending]).tolist()
    for (check, _), is_finite in zip(pending, results, strict=True):
        if not is_finite:
            raise check.error()
