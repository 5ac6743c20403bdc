"""Nodes found by DNS, with a resolver that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import Config, DiscoverySection, GatewaySection, NeuronSection
from cortex.gateway.dispatch.nodes.dns_discovery import MAX_MISSES, DNSDiscovery, resolve_addresses
from cortex.gateway.server import Gateway
from cortex.settings import Listen
from cortex.wire.node.protocol import ModelState

from ....waiting import WAIT_S, until
from ...fake_neuron import GB, JSON, FakeNeuron
from ...started_gateway import Client

SECTION = DiscoverySection(dns="neurons.svc", port=13131)


class Resolver:
    """Responds with `addresses`, or raises them where they are an error."""

    def __init__(self, *addresses: str) -> None:
        self.response: Collection[str] | OSError = addresses

    async def __call__(self, name: str) -> Collection[str]:
        assert name == "neurons.svc"
        if isinstance(self.response, OSError):
            raise self.response
        return self.response


def endpoints(discovery: DNSDiscovery, *configured: NeuronSection) -> list[str]:
    return [node.endpoint for node in discovery.joined(configured)]


async def test_every_address_is_a_node() -> None:
    discovery = DNSDiscovery(Resolver("10.0.0.2", "10.0.0.1", "fd00::1"))
    assert endpoints(discovery) == []
    await discovery.refresh(SECTION)
    assert endpoints(discovery) == ["http://10.0.0.1:13131", "http://10.0.0.2:13131", "http://[fd00::1]:13131"]


async def test_configured_node_is_not_listed_twice() -> None:
    discovery = DNSDiscovery(Resolver("10.0.0.1"))
    await discovery.refresh(SECTION)
    beast = NeuronSection(name="beast", endpoint="http://10.0.0.1:13131")
    assert discovery.joined((beast,)) == (beast,)


async def test_node_leaves_after_its_address_was_missing_repeatedly() -> None:
    resolver = Resolver("10.0.0.1", "10.0.0.2")
    discovery = DNSDiscovery(resolver)
    await discovery.refresh(SECTION)
    resolver.response = ["10.0.0.2"]
    for _ in range(MAX_MISSES - 1):
        await discovery.refresh(SECTION)
    assert len(endpoints(discovery)) == 2
    await discovery.refresh(SECTION)
    assert endpoints(discovery) == ["http://10.0.0.2:13131"]


async def test_nodes_stay_while_there_is_no_response(caplog: pytest.LogCaptureFixture) -> None:
    resolver = Resolver("10.0.0.1")
    discovery = DNSDiscovery(resolver)
    await discovery.refresh(SECTION)
    resolver.response = OSError(-3, "temporary failure in name resolution")
    for _ in range(2 * MAX_MISSES):
        await discovery.refresh(SECTION)
    assert endpoints(discovery) == ["http://10.0.0.1:13131"]
    assert caplog.text.count("cannot resolve neurons.svc: temporary failure in name resolution; the known nodes") == 1


async def test_name_without_addresses_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    discovery = DNSDiscovery(Resolver())
    for _ in range(3):
        await discovery.refresh(SECTION)
    assert caplog.text.count("neurons.svc has no addresses") == 1


async def test_nodes_leave_when_the_name_is_removed_from_the_configuration() -> None:
    discovery = DNSDiscovery(Resolver("10.0.0.1"))
    await discovery.refresh(SECTION)
    await discovery.refresh(DiscoverySection())
    assert endpoints(discovery) == []


async def test_system_resolver_knows_this_machine() -> None:
    assert {"127.0.0.1", "::1"} & set(await resolve_addresses("localhost"))


async def test_node_joins_a_running_gateway_and_leaves_it(
    tmp_path: Path, neurons: Callable[..., Awaitable[FakeNeuron]]
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    resolver = Resolver()
    config = Config(
        gateway=GatewaySection(listen=Listen("127.0.0.1:0"), metrics_listen=None, poll_interval_s=0.05),
        discovery=DiscoverySection(dns="neurons.svc", port=urlsplit(beast.endpoint).port or 0, interval_s=0.05),
    )
    gateway = Gateway(config, Catalogue(), tmp_path, resolve=resolver)
    _, port = await gateway.start()
    try:
        async with ClientSession(headers=JSON) as session:
            client = Client(gateway, port, session)
            assert (await client.chat("a"))[0] == 404
            resolver.response = ["127.0.0.1"]
            await until(lambda: any(node.healthy for node in gateway.dispatcher.fleet.nodes))
            assert (await client.chat("a"))[0] == 200
            await gateway.reconfigure(config, Catalogue())  # as a reload of the file does
            assert (await client.chat("a"))[0] == 200
            resolver.response = []
            await until(lambda: not gateway.dispatcher.fleet.nodes)
            assert (await client.chat("a"))[0] == 404
    finally:
        await asyncio.wait_for(gateway.close(), WAIT_S)
