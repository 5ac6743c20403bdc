"""Several gateways on one PostgreSQL, with requests divided among them in turn, as a load balancer does.

The node is a small server that responds at once with three tokens. The CPU time of the gateways and of the database
says how far they carry: it hardly depends on what else runs on the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from cortex.gateway.ledger.keys import NewKey, as_toml, generate
from cortex.wire.events import Usage
from cortex.wire.node import usage_report
from cortex.wire.node.protocol import Device, DeviceHealth, Discovery, Health, ModelState, ModelStatus

SOURCE = Path(__file__).parents[2] / "src"
USAGE = Usage(prompt_tokens=7, completion_tokens=3)
CLIENTS_PER_GATEWAY = 8
FLUSH_S = 0.5
START_S = 120.0
SETTLE_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def measure(database: str, counts: list[int], num_requests: int) -> None:
    print("| gateways | requests | gateway CPU per request | database CPU per request | ledger |")
    print("|---|---|---|---|---|")
    for count in counts:
        asyncio.run(_measure(database, count, num_requests))


async def _measure(database: str, count: int, num_requests: int) -> None:
    key = generate(f"bench-{os.getpid()}-{count}", operator=True)
    node = await asyncio.start_server(_serve, "127.0.0.1", 0)
    node_port = node.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="cortex-gateways-") as folder:
        ports = [_free_port() for _ in range(count)]
        processes = [_gateway(Path(folder) / str(port), port, node_port, database, key) for port in ports]
        try:
            for port in ports:
                await _until_ready(port)
            await _send(ports, key, 100 * count)  # warms everything up
            before = [_cpu_s(process.pid) for process in processes]
            database_before = _database_cpu_s(database)
            await _send(ports, key, num_requests)
            await asyncio.sleep(3 * FLUSH_S)
            cpu_s = sum(_cpu_s(process.pid) for process in processes) - sum(before)
            database_s = _database_cpu_s(database) - database_before
            wanted = (num_requests + 100 * count) * (USAGE.prompt_tokens + USAGE.completion_tokens)
            found = await _ledger(ports[0], key, wanted)
            verdict = "equal" if found == wanted else f"{found} instead of {wanted}"
            print(
                f"| {count} | {num_requests:,} | {cpu_s / num_requests * 1e6:.0f} µs "
                f"| {database_s / num_requests * 1e6:.0f} µs | {verdict} |",
                flush=True,
            )
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(60)
            node.close()


def _gateway(folder: Path, port: int, node_port: int, database: str, key: NewKey) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "cortex.toml").write_text(
        f'[gateway]\nlisten = "127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:0"\nstate = "{folder}/state"\n'
        f'[ledger]\ndatabase = "{database}"\nflush_s = {FLUSH_S}\n'
        f'[[neurons]]\nname = "node"\nendpoint = "http://127.0.0.1:{node_port}"\n{as_toml(key.section)}'
    )
    with (folder / "log").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "cortex.gateway", "--config", str(folder / "cortex.toml")],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )


async def _send(ports: list[int], key: NewKey, num_requests: int) -> None:
    """Each client has one connection; the gateways get equally many requests."""
    clients = [port for port in ports for _ in range(CLIENTS_PER_GATEWAY)]
    parts = [num_requests // len(clients) + (index < num_requests % len(clients)) for index in range(len(clients))]
    await asyncio.gather(*(_client(port, key, part) for port, part in zip(clients, parts, strict=True)))


async def _client(port: int, key: NewKey, num_requests: int) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key.text}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(num_requests):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        await reader.readexactly(_length(head))
    writer.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The node."""
    status = ModelStatus(id="m", state=ModelState.READY, devices=(0,), measured_bytes=1 << 30)
    device = Device(index=0, kind="cuda", name="card", total_bytes=80 << 30)
    report = DeviceHealth(index=0, total_bytes=80 << 30, free_bytes=79 << 30)
    discovery = Discovery(host="node", os="linux", version="0", devices=(device,), dialects=("openai_chat",))
    health = Health(status="ok", uptime_s=1.0, devices=(report,), models=(status,))
    choice = {"index": 0, "message": {"role": "assistant", "content": "one two three"}, "finish_reason": "stop"}
    answers = {
        b"/health": (msgspec.json.encode(health), b""),
        b"/discovery": (msgspec.json.encode(discovery), b""),
        b"/v1/chat/completions": (
            json.dumps(
                {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            ).encode(),
            f"{usage_report.HEADER}: {usage_report.header_value(USAGE)}\r\n".encode(),
        ),
    }
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(_length(head))
            content, headers = answers[head.split(b" ", 2)[1].partition(b"?")[0]]
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
                % (headers, len(content), content)
            )
    except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        writer.close()


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def _until_ready(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/ready", None)
        except OSError:
            assert time.monotonic() < deadline, "a gateway did not become ready"
            await asyncio.sleep(0.2)
        else:
            return


async def _ledger(port: int, key: NewKey, wanted: int) -> int:
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            rows = (await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/fleet/usage?by=key", key))["rows"]
        except urllib.error.HTTPError:  # the database did not respond in time, on a busy machine
            rows = []
        row: dict[str, Any] = next((row for row in rows if row["name"] == key.section.name), {})
        found = int(row.get("prompt_tokens", 0) + row.get("completion_tokens", 0))
        if found == wanted or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def _get(url: str, key: NewKey | None) -> dict[str, list[dict[str, int | str]]]:
    headers = {"authorization": f"Bearer {key.text}"} if key is not None else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
        found: dict[str, list[dict[str, int | str]]] = json.load(response)
        return found


def _cpu_s(pid: int) -> float:
    """Processor time of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return _own_cpu_s(pid) + sum(_cpu_s(int(child)) for child in children)


def _own_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_PER_S  # with that of children that have ended


def _database_cpu_s(database: str) -> float:
    """Processor time of all processes of the server, which is on this machine."""
    import psycopg

    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        fields = Path(f"/proc/{row[0]}/stat").read_text().rpartition(")")[2].split()
        return _cpu_s(int(fields[1]))  # of its parent, and of all that it started


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
