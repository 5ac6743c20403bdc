"""Tiny engines on the CPU, and host memory for their pages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.store import HostPages
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.layers.parameters import Parameters

PROMPT = tuple(index * 7 % 83 + 3 for index in range(170))
CPU = torch.device("cpu")
EngineMaker = Callable[..., Engine]


def new_host(budget_bytes: int = 64 << 20, *, verifies: bool = True) -> DeviceHostMemory:
    slabs = HostSlabs(CPU)
    return DeviceHostMemory(HostPages(slabs, budget_bytes), slabs, verifies=verifies)


def filled(seed: int) -> Callable[[Parameters], None]:
    def fill(parameters: Parameters) -> None:
        torch.manual_seed(seed)
        for binding in parameters.bindings:
            view = binding.destination
            view.uniform_(0.1, 1.0) if view.dim() == 1 else view.normal_(0.0, 2 * view.shape[-1] ** -0.5)

    return fill


def respond(
    engine: Engine, prompt: tuple[int, ...] = PROMPT, name: str = "r", max_tokens: int = 4, *, is_kept: bool = True
) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt came from the cache."""
    greedy = SamplingParams(temperature=0.0)
    engine.submit(EngineRequest(name, prompt, max_tokens, greedy, checkpoint_at=(100,), is_kept=is_kept))
    tokens: list[int] = []
    cached = 0
    while engine.has_work:
        for output in engine.step():
            tokens += output.tokens
            cached += output.cached_tokens or 0
    engine.check_integrity()
    return tokens, cached
