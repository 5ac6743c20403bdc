"""Generations that tests play, and how tests read one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from cortex.neuron.api.inference.session import BudgetedGeneration
from cortex.neuron.engine.request import StepOutput
from cortex.neuron.node.generation import Fail, Generation, Receive
from cortex.wire.errors import CortexError


class PlayedGeneration:
    """Delivers what an iterator produces, and its exception as the failure."""

    def __init__(self, batches: AsyncIterator[list[StepOutput]]) -> None:
        self._batches = batches
        self._flows = asyncio.Event()
        self._flows.set()
        self._playing: asyncio.Task[None] | None = None
        self.cancelled = asyncio.Event()

    def follow(self, receive: Receive, fail: Fail) -> None:
        self._playing = asyncio.create_task(self._play(receive, fail))

    def pause(self) -> None:
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    queued_s = energy_j = 0.0

    def cancel(self) -> None:
        """What was produced is delivered still, as by an engine that learns of it late."""
        self.cancelled.set()

    async def _play(self, receive: Receive, fail: Fail) -> None:
        try:
            async for batch in self._batches:
                await self._flows.wait()
                receive(batch)
        except Exception as problem:  # noqa: BLE001
            fail(problem)  # type: ignore[arg-type]


class Reader:
    """What a generation delivers, to be read. Raises its failure at the end."""

    def __init__(self, generation: Generation | BudgetedGeneration | PlayedGeneration) -> None:
        self._arrived: asyncio.Queue[Sequence[StepOutput] | CortexError] = asyncio.Queue()
        self._has_ended = False
        self.cancel = generation.cancel
        generation.follow(self._arrived.put_nowait, self._arrived.put_nowait)

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> Sequence[StepOutput]:
        if self._has_ended:
            raise StopAsyncIteration
        batch = await self._arrived.get()
        if isinstance(batch, CortexError):
            raise batch
        self._has_ended = batch[-1].finish is not None
        return batch
