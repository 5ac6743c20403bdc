"""The process that workers are forked from, and what becomes of its workers."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from cortex.neuron.worker.address import DeviceAddress
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.fork_server import ForkServer
from cortex.neuron.worker.protocol import PACKET_BYTES, Ended, Exit, Fork, Notice
from cortex.neuron.worker.worker import EXIT_FAULTED
from cortex.telemetry import logs

CPU = DeviceAddress("cpu", 0)
WAIT_S = 30.0
"""How long tests wait for what must happen; only reached on failure."""


@contextlib.asynccontextmanager
async def worker_factory(engine="faulty_engine:load"):
    worker_factory = WorkerFactory(engine)
    try:
        yield worker_factory
    finally:
        await worker_factory.close()


async def born(worker_factory, device=CPU):
    """A worker and our end of its channel."""
    ours, theirs = socket.socketpair()
    with theirs:
        handle = await worker_factory.fork(device, theirs)
    async with asyncio.timeout(WAIT_S):
        while handle.process_id is None:
            await asyncio.sleep(0.01)
    return handle, ours


def alive(process_id):
    # Somebody else's zombie is dead: who inherited it may take its time to bury it.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return status(process_id, "State") != "Z"
    return False


def status(process_id, field):
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))


async def test_workers_are_forked_from_one_process_and_tell_how_they_ended():
    async with worker_factory() as made:
        (one, channel), (two, other_channel) = await born(made), await born(made)
        assert status(one.process_id, "PPid") == status(two.process_id, "PPid")
        assert os.getsid(one.process_id) == one.process_id
        frame = msgspec.msgpack.encode([Exit()])
        channel.sendall(len(frame).to_bytes(4, "little") + frame)
        assert await asyncio.wait_for(one.exited, WAIT_S) == 0
        os.kill(two.process_id, signal.SIGSEGV)
        assert await asyncio.wait_for(two.exited, WAIT_S) == -signal.SIGSEGV
        two.kill()  # too late, and harmless
    channel.close()
    other_channel.close()


async def test_a_worker_holds_no_descriptor_of_another():
    async with worker_factory() as made:
        first, first_channel = await born(made)
        second, second_channel = await born(made)
        first.kill()
        await asyncio.wait_for(first.exited, WAIT_S)
        # Were the other end still open in the second worker, this would wait for ever.
        first_channel.settimeout(WAIT_S)
        while first_channel.recv(4096):
            pass
        assert alive(second.process_id)
        second_channel.close()
        assert await asyncio.wait_for(second.exited, WAIT_S) == 0
        first_channel.close()


async def test_when_that_process_dies_its_workers_die_and_the_next_one_comes_from_a_new_one():
    async with worker_factory() as made:
        worker, channel = await born(made)
        os.kill(int(status(worker.process_id, "PPid")), signal.SIGKILL)
        assert await asyncio.wait_for(worker.exited, WAIT_S) == -signal.SIGKILL
        deadline_s = time.monotonic() + 3
        while alive(worker.process_id) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        assert not alive(worker.process_id)
        again, other_channel = await born(made)
        assert alive(again.process_id)
        channel.close()
        other_channel.close()


async def test_an_import_that_hangs_can_be_ended(tmp_path, monkeypatch):
    (tmp_path / "endless_engine.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with worker_factory("endless_engine:load") as made:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            handle = await made.fork(CPU, theirs)
            await asyncio.sleep(0.3)
            assert handle.process_id is None
            handle.kill()
            assert await asyncio.wait_for(handle.exited, WAIT_S) == -signal.SIGKILL
        await made.warm()
    # closing while it imports is quick, too


async def test_the_waiting_of_threads_is_short_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    async with worker_factory() as made:
        worker, channel = await born(made)
        assert b"GOMP_SPINCOUNT=1000" in Path(f"/proc/{worker.process_id}/environ").read_bytes()
        channel.close()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    async with worker_factory() as made:
        worker, channel = await born(made)
        assert b"GOMP_SPINCOUNT" not in Path(f"/proc/{worker.process_id}/environ").read_bytes()
        channel.close()


def test_born_to_a_daemon_that_is_gone_it_ends_before_it_imports_anything(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        (tmp_path / "marked.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "cortex.neuron.worker.fork_server"),
                *("--control", str(theirs.fileno()), "--parent", str(gone.pid), "--engine", "marked:load"),
            ],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            timeout=60,
            check=False,
        )
    assert ended.returncode == 0
    assert not (tmp_path / "imported").exists()


def test_where_no_process_can_be_made_the_order_fails_and_the_rest_goes_on(monkeypatch):
    def fork():
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", fork)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        channel, other = socket.socketpair()
        ForkServer(theirs, "faulty_engine:load")._fork(Fork(7, "cpu", 0, None), channel.detach())
        assert msgspec.msgpack.decode(ours.recv(PACKET_BYTES), type=Notice) == Ended(7, EXIT_FAULTED)
        assert other.recv(1) == b""  # its end of the channel is closed: nobody waits for it
        other.close()


def test_importing_the_engine_touches_no_device():
    # A CUDA context does not survive the fork that comes next.
    script = "import cortex.neuron.worker.torch_harness, torch; print(torch.cuda.is_initialized())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


async def test_the_process_and_its_workers_log_as_the_daemon_does(monkeypatch, capfd):
    monkeypatch.setattr(logs, "in_use", lambda: ("json", "INFO"))
    async with worker_factory("there_is_no_such_module:load") as made:
        _, channel = await born(made)
        frame = msgspec.msgpack.encode("not a command")
        channel.sendall(len(frame).to_bytes(4, "little") + frame)
        channel.settimeout(WAIT_S)
        while channel.recv(1 << 16):
            pass  # it says how it is until it ends
    lines = [msgspec.json.decode(line) for line in capfd.readouterr().err.splitlines()]
    assert any("cannot be imported" in line["message"] for line in lines)
    assert any(line.get("device") == "cpu" for line in lines), lines
