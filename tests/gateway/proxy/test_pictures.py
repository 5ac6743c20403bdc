"""Pictures through a gateway: relayed, translated, counted as tokens, and sent where they are read."""

from __future__ import annotations

from typing import Any

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.ledger.keys import generate
from cortex.wire.node.protocol import Capabilities, ModelState

from ...picture_files import base64_of, data_url, picture
from ..fake_neuron import GB, StartNeuron
from ..started_gateway import StartGateway

SEES = Capabilities(tools=True, vision=True)
FILE = picture(640, 480)
NOISY = picture(640, 480, kind="JPEG", comment=b"x" * 60_000)
"""Many bytes, few tokens."""


def chat(model: str, *files: bytes) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    return {"model": model, "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}


def messages(model: str, *files: bytes) -> dict[str, Any]:
    sources = [{"type": "base64", "media_type": "image/png", "data": base64_of(file)} for file in files]
    content = [{"type": "image", "source": source} for source in sources]
    return {"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": content}]}


async def test_model_without_a_tower_names_those_that_the_key_may_use(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    capabilities = {"blind": Capabilities(tools=True), "seer": SEES, "other-seer": SEES}
    beast = await neurons("beast", sizes=dict.fromkeys(capabilities, GB), capabilities=capabilities)
    alice, bob = generate("alice"), generate("bob", models=("blind", "seer"))
    client = await start_gateway(beast, keys=(alice.section, bob.section))
    for path, body in (("/v1/chat/completions", chat("blind", FILE)), ("/v1/messages", messages("blind", FILE))):
        status, rejected = await client.post(path, body, Authorization=f"Bearer {alice.text}")
        assert status == 400
        assert "blind reads text only" in rejected["error"]["message"]
        assert "other-seer, seer" in rejected["error"]["message"]
        status, rejected = await client.post(path, body, Authorization=f"Bearer {bob.text}")
        assert "send them to seer, or" in rejected["error"]["message"]
    assert not beast.load_requests
    status, _ = await client.post("/v1/chat/completions", chat("blind"), Authorization=f"Bearer {bob.text}")
    assert status == 200


async def test_rejected_picture_is_said_to_be_in_the_field_of_its_dialect(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(await neurons("a", sizes={"m": GB}, capabilities={"m": Capabilities(tools=True)}))
    image = {"type": "input_image", "image_url": data_url(FILE)}
    asked = {"model": "m", "input": [{"role": "user", "content": [image]}]}
    for path, body, param in (
        ("/v1/responses", asked, "input"),
        ("/v1/chat/completions", chat("m", FILE), "messages"),
    ):
        status, rejected = await client.post(path, body)
        assert (status, rejected["error"]["param"]) == (400, param)


async def test_replica_with_the_tower_is_preferred(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    ready = {"m": ModelState.READY}
    blind = await neurons("a-blind", sizes={"m": GB}, states=ready, capabilities={"m": Capabilities(tools=True)})
    seer = await neurons("b-seer", sizes={"m": GB}, states=dict(ready), capabilities={"m": SEES})
    client = await start_gateway(blind, seer)
    for _ in range(3):
        status, _ = await client.post("/v1/chat/completions", chat("m", FILE))
        assert status == 200
    assert [len(node.seen) for node in (blind, seer)] == [0, 3]
    _, listed = await client.get("/v1/models")
    assert listed["data"][0]["capabilities"]["vision"]
    for _ in range(3):
        await client.post("/v1/chat/completions", chat("m"))
    assert blind.seen


async def test_other_servers_get_pictures_in_their_dialect(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    other = await neurons("other", sizes={"m": GB}, states={"m": ModelState.READY}, dialects=("openai_chat",))
    client = await start_gateway(foreign=(other,))
    result = {"type": "tool_result", "tool_use_id": "t", "content": messages("m", FILE)["messages"][0]["content"]}
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]},
            {"role": "user", "content": [result]},
        ],
    }
    status, reply = await client.post("/v1/messages", body)
    assert status == 200, reply
    sent = other.seen[-1].body["messages"]
    assert sent[-1]["role"] == "tool"
    assert sent[-1]["content"] == [{"type": "image_url", "image_url": {"url": data_url(FILE)}}]


async def test_budget_counts_tokens_of_pictures_and_not_their_bytes(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"m": GB}, states={"m": ModelState.READY}, capabilities={"m": SEES})
    key = generate("alice", window_tokens=5000)
    client = await start_gateway(beast, keys=(key.section,))
    body = chat("m", NOISY) | {"max_tokens": 100}
    for _ in range(2):
        status, reply = await client.post("/v1/chat/completions", body, Authorization=f"Bearer {key.text}")
        assert status == 200, reply
    limits = [int(seen.headers["x-cortex-token-limit"]) for seen in beast.seen]
    assert all(500 < limit <= 5000 for limit in limits)
    tight = generate("bob", window_tokens=300)
    client = await start_gateway(beast, keys=(tight.section,))
    status, reply = await client.post("/v1/chat/completions", body, Authorization=f"Bearer {tight.text}")
    assert status == 200
    assert int(beast.seen[-1].headers["x-cortex-token-limit"]) <= 300  # the node counts and rejects


async def test_screenshots_of_megabytes_are_relayed_unchanged(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"m": GB}, states={"m": ModelState.READY}, capabilities={"m": SEES})
    client = await start_gateway(beast)
    padded = FILE + bytes(3_000_000)
    status, reply = await client.post("/v1/messages", messages("m", padded, FILE))
    assert status == 200, reply
    assert beast.seen[-1].body == messages("m", padded, FILE)


async def test_what_another_server_reads_is_not_known_unless_the_catalogue_says_it(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    other = await neurons("other", sizes={"a": GB, "b": GB}, dialects=("openai_chat",))
    other.states |= {"a": ModelState.READY, "b": ModelState.READY}
    listed = Catalogue(models=(ModelSpec(id="b", capabilities=("chat",)),))
    client = await start_gateway(foreign=(other,), catalogue=listed)
    assert (await client.post("/v1/chat/completions", chat("a", FILE)))[0] == 200
    assert (await client.post("/v1/chat/completions", chat("b", FILE)))[0] == 400
