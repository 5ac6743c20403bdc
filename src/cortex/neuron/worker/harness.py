"""How a worker runs models: the engine's load function, named as text, and what it must give."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, LoadSpec, StepOutput


class LoadedEngine(Protocol):
    """The part of `engine.Engine` that a worker uses; its contract is in `neuron.engine`."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def submit(self, request: EngineRequest) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def isolate(self) -> bool: ...
    def prepare(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def sleep(self) -> int: ...
    def wake(self, progress: Callable[[str, int, int], None]) -> None: ...
    def close(self) -> None: ...


EngineLoader = Callable[[LoadSpec, str, Callable[[str, int, int], None], Callable[[], bool]], LoadedEngine]
"""`Engine.load`: (spec, device, progress, cancelled) -> engine."""


def resolve_loader(name: str) -> EngineLoader:
    """`module:attribute` → the loader itself, imported here and now."""
    module_name, _, attributes = name.partition(":")
    target: Any = importlib.import_module(module_name)
    for attribute in attributes.split("."):
        target = getattr(target, attribute)
    loader: EngineLoader = target
    return loader
