"""The latest requests: what is kept of them, who sees which, and what is never kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.gateway.config import ActivitySection
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.wire.node.protocol import ModelState

from ...waiting import WAIT_S, until
from ..fake_neuron import GB
from ..fake_responses import hang

if TYPE_CHECKING:
    from ..fake_neuron import FakeNeuron, StartNeuron
    from ..started_gateway import StartGateway


READY = ModelState.READY
SECRET = "my card is 4111 1111 1111 1111"


def bearer(key: NewKey) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.text}"}


async def test_finished_requests_are_listed_newest_first_with_their_numbers(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB, "b": GB}, states={"a": READY})
    client = await start_gateway(beast)
    body = {"model": "a", "messages": [{"role": "user", "content": SECRET}], "stream": True}
    await client.stream("/v1/chat/completions", body)
    assert (await client.chat("b"))[0] == 200, "loaded for it"
    assert (await client.chat("nowhere"))[0] == 404
    status, page = await client.get("/fleet/activity")
    assert status == 200
    rejected, loaded, streamed = page["requests"]
    assert (streamed["model"], streamed["node"], streamed["status"]) == ("a", "beast", 200)
    assert (streamed["dialect"], streamed["outcome"], streamed["key"]) == ("openai_chat", "complete", "anonymous")
    tokens = ("prompt_tokens", "cached_tokens", "completion_tokens")
    assert [streamed[name] for name in tokens] == [7, 4, 3]
    assert 0 <= streamed["ttft_s"] <= streamed["duration_s"]
    assert streamed["tokens_per_s"] > 0
    assert streamed["reason"] == "the only replica that is ready"
    assert streamed["load_s"] == 0
    assert loaded["load_s"] > 0
    assert loaded["reason"] == "the model was loaded there"
    assert (rejected["status"], rejected["error"], rejected["model"]) == (404, "model_not_found", "nowhere")
    assert [record["number"] for record in page["requests"]] == [3, 2, 1]
    assert page["next"] == 3
    status, one = await client.get(f"/fleet/activity/{streamed['id']}")
    assert (status, one["id"]) == (200, streamed["id"])
    for text in (page, one):
        assert SECRET not in msgspec.json.encode(text).decode(), "prompts are not kept"
    assert (await client.get("/fleet/activity/unknown"))[0] == 404


@pytest.mark.parametrize(
    ("query", "models"),
    [
        ("?limit=1", ["b"]),
        ("?after=1", ["b", "none"]),
        ("?before=2", ["a"]),
        ("?model=a", ["a"]),
        ("?model=*", ["b", "none", "a"]),
        ("?key=anonymous&status=200", ["b", "a"]),
        ("?key=somebody", []),
        ("?status=4xx", ["none"]),
        ("?status=error", ["none"]),
        ("?status=ok", ["b", "a"]),
    ],
)
async def test_list_is_filtered_by_the_query(
    neurons: StartNeuron, start_gateway: StartGateway, query: str, models: list[str]
) -> None:
    beast = await neurons("beast", sizes={"a": GB, "b": GB}, states={"a": READY, "b": READY})
    client = await start_gateway(beast)
    for model in ("a", "none", "b"):
        await client.chat(model)
    _, page = await client.get("/fleet/activity" + query)
    assert [record["model"] for record in page["requests"]] == models


@pytest.mark.parametrize("query", ["?limit=x", "?after=-1", "?status=fast", "?status=²00"])
async def test_invalid_filter_is_rejected_by_name(start_gateway: StartGateway, query: str) -> None:
    client = await start_gateway()
    status, body = await client.get("/fleet/activity" + query)
    assert status == 400
    assert body["error"]["param"] == query[1:].partition("=")[0]


async def test_only_as_many_requests_are_kept_as_configured(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, activity=ActivitySection(requests=2))
    for _ in range(3):
        await client.chat("a")
    _, page = await client.get("/fleet/activity")
    assert [record["number"] for record in page["requests"]] == [3, 2]


async def test_key_sees_only_its_own_requests_without_nodes(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    anna, bert, olga = generate("anna"), generate("bert"), generate("olga", operator=True)
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, keys=(anna.section, bert.section, olga.section))
    async with client.session.get(client.url + "/fleet/activity/events", headers=bearer(anna)) as live:
        for key in (bert, anna):
            await client.post("/v1/chat/completions", {"model": "a", "messages": []}, **bearer(key))
        await client.post("/v1/chat/completions", {"model": "a", "messages": []}, Authorization="Bearer ck-nobody")
        await live.content.readuntil(b"\n\n")
        async with asyncio.timeout(WAIT_S):
            while (frame := await live.content.readuntil(b"\n\n")).startswith(b": "):
                pass  # a keepalive
    event, data = frame.strip().split(b"\n")
    assert (event, msgspec.json.decode(data[6:])["key"]) == (b"event: request", "anna"), "the first is not shown to her"
    _, page = await client.get("/fleet/activity", **bearer(anna))
    (own,) = page["requests"]
    assert (own["key"], own["node"], own["reason"]) == ("anna", None, None)
    _, page = await client.get("/fleet/activity", **bearer(olga))
    assert [record["key"] for record in page["requests"]] == ["anna", "bert"], (
        "an unauthenticated request is not recorded"
    )
    bert_id = page["requests"][1]["id"]
    assert (await client.get(f"/fleet/activity/{bert_id}", **bearer(anna)))[0] == 404
    assert (await client.get("/fleet/activity"))[0] == 401


async def test_captures_are_bounded_redacted_and_removable(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    section = ActivitySection(capture=True, capture_kb=1, redact=(r"\d{4}( \d{4}){3}",))
    client = await start_gateway(beast, activity=section)
    text = SECRET + "x" * 5000
    body = {"model": "a", "messages": [{"role": "user", "content": text}]}
    assert (await client.post("/v1/chat/completions", body))[0] == 200
    _, page = await client.get("/fleet/activity")
    (record,) = page["requests"]
    assert record["capture"] is True, "the list has no texts"
    _, one = await client.get(f"/fleet/activity/{record['id']}")
    capture = one["capture"]
    assert "my card is [redacted]" in capture["request"]
    assert len(capture["request"]) == 1024
    assert capture["request_bytes"] > 5000
    assert "from beast" in capture["response_end"]
    async with client.session.delete(f"{client.url}/fleet/activity/{record['id']}") as response:
        assert response.status == 200
    assert (await client.get(f"/fleet/activity/{record['id']}"))[0] == 404


async def test_disconnected_request_is_recorded_with_the_usage_of_its_node(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def never(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await hang()

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=never)
    client = await start_gateway(beast)
    request = asyncio.create_task(client.post("/v1/chat/completions", {"model": "a", "messages": []}))
    await until(lambda: beast.seen)
    request.cancel()
    await until(lambda: client.gateway.metrics and beast.seen[0].ended)
    page: dict[str, Any] = {"requests": []}
    while not page["requests"]:
        _, page = await client.get("/fleet/activity")
    (record,) = page["requests"]
    assert record["outcome"] == "client_disconnected"
