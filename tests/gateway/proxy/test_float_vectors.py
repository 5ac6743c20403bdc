"""Vectors that travel as bytes and reach the client as floats."""

from __future__ import annotations

import struct
from base64 import b64encode
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from cortex.foreign.embeddings import MAX_VECTOR_BYTES, FloatVectors
from cortex.gateway.ledger.keys import generate
from cortex.http.upstream.faults import MalformedResponse, ResponseTooLarge
from cortex.wire.node.headers import AS_BASE64, VECTORS
from cortex.wire.node.protocol import Capabilities
from cortex.wire.pooling.request import PoolingRequest
from cortex.wire.pooling.response import embeddings_body

from ..fake_neuron import GB, FakeNeuron, StartNeuron
from ..started_gateway import StartGateway

PATHS = {"openai": "/v1/embeddings", "tei_embed": "/embed"}


def body_of(shape: Any, vectors: list[list[float]], *, as_base64: bool) -> bytes:
    request = PoolingRequest('a "model" with "embedding":"', shape, as_base64=as_base64)
    data = b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in vectors)
    return b"".join(embeddings_body(request, data, len(vectors), 7))


@given(
    shape=st.sampled_from(sorted(PATHS)),
    vectors=st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=1
    ),
    cuts=st.lists(st.integers(0, 400)),
)
def test_response_is_the_one_with_floats_however_it_arrives(
    shape: str, vectors: list[list[float]], cuts: list[int]
) -> None:
    encoded = body_of(shape, vectors, as_base64=True)
    ends = [*sorted(cut for cut in cuts if cut < len(encoded)), len(encoded)]
    translation, start, written = FloatVectors(PATHS[shape]), 0, b""
    for end in ends:
        written += translation.push(encoded[start:end])
        start = end
    assert written + translation.finish() == body_of(shape, vectors, as_base64=False)


def test_damaged_vectors_are_faults_of_the_node() -> None:
    with pytest.raises(MalformedResponse, match="could not be read"):
        FloatVectors("/v1/embeddings").push(b'{"embedding":"%%%"}')
    cut = FloatVectors("/v1/embeddings")
    cut.push(b'{"embedding":"AAAA')
    with pytest.raises(MalformedResponse, match="ends inside"):
        cut.finish()
    with pytest.raises(ResponseTooLarge):
        FloatVectors("/embed").push(b'["' + b"A" * (MAX_VECTOR_BYTES + 1))


async def respond(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As a node does: as bytes for a gateway that asks for them."""
    del node
    assert body.get("encoding_format") != "base64"
    assert request.headers[VECTORS] == AS_BASE64
    vector = b64encode(struct.pack("<2f", 0.5, -1.0)).decode()
    data = [{"object": "embedding", "index": 0, "embedding": vector}]
    raw = msgspec.json.encode({"object": "list", "data": data, "model": body["model"]})
    return web.Response(body=raw, content_type="application/json", headers={VECTORS: AS_BASE64})


async def test_clients_get_floats_on_every_route(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    embedder = Capabilities(chat=False, embeddings=True)
    beast = await neurons("beast", sizes={"embedder": GB}, capabilities={"embedder": embedder}, respond=respond)
    client = await start_gateway(beast)
    status, found = await client.post("/v1/embeddings", {"model": "embedder", "input": "a"})
    assert (status, found["data"][0]["embedding"]) == (200, [0.5, -1.0])
    status, found = await client.post("/api/embed", {"model": "embedder", "input": "a"})
    assert (status, found["embeddings"]) == (200, [[0.5, -1.0]])


async def test_clients_of_tei_need_not_name_the_only_model_that_they_may_use(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def echo(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response([[len(body["inputs"])], body["model"]])

    embeds = Capabilities(chat=False, embeddings=True)
    capabilities = {"mine": embeds, "yours": embeds}
    sizes = {"mine": GB, "yours": GB, "chat": GB}
    beast = await neurons("beast", sizes=sizes, capabilities=capabilities, respond=echo)
    limited, free = generate("limited", models=("mine", "chat")), generate("free")
    client = await start_gateway(beast, keys=(limited.section, free.section))
    mine, all_of_them = ({"authorization": f"Bearer {key.text}"} for key in (limited, free))
    assert await client.post("/embed", {"inputs": "abc"}, **mine) == (200, [[3], "mine"])
    assert await client.post("/embed", {"inputs": "x" * 3_000_000}, **mine) == (200, [[3_000_000], "mine"])
    status, body = await client.post("/embed", {"inputs": "abc"}, **all_of_them)
    assert (status, body["error"]["code"]) == (400, "missing_model")
    assert "mine, yours" in body["error"]["message"]
    assert (await client.post("/embed?model=yours", {"inputs": "abc"}, **all_of_them))[1][1] == "yours"
    assert (await client.post("/embed?model=yours", {"inputs": "abc"}, **mine))[0] == 403
