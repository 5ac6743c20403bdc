"""The real engine, in which a rank fails in the middle of a step: the next one after a test has named the error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cortex.neuron.engine.parallel.ranks import load_engine
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.models.decoder import DecoderLayer

ERRORS: dict[str, Exception] = {
    "bug": ValueError("shapes do not match"),
    "out of memory": torch.OutOfMemoryError("CUDA out of memory"),
}


def fail_next_step(source: str, rank: int, error: str) -> None:
    """`error`: one of `ERRORS`."""
    _order(source, rank).write_text(error)


def load(spec: LoadSpec, device: Any, progress: Any, cancelled: Callable[[], bool], link: Any = None) -> Any:
    engine = load_engine(spec, device, progress, cancelled, link)
    if spec.rank is not None:
        order, call = _order(spec.path, spec.rank.rank), DecoderLayer.__call__

        def failing_call(
            self: DecoderLayer, hidden: torch.Tensor, batch: Batch, own_input: torch.Tensor | None = None
        ) -> torch.Tensor:
            if order.exists():
                error = order.read_text()
                order.unlink()
                raise ERRORS[error]
            return call(self, hidden, batch, own_input)

        DecoderLayer.__call__ = failing_call  # type: ignore[method-assign]
    return engine


def _order(source: str, rank: int) -> Path:
    return Path(source) / f"rank {rank} fails"
