"""The listener decides on the head whether a body may be sent, and how long it may be."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import Config, GatewaySection, LimitsSection
from cortex.gateway.ledger.keys import generate
from cortex.gateway.proxy.listener import client_limits
from cortex.wire.node.protocol import ModelState

from ...waiting import WAIT_S
from ..fake_neuron import GB
from ..started_gateway import Client

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


CHAT = "/v1/chat/completions"
KEY = generate("anna")


def head(path: str, num_bytes: int, *, key: str = "", method: str = "POST", expect: bool = False) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {num_bytes}"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += ["Expect: 100-continue"] if expect else []
    return "\r\n".join([*lines, "", ""]).encode()


async def first_response(port: int, data: bytes) -> tuple[int, dict[str, Any]]:
    """The status and JSON body (empty for 1xx) of the first response to `data`, which may be an incomplete request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(WAIT_S):
            writer.write(data)
            lines = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(lines.split()[1])
            if status < 200:
                return status, {}
            length = int(lines.partition(b"content-length: ")[2].split()[0])
            return status, msgspec.json.decode(await reader.readexactly(length))
    finally:
        writer.transport.abort()


@pytest.fixture
async def client(neurons: StartNeuron, start_gateway: StartGateway) -> Client:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    return await start_gateway(beast, keys=(KEY.section,))


@pytest.mark.parametrize("key", ["", "ck-00000000-nobody"])
@pytest.mark.parametrize("expect", [False, True])
async def test_rejects_an_unknown_key_before_the_body_is_sent(client: Client, key: str, expect: bool) -> None:
    status, body = await first_response(client.port, head(CHAT, 60_000_000, key=key, expect=expect))
    assert status == 401
    assert body["error"]["code"] == "invalid_api_key"
    assert 'cortex_request_errors_total{code="invalid_api_key",model="",node=""} 1.0' in client.metrics()
    assert client.gateway.server.buffered.num_bytes == 0


async def test_rejects_an_upload_to_a_server_before_it_is_sent_unless_it_is_an_operators(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    operator = generate("operator", operator=True)
    client = await start_gateway(await neurons("beast"), keys=(KEY.section, operator.section))
    path = "/upstream/a/v1/files"
    assert (await first_response(client.port, head(path, 60_000_000, key=KEY.text, expect=True)))[0] == 403
    assert (await first_response(client.port, head(path, 60_000_000, key=operator.text, expect=True)))[0] == 100


async def test_rejects_in_the_dialect_of_the_path(client: Client) -> None:
    status, body = await first_response(client.port, head("/v1/messages", 60_000_000))
    assert (status, body["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("path", ["/fleet/models/a/load", "/v1/models", "/nowhere"])
async def test_rejects_an_unknown_key_on_every_path_that_needs_one(client: Client, path: str) -> None:
    assert (await first_response(client.port, head(path, 60_000)))[0] == 401


async def test_reads_the_body_of_a_known_key(client: Client) -> None:
    assert (await first_response(client.port, head(CHAT, 60_000_000, key=KEY.text, expect=True)))[0] == 100
    body = msgspec.json.encode({"model": "a", "messages": [{"role": "user", "content": "x" * 100_000}]})
    assert (await first_response(client.port, head(CHAT, len(body), key=KEY.text) + body))[0] == 200


async def test_uses_the_keys_of_the_latest_reload(client: Client) -> None:
    new = generate("olga")
    assert (await first_response(client.port, head(CHAT, 60_000, key=new.text)))[0] == 401
    before = client.gateway.config
    config = Config(gateway=before.gateway, neurons=before.neurons, keys=(new.section,))
    await client.gateway.reconfigure(config, Catalogue())
    assert (await first_response(client.port, head(CHAT, 60_000, key=new.text, expect=True)))[0] == 100
    assert (await first_response(client.port, head(CHAT, 60_000, key=KEY.text)))[0] == 401


@pytest.mark.parametrize(
    ("path", "method"), [("/health", "GET"), ("/", "POST"), ("/fleet/models/a/load", "POST"), (CHAT, "PUT")]
)
async def test_rejects_large_bodies_on_other_paths(client: Client, path: str, method: str) -> None:
    status, _ = await first_response(client.port, head(path, 60_000_000, key=KEY.text, method=method))
    assert status == 413


def test_configured_limits_reach_the_data_path() -> None:
    limits = client_limits(
        Config(
            gateway=GatewaySection(max_body_mb=2),
            limits=LimitsSection(max_buffered_mb=3, max_head_kb=4, min_body_kb_per_s=5, max_connections=6),
        ),
        1024,
    )
    assert limits.body_bytes == 2 << 20
    assert limits.buffered_bytes == 3 << 20
    assert limits.head_bytes == 4 << 10
    assert limits.body_bytes_per_s == 5 << 10
    assert limits.num_connections == 6


def test_rejects_a_budget_that_has_no_room_for_one_body() -> None:
    with pytest.raises(ValueError, match="max_buffered_mb"):
        Config(gateway=GatewaySection(max_body_mb=20), limits=LimitsSection(max_buffered_mb=10))
