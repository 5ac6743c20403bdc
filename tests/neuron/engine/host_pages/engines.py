"""Tiny engines on the CPU, and host memory for their pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.disk import DiskPages
from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.store import HostPages
from cortex.neuron.engine.request import EngineRequest, SamplingParams

from ...engine_runs import response_to

PROMPT = tuple(index * 7 % 83 + 3 for index in range(170))
CPU = torch.device("cpu")
EngineMaker = Callable[..., Engine]


ANY_TIME = 1e9
"""A tiny model computes faster than any disk: reading is worth so many times the computing time."""


def new_host(
    budget_bytes: int = 64 << 20,
    *,
    verifies: bool = True,
    folder: Path | None = None,
    disk_bytes: int = 64 << 20,
    worth: float = ANY_TIME,
) -> DeviceHostMemory:
    """`folder`: of the blocks on disk; None: there is no such tier."""
    slabs = HostSlabs(CPU)
    disk = None if folder is None else DiskPages(folder, disk_bytes, CPU, worth=worth)
    return DeviceHostMemory(HostPages(slabs, budget_bytes), slabs, verifies=verifies, disk=disk)


def respond(
    engine: Engine,
    prompt: tuple[int, ...] = PROMPT,
    name: str = "r",
    max_tokens: int = 4,
    *,
    uses_prefix_cache: bool = True,
    tenant: bytes = b"",
) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt came from the cache."""
    request = EngineRequest(
        name,
        prompt,
        max_tokens,
        SamplingParams(temperature=0.0),
        checkpoint_at=(100,),
        uses_prefix_cache=uses_prefix_cache,
        tenant=tenant,
    )
    return response_to(engine, request)
