"""Operators delete what nodes keep of prompts: by model, key, group and age."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.keys import PrefixSharing, generate
from cortex.wire.node.orders import ForgetBlocksRequest
from cortex.wire.node.protocol import ModelState

from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway

OPERATOR, ANNA, BERT = generate("operator", operator=True), generate("anna"), generate("bert", group="lab")
AS_OPERATOR = f"Bearer {OPERATOR.text}"
KEYED: dict[str, Any] = {
    "keys": tuple(key.section for key in (OPERATOR, ANNA, BERT)),
    "groups": (GroupSection(name="lab"),),
}


@pytest.mark.parametrize("sharing", ["key", "group"])
async def test_forgets_the_prompts_of_a_key_as_nodes_know_it(
    neurons: StartNeuron, start_gateway: StartGateway, sharing: PrefixSharing
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(beast, **KEYED, prefix_sharing=sharing)
    for key in (ANNA, BERT):
        body = {"model": "a", "prompt": "hi", "max_tokens": 1}
        assert (await client.post("/v1/completions", body, authorization=f"Bearer {key.text}"))[0] == 200
        status, found = await client.post("/fleet/forget", {"key": key.section.name}, authorization=AS_OPERATOR)
        assert (status, found["nodes"]) == (200, [{"node": "beast", "files": 2, "bytes": 3 * GB, "error": None}])
        tenant = beast.seen[-1].headers["x-cortex-tenant"]
        assert any(tenant.startswith(each) for each in beast.forget_requests[-1].tenants)
    anna, bert = (set(request.tenants) for request in beast.forget_requests)
    assert not anna & bert


async def test_forgets_by_model_and_age_on_all_nodes_and_says_which_did_not(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    nodes = [await neurons(name, sizes={"a": GB}) for name in ("beast", "mini")]
    client = await start_gateway(*nodes, **KEYED)
    wanted = {"model": "a", "unused_s": 60, "tenant": "00112233"}
    assert (await client.post("/fleet/forget", wanted | {"node": "mini"}, authorization=AS_OPERATOR))[0] == 200
    assert nodes[1].forget_requests == [ForgetBlocksRequest("a", ("00112233",), 60.0)]
    await nodes[1].stop()
    status, found = await client.post("/fleet/forget", {"everything": True}, authorization=AS_OPERATOR)
    assert status == 200
    assert nodes[0].forget_requests == [ForgetBlocksRequest()]
    errors = {each["node"]: each["error"] for each in found["nodes"]}
    assert errors["beast"] is None
    assert "no connection to" in errors["mini"]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({}, 400, "everything"),
        ({"node": "beast"}, 400, "everything"),
        ({"key": "nobody"}, 400, "no key nobody"),
        ({"tenant": "anna"}, 400, "tenant"),
        ({"everything": True, "node": "attic"}, 404, "no node attic"),
        ({"modle": "a"}, 400, "modle"),
    ],
)
async def test_rejects_what_would_forget_something_else(
    neurons: StartNeuron, start_gateway: StartGateway, body: dict[str, Any], status: int, reason: str
) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(beast, **KEYED)
    found = await client.post("/fleet/forget", body, authorization=AS_OPERATOR)
    assert found[0] == status
    assert reason in found[1]["error"]["message"]
    denied = await client.post("/fleet/forget", {"everything": True}, authorization=f"Bearer {ANNA.text}")
    assert denied[0] == 403
    assert not beast.forget_requests


async def test_key_has_nothing_of_its_own_where_everybody_shares(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(beast, **KEYED, prefix_sharing="all")
    status, found = await client.post("/fleet/forget", {"key": "anna"}, authorization=AS_OPERATOR)
    assert (status, beast.forget_requests) == (400, [])
    assert "prefix_sharing" in found["error"]["message"]
