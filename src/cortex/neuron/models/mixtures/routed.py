"""The experts of one layer, checked."""

from __future__ import annotations

from typing import Any

from cortex.neuron.layers.configs import MoEConfig
from cortex.neuron.models.errors import UnsupportedModel

_MAX_EXPERTS = 1 << 12
"""Far above every published model; bounds what a damaged config can make a node compute."""


def routed(hidden: int, inner: int, experts: int, top_k: int, renormalise: bool, **options: Any) -> MoEConfig:
    """Raises UnsupportedModel for values that contradict each other."""
    if not 0 < experts <= _MAX_EXPERTS:
        raise UnsupportedModel(f"the model's config has {experts} experts; at most {_MAX_EXPERTS} are supported")
    if top_k > experts:
        raise UnsupportedModel(f"the model's config asks for {top_k} of {experts} experts; is it complete?")
    return MoEConfig(hidden, inner, experts, top_k, renormalise, **options)
