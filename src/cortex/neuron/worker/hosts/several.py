"""Shared by hosts that combine others: loads, sleeps and wakes several as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelPart, ModelSink, SleepRejected
from cortex.neuron.worker.process import WorkerLost

log = logging.getLogger(__name__)


async def load_all(
    parts: Sequence[tuple[ModelPart, ModelSink]], lost: asyncio.Future[str], give_up: Callable[[], None]
) -> None:
    """Loads all parts concurrently, each with its sink. If one fails, `lost` has the reason of a lost part, or this is
    cancelled, `give_up` is called and the other loads end; the caller frees loaded parts. Raises the cause:
    LoadRejected or WorkerLost."""
    loads = [asyncio.create_task(part.load(sink)) for part, sink in parts]
    pending: set[asyncio.Future[Any]] = set(loads)
    try:
        while pending:
            done, pending = await asyncio.wait({*pending, lost}, return_when=asyncio.FIRST_COMPLETED)
            pending.discard(lost)
            if lost.done():
                raise WorkerLost(f"a part of the model was lost while the others were loaded: {lost.result()}")
            for load in done:
                load.result()
    except BaseException as error:
        give_up()
        await uncancelled(_end(loads))
        if _is_consequence(error):
            for load in loads:
                if not load.cancelled() and (cause := load.exception()) is not None and not _is_consequence(cause):
                    raise cause from None
        raise


def _is_consequence(error: BaseException) -> bool:
    """Whether the part was not loaded because another one failed."""
    return isinstance(error, LoadRejected) and error.cancelled


async def _end(loads: Sequence[asyncio.Task[Any]]) -> None:
    for load in loads:
        load.cancel()
    await asyncio.wait(loads)


async def unload_all(parts: Iterable[ModelPart]) -> Reclaimed:
    """Frees what is left of each, whatever becomes of the others."""
    freed = await asyncio.gather(*(part.unload() for part in parts), return_exceptions=True)
    for problem in freed:
        if isinstance(problem, BaseException):
            log.error("a part of a model could not be freed: %s", problem, exc_info=problem)
    return Reclaimed.total([each for each in freed if isinstance(each, Reclaimed)])


async def wake_all(parts: Sequence[ModelPart]) -> None:
    """Wakes one after another. Raises LoadRejected (all are asleep as before), Damaged (nothing of any is left) or
    WorkerLost."""
    woken: list[ModelPart] = []
    try:
        for part in parts:
            await part.wake()
            woken.append(part)
    except LoadRejected:
        try:
            for part in woken:
                await part.sleep()
        except SleepRejected as error:
            await unload_all(parts)
            message = f"the model was unloaded: a part of it that woke cannot be put to sleep again: {error}"
            raise Damaged(message) from error
        raise
    except Damaged:
        await unload_all(parts)
        raise


async def uncancelled(work: Coroutine[Any, Any, object]) -> None:
    """Runs `work` to its end, also when this is cancelled."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
