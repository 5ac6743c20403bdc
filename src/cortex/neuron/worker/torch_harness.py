"""The native engine behind the harness interface. Imported inside a worker only: this is where torch comes in."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import LoadSpec


def load(
    spec: LoadSpec, device: str, progress: Callable[[str, int, int], None], cancelled: Callable[[], bool]
) -> Engine:
    """Loads a model onto `device` as this worker's torch names it; the contract is in `neuron.engine`."""
    return Engine.load(spec, torch.device(device), progress, cancelled)
