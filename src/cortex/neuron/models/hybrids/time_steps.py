"""The limits of a Mamba layer's time steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cortex.neuron.models.errors import UnsupportedModel

_INFINITE = (math.inf, {"__float__": "Infinity"}, "inf", "Infinity")
"""How config files write it."""


def check_time_steps(config: Mapping[str, Any]) -> None:
    """Rejects limits other than zero and infinity, with which time steps are not limited: no published model has
    others."""
    limits = config.get("time_step_limit")
    if limits is None:
        return
    if not isinstance(limits, (list, tuple)) or len(limits) != 2 or limits[0] != 0 or limits[1] not in _INFINITE:
        raise UnsupportedModel(f"time_step_limit is {limits!r:.80}, which is not supported; supported: [0, inf]")
