"""Several gateway processes on one port, with one view of the fleet."""

import asyncio
import os
import signal
import subprocess

import msgspec
import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from fake_neuron import GB, JSON, WAIT_S, begin_stream, chunk, until

from cortex.exits import ExitCode
from cortex.gateway.config import Config
from cortex.gateway.ledger.keys import as_toml, generate
from cortex.gateway.ledger.store import open_store
from cortex.wire.node import ModelState

READY = ModelState.READY
CHAT = "/v1/chat/completions"


@pytest.fixture
async def client():
    """Sends each request on a new connection, so that any process may get it."""
    connector = TCPConnector(limit=0, force_close=True)
    async with ClientSession(headers=JSON, connector=connector, timeout=ClientTimeout(total=20)) as session:
        yield session


def children(gateway) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(gateway.process.pid)], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in listed.stdout.split()]


async def status(gateway) -> dict:
    return msgspec.json.decode(await gateway.get("/fleet/status"))


async def in_flight(gateway) -> int:
    return sum(model["in_flight"] for node in (await status(gateway))["nodes"] for model in node["models"])


async def until_idle(gateway) -> None:
    async with asyncio.timeout(WAIT_S):
        while await in_flight(gateway):
            await asyncio.sleep(0.02)


async def ask(session, gateway, path=CHAT, headers=None, **fields):
    body = {"model": "a", "messages": [], **fields}
    async with session.post(f"http://127.0.0.1:{gateway.port}{path}", json=body, headers=headers) as response:
        return response.status, await response.read(), response.headers["x-request-id"]


def slow_until(proceed: asyncio.Event):
    async def respond(node, request, body):
        response = await begin_stream(request)
        await response.write(chunk("a", {"content": "first"}))
        await proceed.wait()
        await response.write(chunk("a", {"content": "last"}) + b"data: [DONE]\n\n")
        return response

    return respond


async def test_processes_share_one_fleet_state_and_one_set_of_metrics(neurons, spawn, client):
    node = await neurons("beast", sizes={"a": GB})
    gateway = await spawn(node, "workers = 3")
    assert len(children(gateway)) == 2
    node.load_gate = asyncio.Event()
    waiting = [asyncio.create_task(ask(client, gateway, stream=number % 2 == 0)) for number in range(30)]
    async with asyncio.timeout(WAIT_S):
        while (await status(gateway))["waiting"] != {"a": 30}:
            await asyncio.sleep(0.02)
    node.load_gate.set()
    responses = await asyncio.gather(*waiting)
    assert {code for code, _, _ in responses} == {200}
    assert len({request_id[:16] for _, _, request_id in responses}) == 3, "each process has served some"
    assert len(node.load_requests) == 1, "one load for all"
    await until_idle(gateway)
    code, body, _ = await ask(client, gateway, "/v1/messages", model="unknown")
    assert (code, msgspec.json.decode(body)["error"]["type"]) == (404, "not_found_error")

    async def counted() -> bool:
        text = (await gateway.get("/metrics", gateway.metrics_port)).decode()
        return (
            'cortex_requests_total{model="a",node="beast"} 30.0' in text
            and 'cortex_completion_tokens_total{key="anonymous",model="a"} 90.0' in text
            and 'cortex_request_errors_total{code="model_not_found",model="",node=""} 1.0' in text
        )

    async with asyncio.timeout(WAIT_S):
        while not await counted():
            await asyncio.sleep(0.1)


async def test_control_routes_work_in_every_process(neurons, spawn, client):
    node = await neurons("beast", sizes={"a": GB})
    gateway = await spawn(node, "workers = 3")
    url = f"http://127.0.0.1:{gateway.port}"
    for _ in range(12):
        async with client.get(url + "/v1/models/a") as response:
            assert (await response.json())["id"] == "a"
        async with client.head(url + "/health") as response:
            assert (response.status, await response.read()) == (200, b"")
        async with client.get(url + CHAT) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")
    async with client.post(url + "/fleet/models/a/load") as response:
        assert response.status == 200
    events = [await client.get(url + "/fleet/events") for _ in range(8)]
    for stream in events:
        assert (await stream.content.readuntil(b"\n\n")).startswith(b":")
    async with client.post(url + "/fleet/models/a/unload") as response:
        assert response.status == 200
    for stream in events:
        assert b"unload_started" in await stream.content.readuntil(b"\n\n")
        stream.close()


