"""A real pool of processes whose jobs hang, crash and allocate."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cortex.ipc.pool import JobLost, PoolLost, RestartedPool, WorkerPool
from cortex.ipc.start import start_child

JOBS = str(Path(__file__).with_name("jobs"))
if JOBS not in sys.path:
    sys.path.append(JOBS)  # the pool imports from where its parent does

from pool_jobs import Done, Job  # noqa: E402

from ..waiting import WAIT_S  # noqa: E402

Pool = WorkerPool[Done]


def is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_gone(process_id: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while is_alive(process_id):
            await asyncio.sleep(0.01)


def children_of(process_id: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()}


async def started_job(pool: Pool) -> tuple[asyncio.Task[Done], int]:
    """A job that never ends, and the new process that runs it."""
    before = children_of(pool.process_id)
    task = asyncio.create_task(pool.run(Job("never"), in_background=True))
    async with asyncio.timeout(WAIT_S):
        while not (new := children_of(pool.process_id) - before):
            await asyncio.sleep(0.01)
    return task, new.pop()


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    pool: Pool = await WorkerPool.start("pool_jobs", reply_type=Done)
    await pool.run(Job("ready"))
    yield pool
    await pool.stop()


async def test_jobs_one_after_the_other_share_a_worker_and_concurrent_ones_do_not(pool: Pool) -> None:
    first, second = [await pool.run(Job("", number)) for number in (1, 2)]
    assert (first.number, second.number) == (1, 2)
    assert first.process_id == second.process_id != pool.process_id
    replies = await asyncio.gather(*(pool.run(Job("", number)) for number in range(3)))
    assert [reply.number for reply in replies] == [0, 1, 2]
    assert len({reply.process_id for reply in replies}) == 3


async def test_cancelled_job_ends_its_process_and_no_other(pool: Pool) -> None:
    kept, kept_id = await started_job(pool)
    cancelled, cancelled_id = await started_job(pool)
    cancelled.cancel()
    await until_gone(cancelled_id)
    assert is_alive(kept_id)
    assert (await pool.run(Job("", 7))).number == 7
    kept.cancel()
    await asyncio.wait({kept, cancelled})


async def test_job_in_background_yields_the_cores(pool: Pool) -> None:
    usual = await pool.run(Job(""))
    background = await pool.run(Job(""), in_background=True)
    assert os.getpriority(os.PRIO_PROCESS, background.process_id) > os.getpriority(os.PRIO_PROCESS, usual.process_id)


@pytest.mark.parametrize("job", [Job("crash"), Job("allocate", 1 << 30)], ids=["crash", "memory"])
async def test_job_that_ends_its_worker_fails_alone(pool: Pool, job: Job) -> None:
    with pytest.raises(JobLost):
        await pool.run(job)
    assert not pool.has_ended
    assert (await pool.run(Job("allocate", 1 << 20))).number == 1 << 20


async def test_running_jobs_are_lost_with_the_pool_and_leave_no_process(pool: Pool) -> None:
    task, worker_id = await started_job(pool)
    os.kill(pool.process_id, signal.SIGKILL)
    with pytest.raises(PoolLost):
        await task
    assert pool.has_ended
    await until_gone(worker_id)
    with pytest.raises(PoolLost):
        await pool.run(Job(""))


async def test_stop_ends_running_jobs(pool: Pool) -> None:
    task, worker_id = await started_job(pool)
    await pool.stop()
    with pytest.raises(PoolLost):
        await task
    await until_gone(worker_id)


async def test_pool_that_reads_slowly_is_not_lost() -> None:
    process, control = await start_child("pool_jobs")
    control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # a few messages fill it
    pool: Pool = WorkerPool(process, control, Done)
    await pool.run(Job("ready"))
    os.kill(pool.process_id, signal.SIGSTOP)
    cancelled = [asyncio.create_task(pool.run(Job("never"))) for _ in range(8)]
    jobs = [asyncio.create_task(pool.run(Job("ready"))) for _ in range(4)]
    await asyncio.sleep(0.05)
    for task in cancelled:
        task.cancel()
    await asyncio.wait(cancelled)
    os.kill(pool.process_id, signal.SIGCONT)
    assert all(task.cancelled() for task in cancelled)
    async with asyncio.timeout(WAIT_S):
        assert len(await asyncio.gather(*jobs)) == 4
    assert not pool.has_ended
    await pool.stop()


async def test_restarted_pool_starts_with_the_first_job_and_again_after_a_death_or_a_rest() -> None:
    pool: RestartedPool[Done] = RestartedPool("jobs", lambda: WorkerPool.start("pool_jobs", reply_type=Done))
    processes = [pool.process_id]
    for number in range(3):
        assert (await pool.run(Job("", number))).number == number
        processes.append(pool.process_id)
        if number == 0:
            os.kill(processes[-1] or 0, signal.SIGKILL)
            await until_gone(processes[-1] or 0)
        else:
            await pool.rest()
            processes.append(pool.process_id)
    first, second, third = [process for process in processes if process is not None]
    assert processes == [None, first, second, None, third, None]
    assert len({first, second, third}) == 3
    await pool.close()
    with pytest.raises(PoolLost, match="closed"):
        await pool.run(Job(""))
