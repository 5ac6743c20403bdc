"""The random weights of an engine, and its response to one request."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.layers.parameters import Parameters


def filled(seed: int) -> Callable[[Parameters], None]:
    """Makes what fills a model with random weights."""

    def fill(parameters: Parameters) -> None:
        torch.manual_seed(seed)
        for binding in parameters.bindings:
            view = binding.destination
            view.uniform_(0.1, 1.0) if view.dim() == 1 else view.normal_(0.0, 2 * view.shape[-1] ** -0.5)

    return fill


def response_to(engine: Engine, request: EngineRequest) -> tuple[list[int], int]:
    """The tokens of a response, and how many of the prompt came from the cache."""
    engine.submit(request)
    tokens: list[int] = []
    cached = 0
    while engine.has_work:
        for output in engine.step():
            tokens += output.tokens
            cached += output.cached_tokens or 0
    engine.check_integrity()
    return tokens, cached