async def test_limits_apply_to_all_processes_together(neurons, spawn, client):
    key = generate("anna", requests_per_min=10)
    node = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    gateway = await spawn(node, f"workers = 3\n{as_toml(key.section)}")
    headers = {"authorization": f"Bearer {key.text}"}
    responses = await asyncio.gather(*(ask(client, gateway, headers=headers) for _ in range(30)))
    assert sorted(code for code, _, _ in responses) == [200] * 10 + [429] * 20
    assert node.seen[0].headers["x-cortex-principal"] == "anna"
    assert (await ask(client, gateway))[0] == 401
    assert (await ask(client, gateway, "/v1/messages", headers={"x-api-key": "wrong"}))[0] == 401


async def test_every_process_checks_the_key_before_the_body(neurons, spawn, client):
    key = generate("anna", requests_per_min=1000)
    node = await neurons("beast", sizes={"secret-model": GB}, states={"secret-model": READY})
    gateway = await spawn(node, f"workers = 3\n{as_toml(key.section)}")
    url = f"http://127.0.0.1:{gateway.port}{CHAT}"
    for body in (b"not json", b'{"model":"' + b"s" * (1 << 20) + b'"}', b'{"model":"secret-mode"}') * 8:
        async with client.post(url, data=body) as response:
            error = await response.read()
            assert response.status == 401
            assert len(error) < 500
            assert b"secret" not in error
        async with client.post(url, data=body, headers={"x-api-key": key.text}) as response:
            assert response.status in (400, 404)
            assert len(await response.read()) < 500


async def test_requests_of_a_killed_worker_are_charged_as_reserved(neurons, spawn, client, tmp_path):
    key = generate("anna", balance_tokens=10_000)
    node = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=slow_until(asyncio.Event()))
    gateway = await spawn(node, f"workers = 3\n{as_toml(key.section)}")
    asked = {"headers": {"x-api-key": key.text}, "stream": True, "max_tokens": 75}
    streams = [asyncio.create_task(ask(client, gateway, **asked)) for _ in range(24)]
    await until(lambda: len(node.seen) == 24)
    for worker in children(gateway):
        os.kill(worker, signal.SIGKILL)
    await until(lambda: gateway.log.count("starting another") == 2)
    store = open_store(Config().database(tmp_path))

    def charged() -> int:
        return store.exchange({}, {key.section.id: 0})[key.section.id].total

    await until(charged)
    num_broken = sum(stream.done() for stream in streams)
    assert num_broken > 0
    assert charged() >= 75 * num_broken
    store.close()


async def test_killed_worker_loses_its_leases_and_is_replaced(neurons, spawn, client):
    proceed = asyncio.Event()
    node = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=slow_until(proceed))
    gateway = await spawn(node, "workers = 3")
    streams = [asyncio.create_task(ask(client, gateway, stream=True)) for _ in range(24)]
    await until(lambda: len(node.seen) == 24)
    assert await in_flight(gateway) == 24
    first, second = children(gateway)
    os.kill(first, signal.SIGKILL)
    await until(lambda: any(stream.done() for stream in streams))
    async with asyncio.timeout(WAIT_S):
        while await in_flight(gateway) != 24 - sum(stream.done() for stream in streams):
            await asyncio.sleep(0.02)
    proceed.set()
    ended = await asyncio.gather(*streams, return_exceptions=True)
    broken = [each for each in ended if isinstance(each, ClientError)]
    assert 0 < len(broken) < 24
    assert all(each[1].endswith(b"data: [DONE]\n\n") for each in ended if each not in broken)
    await until_idle(gateway)
    await until(lambda: "starting another" in gateway.log)
    await until(lambda: len(set(children(gateway)) - {first, second}) == 1)
    assert {code for code, _, _ in await asyncio.gather(*(ask(client, gateway) for _ in range(20)))} == {200}


