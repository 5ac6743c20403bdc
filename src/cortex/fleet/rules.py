"""The operator's rules for making room: the `[eviction]` table."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from cortex.settings import Section

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class EvictionRules(Section, frozen=True):
    """Which model makes room for another, and how soon."""

    strategy: Literal["lru", "priority"] = "lru"
    """`lru`: the one unused for longest goes first. `priority`: the one of lowest priority, then the longest unused."""
    defrag_after_cycles: Annotated[int, msgspec.Meta(ge=0)] = 50
    """Recycle a node's workers, when idle, after this many loads; 0 never does."""
    min_residency_s: Seconds = 20.0
    """A model stays at least this long once loaded."""
    fair_wait_s: Seconds = 30.0
    """After this wait, requests for an absent model stop new work on the models it could replace."""
    retry_failed_after_s: Seconds = 30.0
    """A model that failed to load on a node is not tried there again for this long."""
