"""Ollama's listings, pulls and deletions of a fleet."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.ledger.keys import generate
from cortex.settings import Listen
from cortex.wire.dialects.ollama import models
from cortex.wire.node.protocol import ModelState, ModelStatus, Progress, PullStatus

from ....waiting import until
from ...fake_neuron import GB

if TYPE_CHECKING:
    from ...fake_neuron import FakeNeuron, StartNeuron
    from ...started_gateway import Client, StartGateway

READY = ModelState.READY
CATALOGUE = Catalogue(
    models=(ModelSpec(id="org/big"), ModelSpec(id="org/gguf", quant="Q4_K_M")), aliases={"big": "org/big"}
)


@pytest.fixture
async def node(neurons: StartNeuron) -> FakeNeuron:
    return await neurons("beast", sizes={"org/big": 10 * GB, "org/cold-8B": GB}, states={"org/big": READY})


@pytest.fixture
async def client(node: FakeNeuron, start_gateway: StartGateway) -> Client:
    return await start_gateway(node, catalogue=CATALOGUE)


async def test_lists_what_the_fleet_has_and_what_is_loaded(client: Client) -> None:
    tags = (await client.get("/api/tags"))[1]["models"]
    assert [model["name"] for model in tags] == ["big", "org/big", "org/cold-8B", "org/gguf"]
    assert tags[2]["details"]["parameter_size"] == "8B"
    assert tags[3]["details"]["quantization_level"] == "Q4_K_M"
    loaded = (await client.get("/api/ps"))[1]["models"]
    assert [(model["name"], model["size_vram"]) for model in loaded] == [("big", 10 * GB), ("org/big", 10 * GB)]
    assert "tools" in tags[0]["capabilities"]


async def test_digest_is_that_of_the_node_that_has_read_all_files(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [await neurons(name, sizes={"m": GB}) for name in ("a", "b")]
    monkeypatch.setattr(
        type(nodes[0]),
        "status",
        lambda node, _: ModelStatus(
            id="m",
            state=ModelState.COLD,
            estimate_bytes=GB,
            digest="of a sample",
            content_digest="of all bytes" if node.name == "b" else "",
        ),
    )
    client = await start_gateway(*nodes)
    (model,) = (await client.get("/api/tags"))[1]["models"]
    assert model["digest"] == models.digest("of all bytes", None)


@pytest.mark.parametrize("name", ["org/big", "big", "big:latest", "hf.co/org/big", "hf.co/org/gguf:q4_k_m"])
async def test_shows_a_model_under_every_spelling(client: Client, name: str) -> None:
    status, shown = await client.post("/api/show", {"model": name})
    assert status == 200
    assert shown["capabilities"]


@pytest.mark.parametrize("template", ["{{ messages }}", ""])
async def test_shows_the_template_that_a_node_knows_else_none(client: Client, node: FakeNeuron, template: str) -> None:
    if template:
        node.templates["org/big"] = template
    status, shown = await client.post("/api/show", {"model": "big"})
    assert (status, shown["template"]) == (200, template)


async def test_loaded_model_with_a_ttl_expires_and_others_do_not(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    names = ("brief", "kept", "pinned")
    node = await neurons("beast", sizes=dict.fromkeys(names, GB), states=dict.fromkeys(names, READY))
    specs = (ModelSpec(id="brief", ttl_s=600), ModelSpec(id="kept"), ModelSpec(id="pinned", ttl_s=600, load="pinned"))
    client = await start_gateway(node, catalogue=Catalogue(models=specs))
    before = time.time()
    loaded = {each["name"]: each["expires_at"] for each in (await client.get("/api/ps"))[1]["models"]}
    assert before < datetime.fromisoformat(loaded["brief"]).timestamp() <= time.time() + 600
    assert {loaded["kept"], loaded["pinned"]} == {models.NEVER}
    client.gateway.dispatcher.keep("brief", 6000)
    loaded = {each["name"]: each["expires_at"] for each in (await client.get("/api/ps"))[1]["models"]}
    assert datetime.fromisoformat(loaded["brief"]).timestamp() > before + 5000, "a request keeps it for longer"


async def test_unlisted_models_are_served_and_listed_only_on_request(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    names = ("hidden", "shown")
    node = await neurons("beast", sizes=dict.fromkeys(names, GB), states=dict.fromkeys(names, READY))
    specs = (
        ModelSpec(id="hidden", unlisted=True),
        ModelSpec(id="shown", display_name="Shown 7B", description="For drafts"),
    )
    client = await start_gateway(node, catalogue=Catalogue(models=specs, aliases={"secret": "hidden"}))
    [shown] = (await client.get("/v1/models"))[1]["data"]
    assert (shown["id"], shown["display_name"], shown["name"]) == ("shown", "Shown 7B", "Shown 7B")
    assert shown["description"] == "For drafts"
    assert [each["id"] for each in (await client.get("/models"))[1]["data"]] == ["shown"]
    for path in ("/api/tags", "/api/ps"):
        assert [each["name"] for each in (await client.get(path))[1]["models"]] == ["shown"]
    every = (await client.get("/v1/models?unlisted=true"))[1]["data"]
    assert [(each["id"], "name" in each) for each in every] == [("hidden", False), ("secret", False), ("shown", True)]
    assert (await client.get("/v1/models/hidden"))[0] == 200
    message = {"role": "user", "content": "hi"}
    assert (await client.post("/v1/chat/completions", {"model": "secret", "messages": [message]}))[0] == 200


async def test_other_quantisations_are_other_models(client: Client) -> None:
    assert (await client.post("/api/show", {"model": "hf.co/org/gguf:Q8_0"}))[0] == 404


async def test_root_and_absent_routes(client: Client) -> None:
    async with client.session.get(client.url + "/", headers={"host": "localhost:11434"}) as response:
        assert await response.text() == "Ollama is running"
    for agent in ("ollama/0.33.0 (amd64 linux) Go/go1.24", "ollama-python/0.6.1 (x86_64 linux) Python/3.11"):
        async with client.session.get(client.url + "/", headers={"user-agent": agent}) as response:
            assert await response.text() == "Ollama is running"
    async with client.session.get(client.url + "/", headers={"host": "h:11434", "accept": "text/html"}) as response:
        assert response.content_type == "text/html"
    async with client.session.get(client.url + "/") as response:
        assert response.content_type == "application/json"
    async with client.session.head(client.url + "/api/tags") as response:
        assert response.status == 200
    status, reply = await client.post("/api/push", {})
    assert (status, reply["code"]) == (501, "not_implemented")
    assert (await client.post("/api/other", {}))[0] == 404
    assert (await client.post("/api/tags", {}))[0] == 405


async def test_pull_follows_the_job(client: Client, node: FakeNeuron) -> None:
    async with client.session.post(client.url + "/api/pull", json={"model": "hf.co/org/new:Q4_K_M"}) as response:
        assert json.loads(await response.content.readline()) == {"status": "pulling manifest"}
        line = json.loads(await response.content.readline())
        assert (line["completed"], line["total"]) == (30, 100)
        progress = Progress(stage="download", done_bytes=60, total_bytes=100)
        node.pull = PullStatus(model_id="org/new", state="running", progress=progress)
        assert json.loads(await response.content.readline())["completed"] == 60
        node.pull = PullStatus(model_id="org/new", state="done")
        assert json.loads(await response.content.readline()) == {"status": "success"}
    assert [(pull.model_id, pull.quant) for pull in node.pull_requests] == [("org/new", "Q4_K_M")]
    status, reply = await client.post("/api/pull", {"model": "nonsense", "stream": False})
    assert (status, reply["code"]) == (404, "model_not_found")
    assert "OWNER/NAME" in reply["error"]


async def test_pull_without_a_stream_responds_at_its_end(client: Client, node: FakeNeuron) -> None:
    pulling = asyncio.create_task(client.post("/api/pull", {"model": "org/new", "stream": False}))
    await until(lambda: node.pull_requests)
    node.pull = PullStatus(model_id="org/new", state="failed", code="source_not_found", reason="no such repository")
    status, reply = await pulling
    assert (status, reply["error"]) == (502, "no such repository")


async def test_delete_needs_files(client: Client) -> None:
    async with client.session.delete(client.url + "/api/delete", json={"model": "org/gguf"}) as response:
        assert response.status == 404
        assert "No node has files" in msgspec.json.decode(await response.read())["error"]


async def test_deletes_what_is_named_and_nothing_that_it_stands_for(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    one = await neurons("one", sizes={"org/a": GB}, quants_on_disk={"org/a": "Q4_K_M"})
    other = await neurons("other", sizes={"org/a": GB}, quants_on_disk={"org/a": "Q8_0"})
    client = await start_gateway(one, other, catalogue=Catalogue(aliases={"a": "org/a", "gpt-*": "org/a"}))

    async def delete(name: str) -> int:
        async with client.session.delete(client.url + "/api/delete", json={"model": name}) as response:
            return response.status

    for name in ("a", "a:latest", "gpt-4", "org/a:Q6_K"):
        assert await delete(name) == 404, name
    assert not one.delete_requests + other.delete_requests
    assert await delete("hf.co/org/a:Q8_0") == 200
    assert not one.delete_requests
    assert [(each.model_id, each.quant) for each in other.delete_requests] == [("org/a", "Q8_0")]
    assert await delete("org/a") == 200
    assert one.delete_requests[0].quant is None


async def test_names_of_others_reach_only_listings_without_a_key(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node, catalogue=CATALOGUE, listen=Listen("0.0.0.0:0"), open=True)
    rebound = {"host": "evil.example"}
    assert (await client.get("/api/tags", **rebound))[0] == 200
    assert (await client.post("/api/show", {"model": "big"}, **rebound))[0] == 200
    status, reply = await client.post("/api/pull", {"model": "org/new"}, **rebound)
    assert (status, reply["code"]) == (403, "cross_site_request")
    async with client.session.delete(
        client.url + "/api/delete", json={"model": "org/big"}, headers=rebound
    ) as response:
        assert response.status == 403
    assert not node.pull_requests


async def test_keys_are_needed_unless_the_listing_is_open(node: FakeNeuron, start_gateway: StartGateway) -> None:
    key = generate("user", models=("org/big",))
    closed = await start_gateway(node, keys=(key.section,))
    for path in ("/api/version", "/api/tags", "/v1/models"):
        assert (await closed.get(path))[0] == 401
    status, reply = await closed.get("/api/tags")
    assert (status, reply["code"]) == (401, "invalid_api_key")
    opened = await start_gateway(node, keys=(key.section,), open_listing=True)
    assert (await opened.get("/api/version"))[0] == 200
    assert len((await opened.get("/api/tags"))[1]["models"]) == 2
    assert len((await opened.get("/v1/models"))[1]["data"]) == 2
    assert (await opened.post("/api/show", {"model": "org/cold-8B"}))[0] == 200
    bearer = {"authorization": f"Bearer {key.text}"}
    assert [model["name"] for model in (await opened.get("/api/tags", **bearer))[1]["models"]] == ["org/big"]
    assert (await opened.get("/api/tags", authorization="Bearer wrong"))[0] == 401
    for path in ("/api/chat", "/api/pull"):
        assert (await opened.post(path, {"model": "org/big"}))[0] == 401
