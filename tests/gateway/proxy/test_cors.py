"""Browser clients of other origins, as `gateway.cors_origins` allows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
import pytest

from cortex.gateway.config import GatewaySection
from cortex.gateway.ledger.keys import generate
from cortex.wire.node.protocol import ModelState

from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import Client, StartGateway


CHAT = "/v1/chat/completions"
SITE = "https://chat.example"
PREFLIGHT = {
    "origin": SITE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-stainless-lang",
}
ALLOWED = "access-control-allow-origin"


Start = Callable[[tuple[str, ...]], Awaitable[tuple["Client", str]]]


@pytest.fixture
async def start(neurons: StartNeuron, start_gateway: StartGateway) -> Start:
    async def started(origins: tuple[str, ...]) -> tuple[Client, str]:
        beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
        key = generate("anna")
        return await start_gateway(beast, keys=(key.section,), cors_origins=origins), key.text

    return started


@pytest.mark.parametrize(("origins", "expected"), [(("*",), "*"), (("https://b.example", SITE), SITE)])
async def test_preflight_needs_no_key_and_allows_what_it_asks_for(
    start: Start, origins: tuple[str, ...], expected: str
) -> None:
    client, _ = await start(origins)
    async with client.session.options(client.url + CHAT, headers=PREFLIGHT) as response:
        assert response.status == 204
        assert response.headers[ALLOWED] == expected
        assert response.headers["access-control-allow-headers"] == "authorization,x-stainless-lang"
        allowed = response.headers["access-control-allow-methods"].split(", ")
        assert {"GET", "POST", "PATCH", "DELETE"} <= set(allowed), "every method of the API"
        assert ("vary" in response.headers) == (expected != "*")


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_and_errors_allow_the_origin(start: Start, stream: bool) -> None:
    client, key = await start((SITE,))
    body = msgspec.json.encode({"model": "a", "messages": [], "stream": stream})
    large = body[:-1] + b" " * 200_000 + b"}"
    for data, headers, status in (
        (body, {"authorization": f"Bearer {key}"}, 200),
        (b"{}", {"authorization": f"Bearer {key}"}, 400),
        (body, {}, 401),
        (large, {}, 401),
    ):
        async with client.session.post(client.url + CHAT, data=data, headers={"origin": SITE, **headers}) as response:
            assert (response.status, response.headers.getall(ALLOWED)) == (status, [SITE])
            assert "x-request-id" in response.headers["access-control-expose-headers"]
    async with client.session.get(client.url + "/health", headers={"origin": SITE}) as response:
        assert (response.status, response.headers[ALLOWED]) == (200, SITE)


@pytest.mark.parametrize("origins", [(), ("https://b.example",)])
async def test_other_origins_are_not_allowed(start: Start, origins: tuple[str, ...]) -> None:
    client, key = await start(origins)
    async with client.session.options(client.url + CHAT, headers=PREFLIGHT) as response:
        assert ALLOWED not in response.headers
    headers = {"origin": SITE, "authorization": f"Bearer {key}"}
    async with client.session.post(client.url + CHAT, data=b'{"model": "a"}', headers=headers) as response:
        assert response.status == 200
        assert ALLOWED not in response.headers


async def test_options_that_is_no_preflight_needs_a_key(start: Start) -> None:
    client, _ = await start(("*",))
    async with client.session.options(client.url + CHAT) as response:
        assert response.status != 204


@pytest.mark.parametrize("origin", ["https://chat.example/", "chat.example", "https://", ""])
def test_rejects_a_setting_that_no_browser_sends(origin: str) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        GatewaySection(cors_origins=(origin,))
