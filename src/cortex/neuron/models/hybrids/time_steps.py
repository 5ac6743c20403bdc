"""The limits of a Mamba layer's time steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex.neuron.models.errors import UnsupportedModel

_UNREACHED = 1e30
"""No time step is as large: config files also write infinity as almost the largest value of some type."""


def check_time_steps(config: Mapping[str, Any]) -> None:
    """Rejects limits other than zero and infinity, with which time steps are not limited: no published model has
    others."""
    limits = config.get("time_step_limit")
    if limits is None:
        return
    if not isinstance(limits, (list, tuple)) or len(limits) != 2 or limits[0] != 0 or not _is_infinite(limits[1]):
        raise UnsupportedModel(f"time_step_limit is {limits!r:.80}, which is not supported; supported: [0, inf]")


def _is_infinite(limit: object) -> bool:
    if isinstance(limit, Mapping):
        limit = limit.get("__float__")
    return limit in ("inf", "Infinity") or (isinstance(limit, int | float) and limit >= _UNREACHED)
