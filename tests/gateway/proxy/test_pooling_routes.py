"""Embeddings, rerank and scores through a gateway: on demand, metered, and rejected where a model cannot."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from cortex.gateway.ledger.keys import generate
from cortex.wire.events import Usage
from cortex.wire.node import usage_report
from cortex.wire.node.headers import DIMENSIONS
from cortex.wire.node.protocol import Capabilities, ModelState

from ..fake_neuron import GB, FakeNeuron, StartNeuron
from ..started_gateway import StartGateway

EMBEDDER = Capabilities(chat=False, embeddings=True)
RERANKER = Capabilities(chat=False, rerank=True)


async def pool(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    del node
    headers = {usage_report.HEADER: usage_report.header_value(Usage(prompt_tokens=7)), DIMENSIONS: "8"}
    return web.json_response({"model": body["model"], "data": []}, headers=headers)


@pytest.mark.parametrize(
    ("path", "model", "body"),
    [
        ("/v1/embeddings", "embedder", {"input": ["a", "b"]}),
        ("/v1/rerank", "reranker", {"query": "a", "documents": ["b"]}),
        ("/v1/score", "reranker", {"text_1": "a", "text_2": "b"}),
    ],
)
async def test_cold_model_is_loaded_and_its_tokens_are_metered(
    neurons: StartNeuron, start_gateway: StartGateway, path: str, model: str, body: dict[str, Any]
) -> None:
    capabilities = {"embedder": EMBEDDER, "reranker": RERANKER}
    beast = await neurons("beast", sizes={"embedder": GB, "reranker": GB}, capabilities=capabilities, respond=pool)
    key = generate("alice", window_tokens=30_000)
    client = await start_gateway(beast, keys=(key.section,))
    status, found = await client.post(path, {"model": model, **body}, Authorization=f"Bearer {key.text}")
    assert (status, found["model"]) == (200, model)
    assert beast.states[model] is ModelState.READY
    status, activity = await client.get("/fleet/activity", Authorization=f"Bearer {key.text}")
    [record] = activity["requests"]
    assert (record["path"], record["prompt_tokens"], record["completion_tokens"]) == (path, 7, 0)
    assert record["dimensions"] == 8


async def test_model_that_cannot_is_not_loaded_and_one_that_can_is_named(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    capabilities = {"embedder": EMBEDDER, "reranker": RERANKER, "chat": Capabilities()}
    beast = await neurons("beast", sizes=dict.fromkeys(capabilities, GB), capabilities=capabilities, respond=pool)
    client = await start_gateway(beast)
    for path, model, able in (
        ("/v1/embeddings", "chat", "embedder"),
        ("/v1/rerank", "chat", "reranker"),
        ("/v1/chat/completions", "embedder", "chat"),
    ):
        body = {"model": model, "input": "x", "query": "q", "documents": ["d"], "messages": []}
        status, rejected = await client.post(path, body)
        assert (status, rejected["error"]["code"]) == (400, "unsupported_modality")
        assert f"use {able}" in rejected["error"]["message"]
    assert not beast.load_requests


async def test_foreign_model_has_the_capability_once_it_served_such_a_request(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    accepts = False

    async def respond(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not accepts:
            return web.json_response({"error": {"message": "no embeddings here"}}, status=501)
        return await pool(node, request, body)

    def has_embeddings(models: Any) -> bool:
        return bool(models["data"][0]["capabilities"]["embeddings"])

    foreign = await neurons("foreign", sizes={"m": GB}, states={"m": ModelState.READY}, respond=respond)
    client = await start_gateway(foreign=(foreign,))
    body = {"model": "m", "input": "a"}
    assert not has_embeddings((await client.get("/v1/models"))[1])
    status, _ = await client.post("/v1/embeddings", body)
    assert status == 501, "it is tried"
    assert not has_embeddings((await client.get("/v1/models"))[1])
    accepts = True
    status, _ = await client.post("/v1/embeddings", body)
    assert status == 200
    await client.get_until("/v1/models", has_embeddings)
