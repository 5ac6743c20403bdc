"""The fork server and its workers, as real processes."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from cortex.ipc.channel import encode_frame
from cortex.ipc.fork_client import Worker
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.protocol import DeviceAddress, Exit
from cortex.telemetry import logs

from ...waiting import WAIT_S, until

CPU = DeviceAddress("cpu", 0)


@contextlib.asynccontextmanager
async def worker_factory(engine: str = "faulty_engine:load") -> AsyncIterator[WorkerFactory]:
    worker_factory = WorkerFactory(engine)
    try:
        yield worker_factory
    finally:
        await worker_factory.close()


async def forked(worker_factory: WorkerFactory, device: DeviceAddress = CPU) -> tuple[Worker, socket.socket]:
    """A worker and this side's end of its channel."""
    ours, theirs = socket.socketpair()
    with theirs:
        handle = await worker_factory.fork(device, theirs)
    await until(lambda: handle.process_id)
    return handle, ours


def process_of(handle: Worker) -> int:
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
