"""Places for the text work of one model: templates, tokenising, grammars.

Each piece of work has a worker process, so there are few places, given out as fairly as those of the engine. Long texts
and large grammars have places of their own: they never delay short ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cortex.neuron.node.admission import Admission, QueuedRequest, QueueFull
from cortex.wire.errors import Overloaded
from cortex.wire.words import duration


class TextQueue:
    """Belongs to one loop."""

    def __init__(self, model_id: str, num_workers: int, max_queue: int) -> None:
        self._model_id = model_id
        self._short = Admission(num_workers, max_queue)
        self._long = Admission(max(1, num_workers // 2), max_queue)

    @property
    def num_jobs(self) -> int:
        """Jobs that run or wait."""
        return sum(lane.running + lane.waiting for lane in (self._short, self._long))

    @asynccontextmanager
    async def place(self, principal: str, *, is_long: bool) -> AsyncIterator[None]:
        """Waits for a place and holds it. Raises Overloaded when too many wait."""
        lane = self._long if is_long else self._short
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def start() -> None:
            if not started.done():
                started.set_result(None)

        def reject(retry_after_s: float) -> None:
            if not started.done():
                started.set_exception(self._overloaded(lane.waiting, retry_after_s))

        queued = QueuedRequest(principal, 0, start, reject)
        has_finished = False
        try:
            lane.enter(queued, time.monotonic())
            await started
            yield
            has_finished = True
        except QueueFull as full:
            raise self._overloaded(full.waiting, full.retry_after_s) from full
        finally:
            lane.release(queued, time.monotonic(), finished=has_finished)

    def _overloaded(self, num_waiting: int, retry_after_s: float) -> Overloaded:
        return Overloaded(
            f"{self._model_id} is busy: {num_waiting} prompts are waiting to be tokenised; "
            f"try again in {duration(retry_after_s)}",
            retry_after_s=retry_after_s,
        )
