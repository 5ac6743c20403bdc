"""Which tenant nodes learn of a request, what foreign servers get of it, and where prompts of tenants are sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cortex.gateway.config import Config, NeuronSection
from cortex.gateway.dispatch.leases import Lease
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.gateway.proxy.outgoing_headers import kv_source
from cortex.http.ticker import Ticker
from cortex.routing.prefixes import leading_blocks
from cortex.wire.node.kv_blocks import SCOPE, read_source
from cortex.wire.node.neighbours import is_valid_ticket, key_hash, repository_of
from cortex.wire.node.protocol import HostKV, ModelState

from ...waiting import until
from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import FakeNeuron, StartNeuron
    from ..started_gateway import Client, StartGateway

READY = ModelState.READY
ANNA, BERT, CLEO = generate("anna"), generate("bert", group="lab"), generate("cleo", group="lab")
KEYED: dict[str, Any] = {
    "keys": tuple(key.section for key in (ANNA, BERT, CLEO)),
    "groups": (GroupSection(name="lab"),),
}
FORGED = {"x-cortex-tenant": "00" * 16}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")


def body_of(path: str, text: str = "hi", **more: Any) -> dict[str, Any]:
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    return {"model": "a", "max_tokens": 5, **prompt, **more}


async def tenants(client: Client, node: FakeNeuron) -> list[str | None]:
    """Those of three keys, as the node learns them."""
    node.seen.clear()
    for key in (ANNA, BERT, CLEO):
        status, _ = await client.post(PATHS[0], body_of(PATHS[0]), authorization=f"Bearer {key.text}", **FORGED)
        assert status == 200
    return [seen.headers.get("x-cortex-tenant") for seen in node.seen]


@pytest.mark.parametrize(("sharing", "num_tenants"), [("key", 3), ("group", 2), ("all", 0)])
async def test_node_learns_a_digest_of_those_who_share(
    neurons: StartNeuron, start_gateway: StartGateway, sharing: str, num_tenants: int
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, prefix_sharing=sharing, **KEYED)
    found = await tenants(client, beast)
    named = [tenant for tenant in found if tenant is not None]
    assert len(set(named)) == num_tenants
    assert len(named) == (3 if num_tenants else 0)
    assert all(len(tenant) == 32 and tenant not in FORGED.values() for tenant in named)
    assert (found[1] == found[2]) == (sharing != "key"), "bert and cleo are of one group"
    assert await tenants(await start_gateway(beast, prefix_sharing=sharing, **KEYED), beast) == found, "everywhere"


async def test_clients_of_an_open_gateway_have_no_tenant_whatever_they_send(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    assert (await client.post(PATHS[0], body_of(PATHS[0]), **FORGED))[0] == 200
    assert "x-cortex-tenant" not in beast.seen[0].headers


@pytest.mark.parametrize("path", PATHS)
async def test_foreign_server_gets_a_salt_of_the_tenant_only_where_it_reads_one(
    neurons: StartNeuron, start_gateway: StartGateway, path: str
) -> None:
    salts: dict[bool, list[Any]] = {}
    for reads in (True, False):
        server = await neurons("server", sizes={"a": GB})
        client = await start_gateway(foreign=(server,), foreign_options={"cache_salt": reads}, **KEYED)
        for key, more in ((ANNA, {}), (BERT, {}), (BERT, {"cache_salt": "mine"}), (ANNA, {})):
            status, reply = await client.post(path, body_of(path, **more), authorization=f"Bearer {key.text}")
            assert status == 200, reply
        assert all("x-cortex-tenant" not in seen.headers for seen in server.seen)
        salts[reads] = [msgspec.json.decode(seen.raw).get("cache_salt") for seen in server.seen]
    anna, bert, salted, again = salts[True]
    assert anna == again
    assert len({anna, bert, salted, "mine"}) == 4
    assert salts[False][:2] == [None, None]
    assert salts[False][2] is not None, "what the client itself sends is passed on"


def test_neuron_needs_no_salt() -> None:
    with pytest.raises(ValueError, match="remove cache_salt"):
        NeuronSection(name="n", endpoint="http://n:13131", cache_salt=True)
    assert Config().gateway.prefix_sharing == "key"


async def test_routing_finds_nothing_in_common_between_prompts_of_different_tenants(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, **KEYED)
    prompts: list[bytes] = []
    lease_now = client.gateway.dispatcher.lease_now

    def recorded(model: str, prompt: Callable[[], bytes], *more: Any) -> Any:
        prompts.append(prompt())
        return lease_now(model, prompt, *more)

    monkeypatch.setattr(client.gateway.dispatcher, "lease_now", recorded)
    asked: list[tuple[NewKey, dict[str, str]]] = [(ANNA, {}), (BERT, {}), (ANNA, {"cache_salt": "s"}), (ANNA, {})]
    for path in PATHS:
        prompts.clear()
        for key, more in asked:
            await client.post(path, body_of(path, "hi " * 2000, **more), authorization=f"Bearer {key.text}")
        anna, bert, salted, again = map(leading_blocks, prompts)
        assert anna == again
        assert len(anna) > 10
        assert len({*anna, *bert, *salted}) == 3 * len(anna)


async def test_node_that_gets_a_prompt_which_another_one_has_computed_learns_where_its_kv_is(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    nodes = [await neurons(name, sizes={"a": GB}, states={"a": READY}) for name in ("beast", "mini")]
    dispatcher = (await start_gateway(*nodes)).gateway.dispatcher
    ticker = Ticker(asyncio.get_running_loop())
    connect = partial(NodeClient, ticker=ticker, connect_timeout_s=1.0, idle_timeout_s=1.0)
    sections = [NeuronSection(name=node.name, endpoint=node.endpoint) for node in nodes]
    connected = {each.name: connect(each, key="its key") for each in sections}

    def lease(text: bytes, excluded: frozenset[str] = frozenset()) -> Lease:
        taken = dispatcher.lease_now("a", lambda: text, excluded)
        assert taken is not None
        dispatcher.release(taken)
        return taken

    prompt = bytes(range(256)) * 40
    first = lease(prompt)
    assert (first.kv_source, kv_source(first, connected)) == ("", ())
    assert lease(prompt).kv_source == "", "it goes to the same node"
    moved = lease(prompt, frozenset({first.node}))
    assert moved.node != first.node
    assert moved.kv_source == first.node
    ((name, value),) = kv_source(moved, connected)
    assert name == b"x-cortex-kv-source"
    named = read_source(value)
    assert named is not None
    assert named.name == first.node
    assert named.ticket is not None
    assert is_valid_ticket(named.ticket, key_hash("its key"), SCOPE, time.time())
    assert not is_valid_ticket(named.ticket, key_hash("another"), SCOPE, time.time())
    assert repository_of(SCOPE) is None, "a ticket for files of that name would open KV"
    far = connected[moved.node]
    connected[moved.node] = connect(NeuronSection(name=moved.node, endpoint="http://192.0.2.1:13131"), key=None)
    assert kv_source(moved, connected) == (), "from another host, a loopback address leads elsewhere"
    connected[moved.node] = far
    large = tmp_path / "authorities.pem"
    large.write_text("certificate\n" * 5000)
    connected[first.node] = connect(connected[first.node].section, key=None, ca_file=large)
    assert kv_source(moved, connected) == (), "no head of a request has room for it"
    assert lease(prompt, frozenset({first.node})).kv_source == "", "it has computed as much itself now"
    assert lease(b"short" * 100, frozenset({first.node})).kv_source == ""


async def test_prefix_on_the_disk_of_a_restarted_node_counts_once_it_has_loaded_the_model(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    nodes = {name: await neurons(name, sizes={"a": GB}, states={"a": READY}) for name in ("beast", "mini")}
    dispatcher = (await start_gateway(*nodes.values())).gateway.dispatcher

    def lease(text: bytes, without: str = "") -> Lease:
        taken = dispatcher.lease_now("a", lambda: text, frozenset({without}))
        assert taken is not None
        dispatcher.release(taken)
        return taken

    async def until_up(*names: str) -> None:
        await until(lambda: {node.name for node in dispatcher.fleet.nodes if node.healthy} == set(names))

    prompts = [bytes([number, *range(1, 256)]) * 40 for number in range(2)]
    for prompt in prompts:
        assert lease(prompt, "mini").node == "beast"
    beast = nodes["beast"]
    await beast.stop()
    await until_up("mini")
    assert lease(prompts[0]).kv_source == "", "it cannot be asked"
    beast.states["a"] = ModelState.COLD
    await beast.start(beast.port)
    await until_up("beast", "mini")
    beast.kv_host = HostKV(num_bytes=0, num_tokens=100_000)
    beast.states["a"] = READY
    await until(lambda: dispatcher.lease_now("a", lambda: b"", frozenset({"mini"})))
    assert lease(prompts[1], "beast").kv_source == "beast"
