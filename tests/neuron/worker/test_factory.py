"""The fork server and its workers, as real processes."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from cortex.ipc.channel import PacketSocket, encode_frame
from cortex.neuron.worker.factory import WorkerFactory, WorkerHandle
from cortex.neuron.worker.program.fork_server import ForkServer
from cortex.neuron.worker.program.worker import EXIT_FAULTED
from cortex.neuron.worker.protocol import DeviceAddress, Exit, Exited, ForkServerEvent, ForkWorker, Warm
from cortex.telemetry import logs

from ...processes import alive
from ...waiting import WAIT_S, until

CPU = DeviceAddress("cpu", 0)


@contextlib.asynccontextmanager
async def worker_factory(engine: str = "faulty_engine:load") -> AsyncIterator[WorkerFactory]:
    worker_factory = WorkerFactory(engine)
    try:
        yield worker_factory
    finally:
        await worker_factory.close()


async def forked(worker_factory: WorkerFactory, device: DeviceAddress = CPU) -> tuple[WorkerHandle, socket.socket]:
    """A worker and this side's end of its channel."""
    ours, theirs = socket.socketpair()
    with theirs:
        handle = await worker_factory.fork(device, theirs)
    await until(lambda: handle.process_id)
    return handle, ours


def process_of(handle: WorkerHandle) -> int:
    assert handle.process_id is not None
    return handle.process_id


def status(process_id: int, field: str) -> str:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))


async def test_workers_come_from_one_process_and_report_their_exit() -> None:
    async with worker_factory() as made:
        (one, channel), (two, other_channel) = await forked(made), await forked(made)
        assert status(process_of(one), "PPid") == status(process_of(two), "PPid")
        await until(lambda: os.getsid(process_of(one)) == one.process_id)  # the fork is reported before it has begun
        channel.sendall(encode_frame([Exit()]))
        assert await asyncio.wait_for(one.exited, WAIT_S) == 0
        os.kill(process_of(two), signal.SIGSEGV)
        assert await asyncio.wait_for(two.exited, WAIT_S) == -signal.SIGSEGV
        two.kill()  # too late, and ignored
    channel.close()
    other_channel.close()


async def test_worker_holds_no_descriptor_of_another_worker() -> None:
    async with worker_factory() as made:
        first, first_channel = await forked(made)
        second, second_channel = await forked(made)
        first.kill()
        await asyncio.wait_for(first.exited, WAIT_S)
        # If the second worker held the other end open, this would time out.
        first_channel.settimeout(WAIT_S)
        while first_channel.recv(4096):
            pass
        assert alive(process_of(second))
        second_channel.close()
        assert await asyncio.wait_for(second.exited, WAIT_S) == 0
        first_channel.close()


async def test_workers_die_with_the_fork_server_which_is_replaced() -> None:
    async with worker_factory() as made:
        worker, channel = await forked(made)
        os.kill(int(status(process_of(worker), "PPid")), signal.SIGKILL)
        assert await asyncio.wait_for(worker.exited, WAIT_S) == -signal.SIGKILL
        await until(lambda: not alive(process_of(worker)))
        again, other_channel = await forked(made)
        assert alive(process_of(again))
        channel.close()
        other_channel.close()


async def test_kills_a_fork_server_whose_import_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importing = tmp_path / "importing"
    (tmp_path / "endless_engine.py").write_text(f"import time\nopen({str(importing)!r}, 'w')\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with worker_factory("endless_engine:load") as made:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            handle = await made.fork(CPU, theirs)
            await until(importing.exists)
            assert handle.process_id is None
            handle.kill()
            assert await asyncio.wait_for(handle.exited, WAIT_S) == -signal.SIGKILL
        await made.warm()
    # closing does not wait for the import either


async def test_libraries_of_workers_spin_briefly_and_write_no_profiles_unless_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "ONEDNN_JIT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    async with worker_factory() as made:
        worker, channel = await forked(made)
        environment = Path(f"/proc/{worker.process_id}/environ").read_bytes().split(b"\0")
        assert {b"GOMP_SPINCOUNT=1000", b"ONEDNN_JIT_PROFILE=0"} <= set(environment)
        channel.close()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("ONEDNN_JIT_PROFILE", "1")
    async with worker_factory() as made:
        worker, channel = await forked(made)
        environment = Path(f"/proc/{worker.process_id}/environ").read_bytes().split(b"\0")
        assert b"ONEDNN_JIT_PROFILE=1" in environment
        assert not any(variable.startswith(b"GOMP_SPINCOUNT") for variable in environment)
        channel.close()


def test_fork_server_without_its_daemon_exits_before_it_imports(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        (tmp_path / "marked.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "cortex.neuron.worker.program.fork_server"),
                *("--control", str(theirs.fileno()), "--parent", str(gone.pid), "--engine", "marked:load"),
            ],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            timeout=WAIT_S,
            check=False,
        )
    assert ended.returncode == 0
    assert not (tmp_path / "imported").exists()


def test_failed_fork_is_reported_and_the_fork_server_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", fork)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    daemon: PacketSocket[ForkServerEvent] = PacketSocket(ours, ForkServerEvent)
    with ours, theirs:
        channel, other = socket.socketpair()
        with channel:
            daemon.send(ForkWorker(7, CPU), channel.fileno())
        ours.shutdown(socket.SHUT_WR)
        ForkServer(theirs, "faulty_engine:load").run()
        assert daemon.receive() == (Warm(), None)
        assert daemon.receive() == (Exited(7, EXIT_FAULTED), None)
        assert other.recv(1) == b""  # the fork server has closed the worker's end
        other.close()


@pytest.mark.gpu
def test_importing_the_engine_initialises_no_device() -> None:
    # A CUDA context does not survive a fork.
    script = "import cortex.neuron.engine.engine, torch; print(torch.cuda.is_initialized())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


async def test_fork_server_and_workers_log_in_the_daemons_format(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "in_use", lambda: ("json", "INFO"))
    async with worker_factory("there_is_no_such_module:load") as made:
        _, channel = await forked(made)
        channel.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):  # the worker ends by itself, with or without this
            channel.sendall(b"\x01\x00\x00\x00\xc1")  # not a command
            while channel.recv(1 << 16):
                pass  # heartbeats, until the worker ends
    lines = [msgspec.json.decode(line) for line in capfd.readouterr().err.splitlines()]
    assert any("cannot be imported" in line["message"] for line in lines)
    assert any(line.get("device") == "cpu" for line in lines), lines
