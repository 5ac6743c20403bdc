"""What the HTTP API needs of a node. `neuron.node.node.Node` is the real one; tests use others to inject faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from cortex.neuron.engine.request import EngineRequest, EngineStats, StepOutput
from cortex.neuron.text.model import TextModel
from cortex.wire.node import Discovery, Health, LoadRequest, ModelStatus, NodeEvent, UnloadRequest


class GenerationStream(Protocol):
    """One sequence's outputs. `cancel` may be called at any time and repeatedly."""

    def __aiter__(self) -> AsyncIterator[list[StepOutput]]: ...

    def cancel(self) -> None: ...


class Backend(Protocol):
    """Reads never wait for a device. All errors are CortexErrors."""

    @property
    def discovery(self) -> Discovery: ...

    def health(self) -> Health: ...

    def models(self) -> tuple[ModelStatus, ...]: ...

    def model(self, model_id: str) -> ModelStatus: ...

    def engine_stats(self) -> dict[str, EngineStats]: ...

    def task_restarts(self) -> Mapping[str, int]: ...

    async def load(self, request: LoadRequest, *, wait: bool) -> ModelStatus: ...

    async def unload(self, request: UnloadRequest) -> ModelStatus: ...

    async def recycle(self, device: int) -> bool: ...

    def subscribe(self) -> AsyncIterator[NodeEvent]: ...

    async def text(self, model_id: str) -> TextModel: ...

    def submit(self, model_id: str, request: EngineRequest) -> GenerationStream: ...
