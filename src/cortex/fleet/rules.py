"""The operator's rules for placement and eviction: the tables `[placement]` and `[eviction]`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from cortex.settings import Section
from cortex.wire.node.device_choice import Strategy

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class PlacementRules(Section, frozen=True):
    """Where a model is loaded when several nodes or devices have room."""

    strategy: Strategy = "pack"
    """`pack`: where the least memory stays free, which keeps large devices for large models. `spread`: where the most
    is free, so that models share a device only when they must."""
    min_awake: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Number of nodes that always stay awake: see `wake` of `[[neurons]]`."""
    max_loaded: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Maximum number of models loaded on a node at once, regardless of memory. Absent: as many as fit."""


class EvictionRules(Section, frozen=True):
    """Which model is evicted for another, and how soon."""

    strategy: Literal["lru", "priority"] = "lru"
    """`lru`: evict the least recently used model first. `priority`: the one of lowest priority, then by last use."""
    ttl_s: Seconds = 0.0
    """The `ttl_s` of every model without one of its own; 0: none."""
    max_keep_alive_s: Seconds = 0.0
    """The longest time for which `keep_alive` of a request in Ollama's dialect keeps its model after the response.
    Until then the model is not evicted for others, and its `ttl_s` does not end. 0: no request keeps a model."""
    defrag_after_cycles: Annotated[int, msgspec.Meta(ge=0)] = 50
    """Replace a node's workers, once idle, after this many loads; 0: never."""
    min_residency_s: Seconds = 20.0
    """After its load, a model that other clients use is protected from eviction for five times the duration of the
    load, at most for this long; if the load took longer than this, for the duration of the load. A model used only by
    the clients that wait for another one is evicted at once. 0: every idle model is."""
    fair_wait_s: Seconds = 30.0
    """Once a request has waited this long, the models that its model could replace take no new requests. A request
    fails after this time if only unreachable, starting or stopping nodes have its model, and at once if the operator
    drained all of these."""
    retry_failed_after_s: Seconds = 30.0
    """After a failed load, the model is not tried on that node for this long. A load that failed for lack of memory is
    retried as soon as the node has more."""
