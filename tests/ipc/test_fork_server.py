"""A real fork server and its workers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from cortex.ipc.channel import PacketSocket
from cortex.ipc.fork_client import MODULE, ForkServer, ForkServerProcess, Program, Worker
from cortex.ipc.fork_server import Fork, Forked
from cortex.ipc.start import start_child

from ..processes import alive, wait_end
from ..waiting import WAIT_S, until

JOBS = str(Path(__file__).with_name("jobs"))
if JOBS not in sys.path:
    sys.path.append(JOBS)  # a fork server imports from where its parent does

from fork_jobs import Begun  # noqa: E402


def program(argument: str = "", *, is_killed_unready: bool = False) -> Program:
    return Program("the fork server of jobs", "fork_jobs", argument, {}, is_killed_unready)


@contextlib.asynccontextmanager
async def fork_server(argument: str = "", *, is_killed_unready: bool = False) -> AsyncIterator[ForkServer]:
    started = ForkServer(lambda: program(argument, is_killed_unready=is_killed_unready))
    try:
        yield started
    finally:
        await started.close()


@pytest.fixture
async def server() -> AsyncIterator[ForkServer]:
    async with fork_server() as started:
        yield started


async def forked(process: ForkServerProcess, argument: bytes = b"") -> tuple[Worker, socket.socket]:
    """A worker that waits to be forked, and this side's end of its connection."""
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    with theirs:
        return process.fork(theirs, argument), ours


async def begun(server: ForkServer, argument: bytes = b"") -> tuple[Worker, socket.socket, Begun]:
    worker, connection = await forked(await server.start(), argument)
    state = msgspec.json.decode(await asyncio.to_thread(connection.recv, 1 << 16), type=Begun)
    await until(lambda: worker.process_id)
    return worker, connection, state


async def ended(worker: Worker) -> int:
    return await asyncio.wait_for(worker.exited, WAIT_S)


def process_of(worker: Worker) -> int:
    assert worker.process_id is not None
    return worker.process_id


async def until_gone(process_id: int) -> None:
    await asyncio.to_thread(wait_end, process_id)


async def test_workers_of_one_process_report_their_exit_and_are_reaped(server: ForkServer) -> None:
    workers = [await begun(server, str(number).encode()) for number in range(4)]
    (one, first, state), (two, second, _), (three, third, _), (four, fourth, _) = workers
    assert state.argument == b"0"
    first.sendall(b"3")
    second.sendall(b"fail")
    third.close()
    os.kill(process_of(four), signal.SIGSEGV)
    assert [await ended(each) for each in (one, two, three, four)] == [3, os.EX_SOFTWARE, 0, -signal.SIGSEGV]
    assert not any(Path(f"/proc/{each.process_id}").exists() for each in (one, two, three, four))
    four.kill()  # too late, and ignored
    assert server.process_id == (await server.start()).process_id
    for connection in (first, second, fourth):
        connection.close()


async def test_fork_server_has_one_thread_and_workers_hold_nothing_of_it_or_of_each_other(server: ForkServer) -> None:
    _, first_connection, first = await begun(server)
    two, second_connection, second = await begun(server)
    assert first.num_descriptors == second.num_descriptors == 4  # three standard ones, and the connection
    assert first.num_threads_of_server == 1
    assert first.is_reaping_usual
    two.kill()
    assert await ended(two) == -signal.SIGKILL
    assert second_connection.recv(1) == b""  # would time out if another process held its other end
    first_connection.close()
    second_connection.close()


