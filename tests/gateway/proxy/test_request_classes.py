"""Which class nodes learn of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.wire.node.protocol import ModelState

from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway

PLAIN = generate("plain")
FLEX = generate("flex", request_class="flex")
BOUNDED = generate("bounded", highest_class="default")
OF_GROUP = generate("student", group="course")
KEYED: dict[str, Any] = {
    "keys": tuple(key.section for key in (PLAIN, FLEX, BOUNDED, OF_GROUP)),
    "groups": (GroupSection(name="course", request_class="idle", highest_class="flex"),),
}


@pytest.mark.parametrize(
    ("key", "fields", "expected"),
    [
        (PLAIN, {}, None),
        (PLAIN, {"service_tier": "priority"}, "priority"),
        (PLAIN, {"priority": 1}, "flex"),
        (FLEX, {}, "flex"),
        (FLEX, {"service_tier": "default"}, "default"),
        (BOUNDED, {"service_tier": "priority"}, "default"),
        (OF_GROUP, {}, "idle"),
        (OF_GROUP, {"priority": -1}, "flex"),
    ],
)
async def test_node_learns_the_class_of_key_and_request_and_never_one_that_a_client_forges(
    neurons: StartNeuron, start_gateway: StartGateway, key: NewKey, fields: dict[str, Any], expected: str | None
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(beast, **KEYED)
    body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], **fields}
    headers = {"authorization": f"Bearer {key.text}", "x-cortex-class": "priority"}
    status, _ = await client.post("/v1/chat/completions", body, **headers)
    assert status == 200
    assert beast.seen[-1].headers.get("x-cortex-class") == expected


async def test_unknown_tier_is_rejected(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(beast)
    body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "service_tier": "gold"}
    status, reply = await client.post("/v1/chat/completions", body)
    assert (status, reply["error"]["param"]) == (400, "service_tier")


@pytest.mark.parametrize(
    ("key", "path", "passed"),
    [
        (PLAIN, "/v1/chat/completions", ("priority", -1)),
        (BOUNDED, "/v1/chat/completions", (None, None)),
        (BOUNDED, "/v1/messages", (None, None)),
    ],
)
async def test_foreign_server_gets_no_class_beyond_that_of_the_key(
    neurons: StartNeuron, start_gateway: StartGateway, key: NewKey, path: str, passed: tuple[str | None, int | None]
) -> None:
    server = await neurons("server", sizes={"a": GB})
    client = await start_gateway(foreign=(server,), **KEYED)
    body: dict[str, Any] = {"model": "a", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/chat/completions":
        body |= {"service_tier": "priority", "priority": -1}
    status, reply = await client.post(path, body, authorization=f"Bearer {key.text}")
    assert status == 200, reply
    sent = msgspec.json.decode(server.seen[-1].raw)
    assert (sent.get("service_tier"), sent.get("priority")) == passed
