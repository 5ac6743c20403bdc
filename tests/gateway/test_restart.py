"""A gateway is replaced while clients use it: no connection is rejected, and its activity is kept."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.system.exits import ExitCode
from cortex.wire.node.protocol import ModelState

from ..ports import free_port
from ..waiting import WAIT_S, until
from .fake_neuron import GB

if TYPE_CHECKING:
    from .fake_neuron import FakeNeuron, StartNeuron

BODY = json.dumps({"model": "a", "messages": [{"role": "user", "content": "hello"}]}).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s"
) % (len(BODY), BODY)

AS_SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.execve(sys.argv[2], sys.argv[2:], {**os.environ, "LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())})
"""


class Programs:
    """Gateways with one configuration."""

    def __init__(self, directory: Path, node: FakeNeuron) -> None:
        self.port = free_port()
        self.directory = directory
        (directory / "cortex.toml").write_text(
            f'[gateway]\nlisten = "127.0.0.1:{self.port}"\nmetrics_listen = "127.0.0.1:{free_port()}"\n'
            f'[[neurons]]\nname = "{node.name}"\nendpoint = "{node.endpoint}"\n'
        )
        self.started: list[asyncio.subprocess.Process] = []

    async def start(
        self, *options: str, expects_start: bool = True, **sockets: int
    ) -> tuple[asyncio.subprocess.Process, Path]:
        """`sockets`: a listening one that is passed, as systemd does."""
        log = self.directory / f"log {len(self.started)}"
        command = [sys.executable, "-m", "cortex.gateway", "--config", str(self.directory / "cortex.toml"), *options]
        if sockets:
            command = [sys.executable, "-c", AS_SYSTEMD, *map(str, sockets.values()), *command]
        process = await asyncio.create_subprocess_exec(
            *command, stderr=log.open("w"), pass_fds=list(sockets.values()), env=os.environ
        )
        self.started.append(process)
        await until(lambda: "listens" in log.read_text() or process.returncode is not None)
        if process.returncode is not None and expects_start:
            pytest.fail(log.read_text())
        return process, log

    async def ask(self) -> str:
        """One request over a connection of its own; returns the status line."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(REQUEST)
        response = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        return response.split(b"\r\n", 1)[0].decode()

    async def activity(self) -> list[str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /fleet/activity HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        body = (await reader.read()).split(b"\r\n\r\n", 1)[1]
        writer.close()
        return [each["id"] for each in json.loads(body)["requests"]]


@pytest.fixture
async def programs(tmp_path: Path, neurons: StartNeuron) -> AsyncIterator[Programs]:
    found = Programs(tmp_path, await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY}))
    yield found
    for process in found.started:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ask_until(programs: Programs, stop: asyncio.Event) -> list[str]:
    statuses = []
    while not stop.is_set():
        statuses.append(await programs.ask())
    return statuses


async def test_successor_takes_over_while_clients_connect(programs: Programs) -> None:
    first, _ = await programs.start()
    stop = asyncio.Event()
    clients = [asyncio.create_task(ask_until(programs, stop)) for _ in range(3)]
    try:
        second, log = await programs.start("--take-over")
        first.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(first.wait(), WAIT_S) == 0
        await programs.ask()
    finally:
        stop.set()
    statuses = [status for each in await asyncio.gather(*clients) for status in each]
    assert set(statuses) == {"HTTP/1.1 200 OK"}, "no connection was rejected"
    assert second.returncode is None, log.read_text()


async def test_second_gateway_needs_the_option_to_share_an_address(programs: Programs) -> None:
    await programs.start()
    second, log = await programs.start(expects_start=False)
    assert second.returncode == ExitCode.NO_ROOM
    assert "Address already in use" in log.read_text()


async def test_connections_wait_for_the_successor_on_a_socket_that_is_passed(programs: Programs) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", programs.port))
        listening.listen()
        first, _ = await programs.start(passed=listening.fileno())
        assert await programs.ask() == "HTTP/1.1 200 OK"
        first.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(first.wait(), WAIT_S) == 0
        waiting = asyncio.create_task(programs.ask())
        await programs.start(passed=listening.fileno())
        assert await asyncio.wait_for(waiting, WAIT_S) == "HTTP/1.1 200 OK"


async def test_socket_for_another_port_is_an_error(programs: Programs) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        process, log = await programs.start(expects_start=False, passed=listening.fileno())
    assert process.returncode == ExitCode.NO_ROOM
    assert "systemd passed a socket for 127.0.0.1:" in log.read_text()


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="needs systemd-socket-activate")
async def test_systemd_passes_the_socket(programs: Programs) -> None:
    process = await asyncio.create_subprocess_exec(
        *("systemd-socket-activate", "-l", f"127.0.0.1:{programs.port}"),
        *(sys.executable, "-m", "cortex.gateway", "--config", str(programs.directory / "cortex.toml")),
        stderr=(programs.directory / "log").open("w"),
        env=os.environ,
    )
    programs.started.append(process)
    await until(lambda: "Listening" in (programs.directory / "log").read_text())
    assert await programs.ask() == "HTTP/1.1 200 OK"


async def test_activity_is_kept_over_a_restart(programs: Programs) -> None:
    first, _ = await programs.start()
    await programs.ask()
    before = await programs.activity()
    assert len(before) == 1
    first.send_signal(signal.SIGTERM)
    await asyncio.wait_for(first.wait(), WAIT_S)
    file = programs.directory / "activity.msgpack"
    assert file.stat().st_mode & 0o777 == 0o600
    assert b"hello" not in file.read_bytes()
    await programs.start()
    assert await programs.activity() == before
    await programs.ask()
    assert (await programs.activity())[1:] == before
