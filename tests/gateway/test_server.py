"""The gateway as a process: its exit codes, its signals, its files."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.__main__ import main
from cortex.gateway.config import Config, GatewaySection, NeuronSection
from cortex.gateway.database import StoreError
from cortex.gateway.ledger.keys import as_toml, generate
from cortex.gateway.listening import CannotListen
from cortex.gateway.process import report_unhandled
from cortex.gateway.server import Gateway
from cortex.settings import Listen
from cortex.system.exits import ExitCode
from cortex.wire.node.protocol import ModelState

from ..ports import free_port
from ..waiting import WAIT_S, until
from .fake_neuron import GB
from .fake_responses import begin_stream, chunk

if TYPE_CHECKING:
    from .fake_neuron import FakeNeuron, StartNeuron
    from .started_gateway import SpawnGateway, StartGateway


async def test_serves_reloads_and_drains_on_sigterm(neurons: StartNeuron, spawn: SpawnGateway, tmp_path: Path) -> None:
    proceed = asyncio.Event()

    async def slow(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk("a", {"content": "first"}))
        await proceed.wait()
        await response.write(chunk("a", {"content": "last"}) + b"data: [DONE]\n\n")
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY}, respond=slow)
    gateway = await spawn(beast)
    assert b'"beast":"up"' in await gateway.get("/health")
    assert b"cortex_node_up" in await gateway.get("/metrics", gateway.metrics_port)

    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = b'{"model":"a","stream":true,"messages":[]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    assert b"first" in await reader.readuntil(b"first")

    config = tmp_path / "cortex.toml"
    good = config.read_text()
    config.write_text(good + "[eviction]\nstrategi = 1\n")
    gateway.process.send_signal(signal.SIGHUP)
    await until(lambda: "not reloaded" in gateway.log)
    assert "strategy" in gateway.log, "the log suggests the right key"
    (tmp_path / "models.toml").write_text('[[models]]\nid = "new"\nvram_mb = 1024\n')
    config.write_text(good)
    gateway.process.send_signal(signal.SIGHUP)
    await until(lambda: "reloaded, nodes: 1" in gateway.log)
    assert b'"id":"new"' in await gateway.get("/v1/models")

    gateway.process.send_signal(signal.SIGTERM)
    await until(lambda: "shutting down" in gateway.log)
    proceed.set()
    assert b"last" in await reader.read()
    assert await asyncio.wait_for(gateway.process.wait(), WAIT_S) == 0
    writer.close()


@pytest.mark.usefixtures("restored_logging")
def test_taken_port_exits_with_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = exit_of(tmp_path, f'listen = "127.0.0.1:{port}"', capfd)
    assert code == ExitCode.NO_ROOM
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in errors.splitlines()[-1]
    assert "Traceback" not in errors


def exit_of(folder: Path, settings: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a gateway with these settings that does not start, and what it wrote to standard error."""
    config = folder / "cortex.toml"
    config.write_text(f"[gateway]\n{settings}\n")
    capfd.readouterr()
    return main(["--config", str(config)]), capfd.readouterr().err


async def test_failed_lookup_of_a_cancelled_connection_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    for error in (socket.gaierror(-2, "Name or service not known"), ValueError("a bug")):
        report_unhandled(loop, {"message": "never retrieved", "exception": error})
    assert "a bug" in caplog.text
    assert "Name or service" not in caplog.text


@pytest.mark.usefixtures("restored_logging")
def test_invalid_configuration_exits_with_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, errors = exit_of(tmp_path, 'listn = "x"', capfd)
    assert code == ExitCode.CONFIG
    assert "listen" in errors
    assert len(errors.splitlines()) == 1


async def test_warns_about_open_public_address(spawn: SpawnGateway) -> None:
    gateway = await spawn(listen_host="0.0.0.0", extra="open = true")
    assert "anybody who can reach" in gateway.log


@pytest.mark.usefixtures("restored_logging")
def test_public_address_without_keys_exits_with_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, errors = exit_of(tmp_path, 'listen = "0.0.0.0:0"', capfd)
    assert code == ExitCode.CONFIG
    assert "gateway.open = true" in errors.splitlines()[-1]
    assert "Traceback" not in errors


async def test_warns_when_a_reload_opens_a_public_address(spawn: SpawnGateway, tmp_path: Path) -> None:
    keys = as_toml(generate("anna").section)
    gateway = await spawn(listen_host="0.0.0.0", extra=keys)
    assert "anybody who can reach" not in gateway.log
    config = tmp_path / "cortex.toml"
    config.write_text(config.read_text().replace(keys, "open = true\n"))
    gateway.process.send_signal(signal.SIGHUP)
    await until(lambda: "anybody who can reach" in gateway.log)