async def test_disconnected_client_frees_its_lease_or_queue_place_in_every_process(neurons, spawn, client):
    node = await neurons("beast", sizes={"a": GB, "b": GB}, states={"a": READY}, answer=slow_until(asyncio.Event()))
    node.load_gate = asyncio.Event()
    gateway = await spawn(node, "workers = 3")
    decoding = [asyncio.create_task(ask(client, gateway, stream=True)) for _ in range(12)]
    queued = [asyncio.create_task(ask(client, gateway, model="b")) for _ in range(12)]
    await until(lambda: len(node.seen) == 12)
    async with asyncio.timeout(WAIT_S):
        while (await status(gateway))["waiting"] != {"b": 12}:
            await asyncio.sleep(0.02)
    for task in (*decoding, *queued):
        task.cancel()
    async with asyncio.timeout(WAIT_S):
        while (now := await status(gateway))["waiting"] or any(m["in_flight"] for m in now["nodes"][0]["models"]):
            await asyncio.sleep(0.02)
    await until(lambda: all(seen.ended for seen in node.seen))


async def test_retries_on_another_replica_when_one_dies(neurons, spawn, client):
    async def die(node, request, body):
        request.transport.abort()
        await asyncio.sleep(60)

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, answer=die)
    good = await neurons("good", sizes={"a": GB}, states={"a": READY})
    more = f'[[neurons]]\nname = "good"\nendpoint = "{good.endpoint}"'
    gateway = await spawn(bad, f"workers = 3\n{more}")
    responses = await asyncio.gather(*(ask(client, gateway) for _ in range(20)))
    assert {code for code, _, _ in responses} == {200}
    assert bad.seen
    await until_idle(gateway)


async def test_reload_applies_to_every_process(neurons, spawn, client, tmp_path):
    old = await neurons("old", sizes={"a": GB}, states={"a": READY})
    new = await neurons("new", sizes={"b": GB}, states={"b": READY})
    gateway = await spawn(old, "workers = 3")
    config = tmp_path / "cortex.toml"
    config.write_text(config.read_text() + f'[[neurons]]\nname = "new"\nendpoint = "{new.endpoint}"\n')
    gateway.process.send_signal(signal.SIGHUP)
    await until(lambda: "reloaded: 2 nodes" in gateway.log)
    async with asyncio.timeout(WAIT_S):
        while b'"new":"up"' not in await gateway.get("/health"):
            await asyncio.sleep(0.02)
    responses = await asyncio.gather(*(ask(client, gateway, model=model) for model in "ab" * 15))
    assert {code for code, _, _ in responses} == {200}


async def test_sigterm_drains_every_process_and_leaves_none_behind(neurons, spawn, client):
    proceed = asyncio.Event()
    node = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=slow_until(proceed))
    gateway = await spawn(node, "workers = 3")
    workers = children(gateway)
    streams = [asyncio.create_task(ask(client, gateway, stream=True)) for _ in range(12)]
    await until(lambda: len(node.seen) == 12)
    gateway.process.send_signal(signal.SIGTERM)
    for worker in workers:
        os.kill(worker, signal.SIGTERM)  # as service managers do
    await until(lambda: "shutting down" in gateway.log)
    await asyncio.sleep(0.3)
    proceed.set()
    assert all(data.endswith(b"data: [DONE]\n\n") for _, data, _ in await asyncio.gather(*streams))
    assert await asyncio.wait_for(gateway.process.wait(), WAIT_S) == ExitCode.OK
    assert not any(os.path.exists(f"/proc/{worker}") for worker in workers)


async def test_workers_end_when_the_main_process_is_killed(neurons, spawn, client, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    node = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=slow_until(asyncio.Event()))
    gateway = await spawn(node, "workers = 3")
    workers = children(gateway)
    streams = [asyncio.create_task(ask(client, gateway, stream=True)) for _ in range(9)]
    await until(lambda: len(node.seen) == 9)
    gateway.process.kill()
    await gateway.process.wait()
    await until(lambda: not any(os.path.exists(f"/proc/{worker}") for worker in workers))
    assert all(isinstance(each, ClientError) for each in await asyncio.gather(*streams, return_exceptions=True))
    await until(lambda: all(seen.ended for seen in node.seen))
    assert list(temporary.iterdir()) == [], "no socket is left behind"
    again = await spawn(node, "workers = 2", port=gateway.port)
    assert (await in_flight(again)) == 0


async def test_port_shared_by_another_gateway_is_rejected(spawn):
    first = await spawn(extra="workers = 2")
    second = await spawn(extra="workers = 2", port=first.port)
    assert await asyncio.wait_for(second.process.wait(), WAIT_S) == ExitCode.NO_ROOM
    assert "cannot listen" in second.log
