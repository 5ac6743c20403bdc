"""Web pages that make a browser send requests to a gateway: simple requests, forged names, and what stays allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cortex.gateway.ledger.keys import generate
from cortex.wire.node.protocol import ModelState

from ..gateway.fake_neuron import GB

if TYPE_CHECKING:
    from ..gateway.fake_neuron import StartNeuron
    from ..gateway.started_gateway import Client, StartGateway


READY = {"a": ModelState.READY}
EVIL = "https://evil.example"
CHAT = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}


async def send(
    client: Client, path: str, body: Any = None, method: str = "POST", **headers: str
) -> tuple[int, str | None]:
    """The status and the error code of a request with exactly these headers and those of every client."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.session.request(method, client.url + path, json=body, headers=headers) as response:
        found = await response.json()
        return response.status, found.get("error", {}).get("code")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"origin": EVIL}, (403, "cross_site_request")),
        ({"origin": "null"}, (403, "cross_site_request")),
        ({"origin": EVIL, "content_type": "text/plain"}, (403, "cross_site_request")),
        ({"host": "evil.example"}, (403, "cross_site_request")),
        ({"host": "evil.example", "origin": "http://evil.example"}, (403, "cross_site_request")),
        ({"content_type": "text/plain"}, (415, "unsupported_media_type")),
        ({"content_type": "multipart/form-data; boundary=x"}, (415, "unsupported_media_type")),
        ({"content_type": ""}, (415, "unsupported_media_type")),
        ({}, (200, None)),
        ({"host": "localhost:31313", "origin": "http://localhost:31313"}, (200, None)),
        ({"host": "llm.example.com"}, (200, None)),
        ({"origin": "https://chat.example"}, (200, None)),
    ],
)
async def test_orders_to_an_open_loopback_gateway(
    neurons: StartNeuron, start_gateway: StartGateway, headers: dict[str, Any], expected: tuple[int, str | None]
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states=dict(READY))
    client = await start_gateway(beast, allowed_hosts=("llm.example.com",), cors_origins=("https://chat.example",))
    assert await send(client, "/fleet/models/a/unload", {"force": True}, **headers) == expected
    assert bool(beast.unload_requests) == (expected[0] == 200)


async def test_reads_and_inference_of_an_open_loopback_gateway_reject_foreign_names(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states=dict(READY))
    client = await start_gateway(beast)
    for path in ("/v1/models", "/fleet/status", "/fleet/explain/a", "/health"):
        assert (await send(client, path, method="GET", host="evil.example"))[0] == 403
    assert (await send(client, "/v1/chat/completions", CHAT, host="evil.example"))[0] == 403
    assert (await send(client, "/v1/messages", CHAT, host="evil.example:31313"))[0] == 403
    assert not beast.seen
    assert (await send(client, "/v1/chat/completions", CHAT, host="localhost:1"))[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_inference_rejects_bodies_that_a_page_can_send_unasked(
    neurons: StartNeuron, start_gateway: StartGateway, path: str
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states=dict(READY))
    client = await start_gateway(beast)
    for content_type in ("", "text/plain", "application/x-www-form-urlencoded"):
        assert (await send(client, path, CHAT, origin=EVIL, content_type=content_type))[0] == 415
    assert not beast.seen
    assert (await send(client, "/v1/chat/completions", CHAT, content_type=""))[0] == 200, "other clients may omit it"


async def test_key_replaces_the_check_of_the_name_but_not_of_the_origin(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states=dict(READY))
    operator = generate("root", operator=True)
    client = await start_gateway(beast, keys=(operator.section,))
    bearer = {"authorization": f"Bearer {operator.text}"}
    order = ("/fleet/models/a/unload", {"force": True})
    assert (await send(client, *order, origin=EVIL, **bearer)) == (403, "cross_site_request")
    assert (await send(client, *order, host="llm.example.com"))[0] == 401
    assert (await send(client, "/v1/chat/completions", CHAT, host="llm.example.com", **bearer))[0] == 200
    assert (await send(client, *order, host="llm.example.com", **bearer))[0] == 200
