"""A real helper whose calls hang, crash and allocate."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from cortex.ipc.helper import Function, Helper, function_of
from cortex.ipc.pool import CallLost, HelperOfThread, HelperPool, PoolLost
from cortex.wire.errors import CortexError, InvalidValue

JOBS = str(Path(__file__).with_name("jobs"))
if JOBS not in sys.path:
    sys.path.append(JOBS)  # the pool imports from where its parent does

from pool_jobs import Done, do  # noqa: E402

from ..processes import alive, wait_end  # noqa: E402
from ..waiting import until  # noqa: E402

HELPER = Helper(name="jobs", purpose="the process of jobs", module="pool_jobs", memory_bytes=64 << 20)
DO = function_of(do)


async def until_gone(process_id: int) -> None:
    await asyncio.to_thread(wait_end, process_id)


def children_of(process_id: int) -> set[int]:
    if not alive(process_id):
        return set()
    return {int(child) for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()}


async def started_call(pool: HelperPool) -> tuple[asyncio.Task[Done], int]:
    """A call that never ends, and the new process that runs it."""
    before = children_of(pool.process_id or 0)
    task = asyncio.create_task(pool.call(DO, "never", 0, in_background=True))
    new = await until(lambda: children_of(pool.process_id or 0) - before)
    return task, new.pop()


@pytest.fixture
async def pool() -> AsyncIterator[HelperPool]:
    pool = HelperPool(HELPER)
    await pool.call(DO, "ready", 0)
    yield pool
    await pool.close()


async def test_calls_one_after_the_other_share_a_worker_and_concurrent_ones_do_not(pool: HelperPool) -> None:
    first, second = [await pool.call(DO, "", number, body=bytes(number)) for number in (1, 2)]
    assert (first.number, second.number) == (first.num_bytes, second.num_bytes) == (1, 2)
    assert first.process_id == second.process_id != pool.process_id
    replies = await asyncio.gather(*(pool.call(DO, "", number) for number in range(3)))
    assert [reply.number for reply in replies] == [0, 1, 2]
    assert len({reply.process_id for reply in replies}) == 3


async def test_error_of_a_function_is_raised_by_the_call_and_an_unexpected_one_is_internal(pool: HelperPool) -> None:
    worker = (await pool.call(DO, "", 0)).process_id
    with pytest.raises(InvalidValue, match="no such thing") as rejected:
        await pool.call(DO, "reject", 0)
    assert rejected.value.param == "x"
    with pytest.raises(CortexError, match="Internal error in the process of jobs") as failed:
        await pool.call(DO, "fail", 0)
    assert failed.value.status == 500
    assert (await pool.call(DO, "", 0)).process_id == worker, "neither ends the worker"


async def test_cancelled_call_ends_its_process_and_no_other(pool: HelperPool) -> None:
    kept, kept_id = await started_call(pool)
    cancelled, cancelled_id = await started_call(pool)
    cancelled.cancel()
    await until_gone(cancelled_id)
    assert alive(kept_id)
    assert (await pool.call(DO, "", 7)).number == 7
    kept.cancel()
    await asyncio.wait({kept, cancelled})


async def test_call_that_takes_too_long_is_ended(pool: HelperPool) -> None:
    (worker_id,) = children_of(pool.process_id or 0)
    with pytest.raises(TimeoutError):
        await pool.call(DO, "never", 0, timeout_s=0.01)
    await until_gone(worker_id)


async def test_call_in_background_yields_the_cores(pool: HelperPool) -> None:
    usual = await pool.call(DO, "", 0)
    background = await pool.call(DO, "", 0, in_background=True)
    assert os.getpriority(os.PRIO_PROCESS, background.process_id) > os.getpriority(os.PRIO_PROCESS, usual.process_id)


@pytest.mark.parametrize(("kind", "number"), [("crash", 0), ("allocate", 1 << 30)], ids=["crash", "memory"])
async def test_call_that_ends_its_worker_fails_alone(pool: HelperPool, kind: str, number: int) -> None:
    process_id = pool.process_id
    with pytest.raises(CallLost):
        await pool.call(DO, kind, number)
    assert (await pool.call(DO, "allocate", 1 << 20)).number == 1 << 20
    assert pool.process_id == process_id


async def test_running_calls_are_repeated_once_when_their_process_ends(pool: HelperPool) -> None:
    task, worker_id = await started_call(pool)
    os.kill(pool.process_id or 0, signal.SIGKILL)
    await until_gone(worker_id)
    await until(lambda: pool.process_id and children_of(pool.process_id))
    os.kill(pool.process_id or 0, signal.SIGKILL)
    with pytest.raises(PoolLost):
        await task


async def test_close_ends_running_calls(pool: HelperPool) -> None:
    task, worker_id = await started_call(pool)
    await pool.close()
    with pytest.raises(PoolLost):
        await task
    await until_gone(worker_id)


async def test_process_starts_with_the_first_call_and_again_after_a_death_or_a_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = HelperPool(HELPER)
    processes = [pool.process_id]
    for number in range(3):
        assert (await pool.call(DO, "", number)).number == number
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
        await pool.call(DO, "", 0)
    failures = [record.getMessage() for record in caplog.records if record.name == "cortex.ipc.fork_client"]
    assert len(failures) == 1, "a rest is none"
    assert failures[0].startswith("the process of jobs exited with")


def test_helper_of_a_thread_runs_calls_itself_and_ends_with_its_block() -> None:
    named: Function[bytes] = Function("name", bytes)
    prefix = os.fsdecode(b"\xff ")  # as in the path of a file
    with HelperOfThread(msgspec.structs.replace(HELPER, arguments=(prefix,)), os.environ) as helper:
        assert helper.call(named, meanwhile=lambda: None) == b"\xff helper"
        done = helper.call(DO, "", 3, meanwhile=lambda: None)
        assert (done.number, alive(done.process_id)) == (3, True)
        with pytest.raises(InvalidValue):
            helper.call(DO, "reject", 0, meanwhile=lambda: None)
        with pytest.raises(PoolLost):
            helper.call(DO, "crash", 0, meanwhile=lambda: None)
    assert not alive(done.process_id)
