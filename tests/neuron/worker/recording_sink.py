"""A `ModelSink` for tests of every `ModelHost`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cortex.neuron.engine.request import EngineStats, FinishReason, StepOutput
from cortex.neuron.worker.faults import FaultKind

from ...waiting import WAIT_S


class RecordingSink:
    """Records everything that reaches the owner of a model."""

    def __init__(self) -> None:
        self.progress: list[tuple[str, int, int]] = []
        self.outputs: list[StepOutput] = []
        self.failed: dict[str, tuple[FaultKind, str]] = {}
        self.stats = EngineStats()
        self.lost: list[str] = []
        self.ending: list[str] = []
        self._changed = asyncio.Event()

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self.progress.append((stage, done_bytes, total_bytes))
        self._changed.set()

    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None:
        self.outputs.extend(outputs)
        self._changed.set()

    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None:
        self.failed[request_id] = (kind, message)
        self._changed.set()

    def on_ending(self, reason: str) -> None:
        self.ending.append(reason)

    def on_stats(self, stats: EngineStats) -> None:
        self.stats = stats
        self._changed.set()

    def on_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self._changed.set()

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.tokens]

    def finish(self, request_id: str) -> FinishReason | None:
        return next((o.finish for o in self.outputs if o.request_id == request_id and o.finish), None)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()
