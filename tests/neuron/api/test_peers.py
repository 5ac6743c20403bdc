"""Connections between nodes that share a model: keys, certificates, web pages, and their end."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.api import peers as peer_connections
from cortex.neuron.api.access import NodeKeys
from cortex.neuron.api.peers import PeerConnector
from cortex.neuron.api.server import Front
from cortex.neuron.config import NeuronConfig, PeerEntry
from cortex.neuron.node.spanning.protocol import PeerRejected, PeerUnreachable
from cortex.settings import Listen

from ...waiting import WAIT_S
from .served import served

KEY = "nk-0123456789abcdef"
CONNECTOR = PeerConnector(Path())


def peer(endpoint: str, **options: Any) -> PeerEntry:
    return PeerEntry(name="second", endpoint=endpoint, **options)


async def test_messages_pass_both_ways_until_one_end_closes(api: Any, node_keys: NodeKeys, monkeypatch: Any) -> None:
    node_keys.use([KEY])
    monkeypatch.setenv("PEER_KEY", KEY)
    connection = await CONNECTOR.connect(peer(api.url, key_env="PEER_KEY"))
    assert connection.local_host == "127.0.0.1"
    await connection.send(b"hello")
    assert await anext(aiter(connection)) == b"hello"
    await connection.close()
    await connection.close()
    await connection.send(b"into the void")
    assert [message async for message in connection] == []


async def test_wrong_missing_and_unset_keys_are_reported_as_such(
    api: Any, node_keys: NodeKeys, monkeypatch: Any
) -> None:
    node_keys.use([KEY])
    monkeypatch.setenv("PEER_KEY", KEY + "x")
    monkeypatch.delenv("NO_KEY", raising=False)
    for options, problem in (
        ({"key_env": "PEER_KEY"}, "does not accept the key"),
        ({}, "does not accept the key"),
        ({"key_env": "NO_KEY"}, "the variable NO_KEY is not set"),
    ):
        with pytest.raises(PeerRejected, match=problem):
            await CONNECTOR.connect(peer(api.url, **options))


async def test_distinguishes_a_node_that_does_not_listen_from_one_without_shares(api: Any) -> None:
    with pytest.raises(PeerUnreachable, match="127"):
        await CONNECTOR.connect(peer("http://127.0.0.1:1"))
    with pytest.raises(PeerRejected, match="check `endpoint`"):
        await CONNECTOR.connect(peer(f"{api.url}/elsewhere"))


async def test_node_that_accepts_and_never_responds_is_unreachable(monkeypatch: Any) -> None:
    monkeypatch.setattr(peer_connections, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        endpoint = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(PeerUnreachable, match="TimeoutError"):
                await CONNECTOR.connect(peer(endpoint))


async def test_web_page_is_rejected_also_without_keys(api: Any) -> None:
    headers = {"origin": "http://127.0.0.1", "connection": "upgrade", "upgrade": "websocket"}
    async with api.client.get(f"{api.url}/shares", headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (403, "cross_site_request")


async def test_plain_request_gets_a_client_error(api: Any) -> None:
    async with api.client.get(f"{api.url}/shares") as response:
        assert 400 <= response.status < 500


async def test_certificate_of_the_peer_is_verified(node: Any, authority: Any) -> None:
    issued = authority.issue("neuron")
    config = NeuronConfig(listen=Listen("127.0.0.1:0"), tls_cert=issued.cert, tls_key=issued.key)
    front = Front(config, None, insecure=False)
    assert front.certificate is not None
    connector = PeerConnector(authority.own.cert.parent)
    async with served(node, tls=front.certificate.context, access=front.access) as (_, port):
        endpoint = f"https://localhost:{port}"
        connection = await connector.connect(peer(endpoint, ca_file=Path(authority.own.cert.name)))
        await connection.send(b"hello")
        assert await anext(aiter(connection)) == b"hello"
        await connection.close()
        with pytest.raises(PeerUnreachable, match="certificate"):
            await connector.connect(peer(endpoint))
        with pytest.raises(PeerRejected, match="ca_file"):
            await connector.connect(peer(endpoint, ca_file=Path("absent.pem")))