async def test_reload_adds_and_removes_nodes_without_dropping_a_stream(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    proceed = asyncio.Event()

    async def slow(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk("a", {"content": "first"}))
        await proceed.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    old = await neurons("old", sizes={"a": GB}, states={"a": ModelState.READY}, respond=slow)
    new = await neurons("new", sizes={"b": GB}, states={"b": ModelState.READY})
    client = await start_gateway(old)
    stream = asyncio.create_task(client.stream("/v1/chat/completions", {"model": "a", "messages": [], "stream": True}))
    await until(lambda: old.seen)
    before = client.gateway.config
    config = Config(
        gateway=before.gateway, neurons=(NeuronSection(name="new", endpoint=new.endpoint),), eviction=before.eviction
    )
    await client.gateway.reconfigure(config, Catalogue())
    await until(lambda: client.gateway.dispatcher.is_ready("b", "new"))
    assert (await client.chat("b"))[0] == 200
    assert (await client.chat("a"))[0] == 404
    proceed.set()
    assert (await stream).endswith(b"data: [DONE]\n\n")
    assert client.gateway.dispatcher.in_flight == {}


async def test_gateway_starts_while_a_node_is_down(neurons: StartNeuron, tmp_path: Path) -> None:
    port = free_port()
    config = Config(
        gateway=GatewaySection(listen=Listen("127.0.0.1:0"), metrics_listen=None, poll_interval_s=0.05),
        neurons=(NeuronSection(name="later", endpoint=f"http://127.0.0.1:{port}"),),
    )
    gateway = Gateway(config, Catalogue(), tmp_path)
    async with asyncio.timeout(WAIT_S):
        await gateway.start()
    late = await neurons("later", sizes={"a": GB}, states={"a": ModelState.READY})
    await late.stop()
    await late.start(port)
    await until(lambda: gateway.dispatcher.is_ready("a", "later"))
    await gateway.close()


async def test_killed_gateway_serves_again_one_poll_after_restart(neurons: StartNeuron, spawn: SpawnGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    first = await spawn(beast)
    first.process.kill()
    await first.process.wait()
    second = await spawn(beast)
    assert b'"loaded":true' in await second.get("/v1/models/a")
    assert not beast.load_requests


async def test_gateway_killed_under_load_serves_again_after_restart(neurons: StartNeuron, spawn: SpawnGateway) -> None:
    async def paced(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        for _ in range(10):
            await response.write(chunk("a", {"content": "x"}))
            await asyncio.sleep(0.03)
        await response.write(b"data: [DONE]\n\n")
        return response

    beast = await neurons("beast", sizes={"a": GB, "b": GB}, states={"a": ModelState.READY}, respond=paced)
    first = await spawn(beast)
    url = f"http://127.0.0.1:{first.port}/v1/chat/completions"
    stop = asyncio.Event()
    whole, broken = [0], [0]
    body = {"model": "a", "messages": [], "stream": True}

    async def client(session: ClientSession) -> None:
        while not stop.is_set():
            try:
                async with session.post(url, json=body) as response:
                    data = await response.read()
                whole[0] += data.endswith(b"data: [DONE]\n\n")
            except ClientError:
                broken[0] += 1
                await asyncio.sleep(0.05)

    async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=WAIT_S)) as session:
        clients = [asyncio.create_task(client(session)) for _ in range(24)]
        await until(lambda: whole[0] >= 24)
        first.process.send_signal(signal.SIGKILL)
        await first.process.wait()
        await until(lambda: broken[0] >= 24)
        await until(lambda: all(seen.ended for seen in beast.seen))
        second = await spawn(beast, port=first.port)
        served = whole[0]
        await until(lambda: whole[0] >= served + 24)
        stop.set()
        await asyncio.gather(*clients)
    await until(lambda: all(seen.ended for seen in beast.seen))
    status = msgspec.json.decode(await second.get("/fleet/status"))
    assert status["waiting"] == {}
    assert [model["in_flight"] for model in status["nodes"][0]["models"]] == [0]
    assert not beast.load_requests
    assert not beast.unload_requests


async def test_taken_port_is_reported_before_a_node_is_contacted(neurons: StartNeuron, tmp_path: Path) -> None:
    neuron = await neurons("n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = Listen("{}:{}".format(*taken.getsockname()))
        for name in ("listen", "ollama_listen", "metrics_listen"):
            addresses: dict[str, Any] = {"listen": Listen("127.0.0.1:0"), "metrics_listen": None, name: address}
            config = Config(
                gateway=GatewaySection(**addresses),
                neurons=(NeuronSection(name="n", endpoint=neuron.endpoint),),
            )
            gateway = Gateway(config, Catalogue(), tmp_path)
            with pytest.raises(CannotListen, match=f"in use; stop what uses it, or set gateway.{name}"):
                await gateway.start()
            await gateway.close()
    assert neuron.polls == 0


async def test_end_of_a_gateway_writes_the_rest_where_one_store_fails(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await start_gateway(await neurons("n", sizes={"a": GB}))
    gateway, saved = client.gateway, asyncio.Event()

    async def fails() -> None:
        raise StoreError("the disk is full")

    async def save() -> None:
        saved.set()

    monkeypatch.setattr(gateway._metering, "close", fails)  # noqa: SLF001
    monkeypatch.setattr(gateway._activity_file, "save", save)  # noqa: SLF001
    await gateway.close()
    assert saved.is_set()
