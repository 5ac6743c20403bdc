"""Supervised tasks: restarted, counted, reported, and ended when asked."""

from __future__ import annotations

import asyncio

import pytest

from cortex.system.tasks import FAILING_AFTER, Supervisor, finish_all, run_once

from ..waiting import WAIT_S


async def test_failed_task_is_logged_counted_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    restarts: list[str] = []
    runs = 0
    second_run = asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise RuntimeError("boom")
        second_run.set()
        await asyncio.Event().wait()

    task = Supervisor(restarts.append).start("poll beast", work)
    await asyncio.wait_for(second_run.wait(), WAIT_S)
    assert restarts == ["poll beast"]
    assert "poll beast" in caplog.text
    assert "RuntimeError: boom" in caplog.text
    task.cancel()
    await task.ended()


async def test_task_that_keeps_failing_is_reported() -> None:
    restarts: list[str] = []
    enough = asyncio.Event()

    async def work() -> None:
        if len(restarts) >= FAILING_AFTER:
            enough.set()
        raise RuntimeError("boom")

    supervisor = Supervisor(restarts.append)
    task = supervisor.start("tick", work)
    assert not supervisor.failing
    await asyncio.wait_for(enough.wait(), WAIT_S)
    assert list(supervisor.failing) == ["tick"]
    task.cancel()
    await task.ended()
    assert list(supervisor.failing) == []


async def test_finish_waits_for_the_current_run() -> None:
    closing = asyncio.Event()
    steps: list[str] = []

    async def work() -> None:
        await closing.wait()
        await asyncio.sleep(0)
        steps.append("written")

    task = Supervisor().start("flush", work)
    await asyncio.sleep(0)
    closing.set()
    await task.finish()
    assert steps == ["written"]


async def test_finish_does_not_wait_for_a_back_off() -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        raise RuntimeError("boom")

    task = Supervisor().start("flush", work)
    await asyncio.sleep(0)
    await asyncio.wait_for(task.finish(), WAIT_S)
    assert runs == 1


async def test_work_that_returns_is_not_started_again() -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1

    await Supervisor().start("once", work).ended()
    assert runs == 1


async def test_failure_of_single_work_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise RuntimeError("boom")

    await asyncio.gather(run_once(work(), "import the engine"), return_exceptions=True)
    assert "background task failed: import the engine" in caplog.text
    assert "RuntimeError: boom" in caplog.text


async def test_a_failure_is_logged_and_ends_no_other_work(caplog: pytest.LogCaptureFixture) -> None:
    finished: list[str] = []

    async def fail() -> None:
        raise RuntimeError("boom")

    async def finish() -> None:
        await asyncio.sleep(0)
        finished.append("it")

    await finish_all("closing", fail(), finish())
    assert finished == ["it"]
    assert "closing failed" in caplog.text
    assert "boom" in caplog.text
