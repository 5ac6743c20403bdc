"""Guessed keys, bodies that name two models, and conversations of others, against a running gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from cortex.gateway.ledger.keys import generate
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB

if TYPE_CHECKING:
    from ..gateway.fake_neuron import StartNeuron
    from ..gateway.started_gateway import StartGateway

PAGE = {"x-cortex-page": "1"}


async def test_guesses_of_keys_are_limited_and_lock_out_no_valid_key(
    start_gateway: StartGateway, scaled: Callable[[int, int], int]
) -> None:
    anna = generate("anna")
    client = await start_gateway(keys=(anna.section,))
    statuses, began_s = [], time.monotonic()
    for number in range(scaled(30, 3000)):
        body = msgspec.json.encode({"key": f"ck-00000000-{number}"})
        async with client.session.post(client.url + "/session", data=body, headers=PAGE) as response:
            statuses.append(response.status)
    assert set(statuses) == {401, 429}
    assert statuses.count(401) <= 20 * (1 + (time.monotonic() - began_s) // 60 + 1)
    assert (await client.get("/v1/models", authorization=f"Bearer {anna.text}"))[0] == 200


async def test_node_runs_the_model_that_was_checked_of_two(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    """What checks the key must not read one of them, and what runs it the other: the last one counts everywhere."""
    anna = generate("anna", models=("a",))
    states = {"a": ModelState.READY, "b": ModelState.READY}
    node = await neurons("node", sizes={"a": GB, "b": GB}, states=states)
    client = await start_gateway(node, keys=(anna.section,))
    headers = {"content-type": "application/json", "authorization": f"Bearer {anna.text}"}
    for names, expected in (
        ('"model":"a","model":"b"', 403),
        ('"model":"b","model":"a"', 200),
        ('"model":"a","\\u006dodel":"b"', 403),
    ):
        body = "{" + names + ',"messages":[{"role":"user","content":"hi"}]}'
        async with client.session.post(
            client.url + "/v1/chat/completions", data=body.encode(), headers=headers
        ) as response:
            assert response.status == expected, names
    [seen] = node.seen
    assert DIALECTS["openai_chat"].parse(seen.raw).model == "a"


async def test_conversations_and_their_items_cannot_be_guessed(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    anna, eve = generate("anna"), generate("eve")
    node = await neurons("node", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(node, keys=(anna.section, eve.section))
    own, other = ({"authorization": f"Bearer {key.text}"} for key in (anna, eve))
    items = [{"role": "user", "content": "a secret"}]
    _, made = await client.post("/v1/conversations", {"items": items}, **own)
    path = f"/v1/conversations/{made['id']}"
    item_id = (await client.get(f"{path}/items", **own))[1]["data"][0]["id"]
    targets = (path, f"{path}/items", f"{path}/items/{item_id}", f"{path}/../{made['id']}", f"{path}%2fitems")
    for target in targets:
        status, body = await client.get(target, **other)
        assert status == 404, target
        assert "a secret" not in str(body)
    for field in ("conversation", "previous_response_id"):
        status, body = await client.post("/v1/responses", {"model": "a", "input": "?", field: made["id"]}, **other)
        assert status in (400, 404), field
    assert node.seen == []
