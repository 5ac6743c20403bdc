"""What a key with a list of models learns about other models: nothing, from any route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.wire.node.headers import PRINCIPAL
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB, FakeNeuron

if TYPE_CHECKING:
    from ..gateway.fake_neuron import StartNeuron
    from ..gateway.started_gateway import Client, StartGateway

SAID = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
POSTED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": SAID, "max_tokens": 5},
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v1/audio/speech": {"input": "x"},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/api/chat": {"messages": SAID},
    "/api/chat?load": {},
    "/api/show": {},
}
GOT = ["/v1/models/{}", "/props?model={}", "/fleet/explain/{}"]


@pytest.fixture
def alice() -> NewKey:
    return generate("alice", models=("a", "own-*"), balance_tokens=3000)


@pytest.fixture
async def client(neurons: StartNeuron, alice: NewKey, start_gateway: StartGateway) -> Client:
    states = {"a": ModelState.READY, "secret": ModelState.READY}
    node = await neurons("beast", sizes={"a": GB, "secret": GB, "cold": GB}, states=states)
    models = (ModelSpec(id="cold", tokens_per_request=5000), ModelSpec(id="own-1"), ModelSpec(id="secret"))
    aliases = {"fast": "secret", "own-alias": "secret", "mine": "a"}
    catalogue = Catalogue(models=models, aliases=aliases)  # type: ignore[arg-type]
    return await start_gateway(node, keys=(alice.section,), catalogue=catalogue)


async def asked(client: Client, key: NewKey, path: str, name: str) -> tuple[int, str]:
    """The status and the text of the response, with a mark in place of the name that was asked for."""
    headers = {"authorization": f"Bearer {key.text}", "content-type": "application/json"}
    if path in POSTED:
        body = {"model": name, **POSTED[path]}
        sending = client.session.post(client.url + path.partition("?")[0], json=body, headers=headers)
    else:
        sending = client.session.get(client.url + path.format(name), headers=headers)
    async with sending as response:
        return response.status, (await response.text()).replace(name, "NAME")


@pytest.mark.parametrize("path", [*POSTED, *GOT])
async def test_models_beyond_the_list_are_as_those_that_do_not_exist(client: Client, alice: NewKey, path: str) -> None:
    absent = await asked(client, alice, path, "nowhere")
    assert absent[0] in (403, 404)
    for name in ("secret", "cold", "fast", "secret:latest"):
        found = await asked(client, alice, path, name)
        assert found == absent, name
        assert "secret" not in found[1]


@pytest.mark.parametrize("path", [*POSTED, *GOT])
async def test_alias_within_the_list_hides_a_target_beyond_it(client: Client, alice: NewKey, path: str) -> None:
    absent = await asked(client, alice, path, "own-nothing")
    found = await asked(client, alice, path, "own-alias")
    assert found == absent
    assert found[0] == 404
    assert "secret" not in found[1]


async def test_alias_of_a_model_in_the_list_is_served(client: Client, alice: NewKey) -> None:
    for name in ("a", "mine"):
        assert (await asked(client, alice, CHAT, name))[0] == 200


async def test_error_suggests_models_of_the_key_only(client: Client, alice: NewKey) -> None:
    status, text = await asked(client, alice, CHAT, "own-2")
    assert (status, "own-1" in text) == (404, True), text


async def test_foreign_server_learns_nothing_about_the_client(
    neurons: StartNeuron, alice: NewKey, start_gateway: StartGateway
) -> None:
    foreign: FakeNeuron = await neurons("foreign", sizes={"a": GB})
    client = await start_gateway(foreign=(foreign,), keys=(alice.section,))
    for path in (CHAT, "/v1/messages", "/v1/embeddings", "/v1/audio/speech"):
        status, text = await asked(client, alice, path, "a")
        assert status == 200, text
        sent = foreign.seen[-1].headers
        assert PRINCIPAL not in sent
        assert not [name for name in sent if name.startswith("x-cortex")]
        assert "alice" not in str(sent)
