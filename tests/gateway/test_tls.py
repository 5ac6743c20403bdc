"""TLS from the client to the gateway and from there to a node, through configuration and commands."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from aiohttp import ClientSession

from cortex.cli.client import GatewayClient, GatewayUnreachable
from cortex.gateway.config import Config, GatewaySection, NeuronSection
from cortex.http.tls import ServerCertificate, client_context
from cortex.settings import SettingsError
from cortex.wire.node.protocol import ModelState

from ..waiting import until, until_response
from .fake_neuron import GB

if TYPE_CHECKING:
    from ..certificates import Authority
    from .fake_neuron import StartNeuron
    from .started_gateway import SpawnGateway, StartGateway


async def test_https_from_client_to_node(
    neurons: StartNeuron, start_gateway: StartGateway, authority: Authority, tmp_path: Path
) -> None:
    """Paths are relative to the directory of the configuration, which is `tmp_path`."""
    certificate = authority.issue("gateway")
    shutil.copy(certificate.cert, tmp_path / "cert.pem")
    shutil.copy(certificate.key, tmp_path / "key.pem")
    shutil.copy(authority.own.cert, tmp_path / "ca.pem")
    node_tls = ServerCertificate(*astuple(authority.issue("node"))).context
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY}, tls=node_tls)
    client = await start_gateway(beast, tls_cert=Path("cert.pem"), tls_key=Path("key.pem"), node_ca_file=Path("ca.pem"))
    url = f"https://127.0.0.1:{client.port}"
    trust = client_context(authority.own.cert)
    body = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}
    async with ClientSession() as session, session.post(url + "/v1/chat/completions", json=body, ssl=trust) as response:
        assert response.status == 200, await response.text()
    command = GatewayClient(url, None, tls=trust)
    assert (await asyncio.to_thread(command.get, "/health"))["nodes"] == {"beast": "up"}
    with pytest.raises(GatewayUnreachable, match="certificate") as failure:
        await asyncio.to_thread(GatewayClient(url, None).get, "/health")
    assert "--ca-file" in failure.value.remedy
    with pytest.raises(GatewayUnreachable):
        await asyncio.to_thread(GatewayClient(url.replace("https", "http"), None).get, "/health")


async def test_node_with_a_certificate_of_a_stranger_is_down_and_says_why(
    neurons: StartNeuron, start_gateway: StartGateway, authority: Authority
) -> None:
    node_tls = ServerCertificate(*astuple(authority.issue("node"))).context
    beast = await neurons("beast", sizes={"a": GB}, tls=node_tls)
    client = await start_gateway(beast)
    status = await client.get_until("/fleet/status", lambda status: status["nodes"][0]["problem"])
    assert "certificate" in status["nodes"][0]["problem"]


async def test_changed_ca_file_is_used_for_new_connections(
    neurons: StartNeuron, spawn: SpawnGateway, authority: Authority, tmp_path: Path
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, tls=ServerCertificate(*astuple(authority.issue("node"))).context)
    trusted, ca = Path(authority.own.cert), tmp_path / "ca.pem"
    shutil.copy(authority.issue("stranger").cert, ca)
    gateway = await spawn(beast, extra='node_ca_file = "ca.pem"')

    async def node() -> dict[str, str]:
        url = f"http://127.0.0.1:{gateway.port}/health"
        async with ClientSession() as session, session.get(url) as response:
            return dict((await response.json())["nodes"])

    await until_response(node, {"beast": "down"}.__eq__)
    shutil.copy(trusted, ca)
    await until_response(node, {"beast": "up"}.__eq__)
    ca.write_text("no certificate")
    await until(lambda: "not reloaded" in gateway.log)
    assert await node() == {"beast": "up"}, "the authority that was in force still is"


async def test_missing_ca_file_or_certificate_is_an_error_of_the_configuration(
    neurons: StartNeuron, start_gateway: StartGateway, authority: Authority
) -> None:
    beast = await neurons("beast", tls=ServerCertificate(*astuple(authority.issue("node"))).context)
    with pytest.raises(SettingsError, match="ca_file"):
        await start_gateway(beast, node_ca_file=Path("absent.pem"))
    with pytest.raises(SettingsError, match="tls_cert"):
        await start_gateway(beast, tls_cert=Path("absent.pem"), tls_key=Path("absent.pem"))
    with pytest.raises(ValueError, match="belong together"):
        GatewaySection(tls_cert=Path("cert.pem"))


def test_own_ca_file_of_a_node_precedes_the_default(tmp_path: Path) -> None:
    node = NeuronSection(name="x", endpoint="https://x", ca_file=Path("own.pem"))
    config = Config(gateway=GatewaySection(node_ca_file=Path("default.pem")), neurons=(node,))
    assert config.ca_file(node, tmp_path) == tmp_path / "own.pem"
    assert config.ca_file(NeuronSection(name="y", endpoint="https://y"), tmp_path) == tmp_path / "default.pem"
