"""What the HTTP API needs of a node. `neuron.node.node.Node` is the real one; tests use others to inject faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from cortex.neuron.engine.request import EngineRequest, EngineStats, StepOutput
from cortex.neuron.node.spanning.protocol import Connection
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared
from cortex.wire.node import (
    DeletedFiles,
    Discovery,
    FilesRequest,
    Health,
    HubRepository,
    LoadRequest,
    ModelStatus,
    NodeEvent,
    PullStatus,
    UnloadRequest,
)
from cortex.wire.packed_request import PackedRequest


class GenerationStream(Protocol):
    """One sequence's outputs. `cancel` may be called at any time and repeatedly."""

    def __aiter__(self) -> AsyncIterator[list[StepOutput]]: ...

    def cancel(self) -> None: ...


class Files(Protocol):
    """Downloads without a load, deletion, and what the hub offers."""

    def pull(self, request: FilesRequest) -> PullStatus: ...

    def pull_status(self, model_id: str) -> PullStatus: ...

    async def cancel(self, model_id: str) -> PullStatus: ...

    async def delete(self, request: FilesRequest) -> DeletedFiles: ...

    async def offer(self, source: str) -> HubRepository: ...


class Prompts(Protocol):
    """The text of requests, and of models that need not be loaded."""

    async def text(self, model_id: str) -> TextModel: ...

    async def prepare(self, request: PackedRequest, *, principal: str, in_context: bool = True) -> Prepared: ...

    async def count_tokens(self, request: PackedRequest, *, principal: str) -> int: ...

    async def encode(self, model_id: str, text: str, *, principal: str) -> tuple[int, ...]: ...


class Backend(Protocol):
    """Reads never wait for a device. All errors are CortexErrors. Cancelling a call ends what it has started, except a
    load."""

    @property
    def discovery(self) -> Discovery: ...

    @property
    def files(self) -> Files: ...

    @property
    def prompts(self) -> Prompts: ...

    def health(self) -> Health: ...

    def models(self) -> tuple[ModelStatus, ...]: ...

    def model(self, model_id: str) -> ModelStatus: ...

    def engine_stats(self) -> dict[str, EngineStats]: ...

    def task_restarts(self) -> Mapping[str, int]: ...

    async def load(self, request: LoadRequest, *, wait: bool) -> ModelStatus: ...

    async def unload(self, request: UnloadRequest) -> ModelStatus: ...

    async def recycle(self, device: int) -> bool: ...

    async def host_share(self, connection: Connection) -> None: ...

    def subscribe(self) -> AsyncIterator[NodeEvent]: ...

    def submit(self, model_id: str, request: EngineRequest) -> GenerationStream: ...