async def test_workers_die_with_their_fork_server_which_is_replaced(
    server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    worker, connection, _ = await begun(server)
    killed = server.process_id
    os.kill(killed or 0, signal.SIGKILL)
    assert await ended(worker) == -signal.SIGKILL
    await until_gone(process_of(worker))
    assert "the fork server of jobs exited with -9; lost 1 worker" in caplog.text
    again, other_connection, _ = await begun(server)
    assert alive(process_of(again))
    assert server.process_id != killed
    connection.close()
    other_connection.close()


async def test_signals_that_stop_all_processes_at_once_are_left_to_the_parent(server: ForkServer) -> None:
    worker, connection, _ = await begun(server)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for process_id in (server.process_id or 0, process_of(worker)):
            os.kill(process_id, number)
    connection.sendall(b"3")
    assert await ended(worker) == 3
    assert not (await server.start()).has_ended
    connection.close()


async def test_worker_that_waits_for_a_fork_server_that_fails_ends_as_it_did() -> None:
    async with fork_server("exit") as server:
        worker, connection = await forked(await server.start())
        assert await ended(worker) == 7
        assert worker.process_id is None
        connection.close()


@pytest.mark.parametrize("is_killed_unready", [True, False])
async def test_worker_that_is_killed_before_its_fork_server_is_ready(tmp_path: Path, is_killed_unready: bool) -> None:
    hanging = tmp_path / "hanging"
    async with fork_server(f"hang {hanging}", is_killed_unready=is_killed_unready) as server:
        process = await server.start()
        worker, connection = await forked(process)
        await until(hanging.exists)
        worker.kill()
        if is_killed_unready:
            assert await ended(worker) == -signal.SIGKILL
            assert process.has_ended
        else:
            later = await asyncio.create_subprocess_exec("true")
            await asyncio.wait_for(later.wait(), WAIT_S)
            assert not process.has_ended, "others may be waiting for it"
    assert await ended(worker) == -signal.SIGKILL
    connection.close()


async def test_failed_fork_is_reported_and_the_fork_server_continues() -> None:
    async with fork_server("reject") as server:
        worker, connection = await forked(await server.start())
        assert await ended(worker) == os.EX_OSERR
        assert connection.recv(1) == b""  # the fork server has closed the worker's end
        _, other_connection, _ = await begun(server)
        connection.close()
        other_connection.close()


async def test_fork_server_that_reads_slowly_gets_all_messages() -> None:
    started, control = await start_child(MODULE, *program().arguments())
    control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # a few messages fill it
    process = ForkServerProcess(started, control, program())
    first, connection = await forked(process)
    connection.recv(1)
    os.kill(process.process_id, signal.SIGSTOP)
    killed, kept = [await forked(process) for _ in range(8)], [await forked(process) for _ in range(4)]
    for worker, _ in killed:
        worker.kill()
    os.kill(process.process_id, signal.SIGCONT)
    assert {await ended(worker) for worker, _ in killed} == {-signal.SIGKILL}
    await until(lambda: all(worker.process_id for worker, _ in kept))
    assert not process.has_ended
    assert all(alive(process_of(worker)) for worker, _ in [*kept, (first, connection)])
    await process.stop()
    for _, each in [*killed, *kept, (first, connection)]:
        each.close()


async def test_fork_server_that_cannot_be_reached_is_killed_so_that_nobody_waits_for_it(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, connection, _ = await begun(server)
    process = await server.start()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOBUFS, "no memory for the message")

    monkeypatch.setattr(PacketSocket, "send", fail)
    with pytest.raises(ConnectionError):
        await forked(process)
    assert await ended(worker) == -signal.SIGKILL
    connection.close()


async def test_closed_fork_server_ends_its_workers_and_starts_no_more(
    server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    worker, connection, _ = await begun(server)
    process = await server.start()
    await server.close()
    assert await ended(worker) == -signal.SIGKILL
    await until_gone(process_of(worker))
    with pytest.raises(ConnectionError, match="closed"):
        await server.start()
    with pytest.raises(ConnectionError), connection:
        process.fork(connection)
    assert not caplog.records, "it was asked to end"


def test_fork_server_and_workers_are_killed_with_their_parent() -> None:
    script = textwrap.dedent("""
        import asyncio, socket
        from cortex.ipc.fork_client import ForkServer, Program

        async def main():
            server = await ForkServer(lambda: Program("", "fork_jobs", "", {})).start()
            pairs = [socket.socketpair() for _ in range(2)]
            workers = [server.fork(theirs) for _, theirs in pairs]
            while not all(worker.process_id for worker in workers):
                await asyncio.sleep(0.01)
            print(server.process_id, *(worker.process_id for worker in workers), flush=True)
            await asyncio.sleep(3600)

        asyncio.run(main())
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    with parent:
        assert parent.stdout is not None
        processes = [int(each) for each in parent.stdout.readline().split()]
        assert len(processes) == 3
        assert all(map(alive, processes))
        parent.kill()
    for each in processes:
        wait_end(each)


async def test_fork_server_whose_parent_closes_without_reading_ends_silently(capfd: pytest.CaptureFixture[str]) -> None:
    started, control = await start_child(MODULE, *program().arguments())
    with control:
        commands: PacketSocket[Forked] = PacketSocket(control, Forked)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            commands.send(Fork(1, b""), theirs.fileno())
            assert await asyncio.to_thread(ours.recv, 1 << 16)
    assert await asyncio.wait_for(started.wait(), WAIT_S) == 0
    assert capfd.readouterr().err == ""


def test_fork_server_without_its_parent_exits_before_it_prepares(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        (tmp_path / "marked.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
        exited = subprocess.run(
            [
                *(sys.executable, "-m", MODULE, "--control", str(theirs.fileno()), "--parent", str(gone.pid)),
                *("--program", "marked", "--argument", ""),
            ],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            timeout=WAIT_S,
            check=False,
        )
    assert exited.returncode == 0
    assert not (tmp_path / "imported").exists()
