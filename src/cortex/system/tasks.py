"""Background tasks that do not die silently, and threads for what takes long.

A long-running task that fails is logged, counted and started again with a back-off. One that keeps failing is reported,
so that health checks can show it. Work that runs once is logged when it fails.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
SETTLED_S = 60.0
"""A run of this length ends a series of failures."""
FAILING_AFTER = 3
"""Failures in a series from which on a task counts as failing."""

Work = Callable[[], Coroutine[Any, Any, None]]


class SupervisedTask:
    """One long-running task, made by `Supervisor.start`. It ends when its work returns, or by `cancel` or `finish`."""

    def __init__(self, name: str, work: Work, on_restart: Callable[[str], None]) -> None:
        self.name = name
        self._work = work
        self._on_restart = on_restart
        self._num_failures = 0
        """In the current series."""
        self._began_at = time.monotonic()
        self._finishing = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=name)

    @property
    def is_failing(self) -> bool:
        """Whether it has failed several times in a row and has not run for long since."""
        recovered = time.monotonic() - self._began_at >= SETTLED_S
        return not self._task.done() and self._num_failures >= FAILING_AFTER and not recovered

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    def cancel(self) -> None:
        """End it at its next step."""
        self._task.cancel()

    async def ended(self) -> None:
        """Wait until it has ended. Never raises what the work raised."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def finish(self) -> None:
        """Wait until the current run has ended, without another one. A task in its back-off ends at once."""
        self._finishing.set()
        await self.ended()

    async def _run(self) -> None:
        while True:
            self._began_at = time.monotonic()
            try:
                await self._work()
            except Exception:
                log.exception("background task failed: %s", self.name)
            else:
                return
            settled = time.monotonic() - self._began_at >= SETTLED_S
            self._num_failures = 1 if settled else self._num_failures + 1
            delay_s = min(FIRST_DELAY_S * 2.0 ** min(self._num_failures - 1, 16), MAX_DELAY_S)
            self._began_at = time.monotonic() + delay_s
            try:
                async with asyncio.timeout(delay_s):
                    await self._finishing.wait()
            except TimeoutError:
                self._on_restart(self.name)
            else:
                return


class Supervisor:
    """The long-running tasks of one process. Belongs to one event loop."""

    def __init__(self, on_restart: Callable[[str], None] | None = None) -> None:
        """`on_restart` gets the name of every task that starts again after a failure; it must not raise."""
        self._on_restart = on_restart
        self._tasks: list[SupervisedTask] = []
        self.restarts: dict[str, int] = {}
        """How often each task was started again, by name."""

    def start(self, name: str, work: Work) -> SupervisedTask:
        """Run `work()`, again after every failure, until it returns. The caller ends the task."""
        self._tasks = [task for task in self._tasks if not task.has_ended]
        task = SupervisedTask(name, work, self._restarted)
        self._tasks.append(task)
        return task

    def every(self, interval_s: float, name: str, call: Work) -> SupervisedTask:
        """A task that calls `call()` again and again, `interval_s` after its start and after each call."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(interval_s)
                await call()

        return self.start(name, repeat)

    def _restarted(self, name: str) -> None:
        self.restarts[name] = self.restarts.get(name, 0) + 1
        if self._on_restart is not None:
            self._on_restart(name)

    @property
    def failing(self) -> tuple[str, ...]:
        """The names of tasks that keep failing."""
        return tuple(task.name for task in self._tasks if task.is_failing)


class OwnedTasks:
    """Tasks that run once and end with their owner. Their work handles its own errors. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Returns when all have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cancel(self) -> None:
        """End all of them at their next step, and wait for that."""
        for task in self._tasks:
            task.cancel()
        await self.finish()


def run_once(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task for work that runs once. A failure is logged as soon as it happens."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def in_own_thread(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """As `asyncio.to_thread`, for what may take minutes, and begins at once: the few threads of `to_thread` are left to
    short calls. Cancelling it does not end the thread."""
    threads = ThreadPoolExecutor(1, "long")
    call = contextvars.copy_context().run
    running = asyncio.get_running_loop().run_in_executor(threads, call, function, *arguments)
    threads.shutdown(wait=False)
    return running


async def finish_all(what: str, *work: Coroutine[Any, Any, object]) -> None:
    """Runs all of it at once, to the end. A failure is logged and ends none of the others."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            log.error("%s failed", what, exc_info=outcome)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (problem := task.exception()) is not None:
        log.error("background task failed: %s", task.get_name(), exc_info=problem)
