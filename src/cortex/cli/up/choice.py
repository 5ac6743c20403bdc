"""In which format `cortex up` takes a model that is named without one. Pure."""

from __future__ import annotations

from typing import Final

from cortex.cli.up.sources import ModelSource
from cortex.fleet.known_models import KnownModel

_FORMATS: Final = (("Q8_0", 1.07), ("Q6_K", 0.83), ("Q5_K_M", 0.72), ("Q4_K_M", 0.61))
"""The formats of quantised weights, the best first, and bytes per weight with embeddings and scales."""
_SHARE_OF_WEIGHTS: Final = 0.8
"""The share of free memory that weights may take; the rest is for the KV cache and buffers."""


def chosen(model: KnownModel, quant: str | None, free_bytes: int) -> ModelSource:
    """The model as published if it fits, else in the best format that does, as GGUF where that is published. With
    `quant`, in that one. If none fits, the smallest: the node says what is missing."""
    room = free_bytes * _SHARE_OF_WEIGHTS
    if quant is None and model.weight_bytes > room:
        smaller = [(name, size) for name, size in _FORMATS if size < model.bytes_per_weight]
        fitting = (name for name, size in smaller if model.billions * 1e9 * size <= room)
        quant = next(fitting, smaller[-1][0] if smaller else None)
    source = model.gguf if quant is not None and model.gguf is not None else model.repository
    return ModelSource(model.name, source, quant)
