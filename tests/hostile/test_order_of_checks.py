"""Checks run in order: the key, the body, the key's limits, the model. Errors repeat nothing long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pytest

from cortex.gateway.ledger.keys import generate
from cortex.gateway.proxy.routes import ROUTES
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB
from ..waiting import WAIT_S

if TYPE_CHECKING:
    from ..gateway.fake_neuron import StartNeuron
    from ..gateway.started_gateway import Client, StartGateway


PATHS = [path.decode() for path in ROUTES]
READY = ModelState.READY
MODEL = "secret-model-8b"


@dataclass
class Keyed:
    """A gateway, and the headers of two of its keys."""

    client: Client
    good: dict[str, str]
    slow: dict[str, str]


@pytest.fixture
async def keyed(neurons: StartNeuron, start_gateway: StartGateway) -> Keyed:
    """A gateway with two keys: one without limits, one for another model with one request per minute."""
    beast = await neurons("beast", sizes={MODEL: GB}, states={MODEL: READY})
    good = generate("good", balance_tokens=10_000)
    slow = generate("slow", models=("other",), requests_per_min=1)
    client = await start_gateway(beast, keys=(good.section, slow.section))
    return Keyed(client, {"Authorization": f"Bearer {good.text}"}, {"Authorization": f"Bearer {slow.text}"})


async def post(client: Client, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    async with client.session.post(client.url + path, data=body, headers=headers or {}) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("path", PATHS)
async def test_request_without_a_key_is_401_whatever_its_body(keyed: Keyed, path: str) -> None:
    for body in (b"", b"no json", b"{}", b'{"model":5}', b'{"model":"secret-model"}', b'{"model":"a","max_tokens":-1}'):
        for headers in ({}, {"Authorization": "Bearer ck-nobody"}, {"x-api-key": "k" * 5000}):
            status, response = await post(keyed.client, path, body, headers)
            assert status == 401
            assert MODEL.encode() not in response
            assert len(response) < 500


async def test_401_does_not_repeat_a_long_model_name(keyed: Keyed) -> None:
    status, response = await post(keyed.client, "/v1/chat/completions", b'{"model":"' + b"s" * (60 << 20) + b'"}')
    assert status == 401
    assert len(response) < 500
    assert MODEL.encode() not in response


async def test_error_does_not_repeat_a_long_model_name(keyed: Keyed) -> None:
    """One gateway gets them all: each would start a process that parses large bodies."""
    for path in PATHS:
        status, response = await post(keyed.client, path, b'{"model":"' + b"s" * (5 << 20) + b'"}', keyed.good)
        assert status == 400, path
        assert len(response) < 500, path
        status, response = await post(keyed.client, path, b'{"model":"' + b"s" * 201 + b'"}', keyed.good)
        assert status == 400, path
        assert b"ssssssss" not in response, path


async def test_error_names_near_misses_of_the_model(keyed: Keyed) -> None:
    status, response = await post(keyed.client, "/v1/chat/completions", b'{"model":"secret-model-8"}', keyed.good)
    assert (status, MODEL.encode() in response) == (404, True)


@pytest.mark.parametrize("path", PATHS)
async def test_checks_limits_before_the_model_name(keyed: Keyed, path: str) -> None:
    body = b'{"model":"secret-model"}'
    assert (await post(keyed.client, path, body, keyed.slow))[0] == 403
    status, response = await post(keyed.client, path, body, keyed.slow)
    assert status == 429
    assert MODEL.encode() not in response
    assert (await post(keyed.client, path, b"no json", keyed.slow))[0] == 400


async def test_rejected_model_reserves_no_tokens(keyed: Keyed) -> None:
    body = msgspec.json.encode({"model": "nobody", "messages": [], "max_tokens": 9000})
    for _ in range(5):
        assert (await post(keyed.client, "/v1/chat/completions", body, keyed.good))[0] == 404
    body = body.replace(b"nobody", MODEL.encode())
    assert (await post(keyed.client, "/v1/chat/completions", body, keyed.good))[0] == 200


@pytest.mark.parametrize("path", ["/v1/models/", "/fleet/explain/", "/v1/", "/fleet/models/"])
async def test_control_routes_do_not_repeat_a_long_path(keyed: Keyed, path: str) -> None:
    long = path + "s" * 5000
    status, response = await keyed.client.get(long)
    assert status == 401
    status, response = await keyed.client.get(long, **keyed.good)
    assert status == 404
    assert response["error"]["message"].count("s") < 300
    status, response = await keyed.client.post("/v1/models/" + "s" * 5000, **keyed.good)
    assert status == 405
    assert response["error"]["message"].count("s") < 300


async def test_keys_cannot_be_tried_without_limit(keyed: Keyed) -> None:
    headers = {"x-cortex-page": "1"}
    tried = [await post(keyed.client, "/session", b'{"key":"ck-guess"}', headers) for _ in range(25)]
    assert [status for status, _ in tried] == [401] * 20 + [429] * 5
    status, _ = await post(
        keyed.client, "/v1/chat/completions", b'{"model":"%s","messages":[]}' % MODEL.encode(), keyed.good
    )
    assert status == 200, "programs with a key are not concerned"


@pytest.mark.parametrize("path", ["/api/blobs/sha256:" + "a" * 64, "/v1/audio/transcriptions", "/v1/responses"])
async def test_a_preflight_request_which_needs_no_key_has_no_large_body(
    neurons: StartNeuron, start_gateway: StartGateway, path: str
) -> None:
    client = await start_gateway(
        await neurons("beast"), keys=(generate("anna").section,), cors_origins=("https://chat.example",)
    )
    head = (
        f"OPTIONS {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n"
        "Access-Control-Request-Method: POST\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        "Content-Length: 20000000\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(head.encode() + bytes(100_000))
    assert (await asyncio.wait_for(reader.readline(), WAIT_S)).startswith(b"HTTP/1.1 413 ")
    writer.close()
