"""Pictures by address through a gateway: off by default, fetched from a checked address, and bounded."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from cortex.gateway.config import PicturesSection
from cortex.gateway.pictures import NotFetched, PictureFetcher
from cortex.http.limits import Buffered
from cortex.http.ticker import Ticker
from cortex.wire.node.protocol import Capabilities, ModelState

from ..certificates import Authority
from ..picture_files import base64_of, data_url, picture
from ..ports import free_port
from ..waiting import NEVER_S, WAIT_S, until
from .fake_neuron import GB, FakeNeuron, StartNeuron
from .started_gateway import StartGateway

FILE = picture(64, 48)
PUBLIC = "93.184.216.34"
ALLOWED = PicturesSection(urls=True, max_mb=1, timeout_s=WAIT_S, max_urls=2)


@dataclass
class Site:
    """Hosts with pictures, all served by one local server. Only connections to `PUBLIC` reach it."""

    fetcher: PictureFetcher
    names: dict[str, list[str]] = field(default_factory=lambda: {"pics.test": [PUBLIC], "inside.test": ["10.0.0.5"]})
    lookups: list[str] = field(default_factory=list)
    hanging: dict[str, asyncio.Event] = field(default_factory=dict)
    """Names whose lookup lasts until the event."""
    reached: list[tuple[str, int]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    authority = Authority.create(tmp_path)
    shown = authority.issue("pics", "DNS:pics.test", "DNS:moving.test")
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_tls.load_cert_chain(shown.cert, shown.key)

    async def respond(request: web.Request) -> web.StreamResponse:
        made.requests.append(f"{request.host}{request.path_qs}")
        match request.path:
            case "/x.png":
                return web.Response(body=FILE, content_type="text/plain")
            case "/large.png":
                response = web.StreamResponse()
                await response.prepare(request)
                for _ in range(40):
                    await response.write(bytes(100_000))
                return response
            case "/slow.png":
                await asyncio.sleep(NEVER_S)
            case "/hop":
                raise web.HTTPFound("/x.png")
            case "/broken":
                return web.Response(status=302, headers={"Location": "https://["})
            case "/loop":
                raise web.HTTPFound("/loop")
            case "/inside":
                raise web.HTTPFound(request.query["to"])
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_get("/{path:.*}", respond)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_tls)
    await listener.start()
    port = runner.addresses[0][1]

    async def resolve(host: str) -> list[str]:
        made.lookups.append(host)
        if host in made.hanging:
            await made.hanging[host].wait()
            made.lookups.append("ended")
        if ":" in host or host.replace(".", "").isdigit():
            return [host]
        if host not in made.names:
            raise OSError("no such host")
        return made.names[host]

    def reach(place: tuple[str, int]) -> tuple[str, int]:
        made.reached.append(place)
        assert place[0] == PUBLIC, "a connection to an address that was not checked"
        return "127.0.0.1", port

    ticker = Ticker(asyncio.get_running_loop())
    tls = ssl.create_default_context(cafile=str(authority.own.cert))
    made = Site(PictureFetcher(ticker, resolve=resolve, reach=reach, tls=tls))
    yield made
    await runner.cleanup()


async def fetch(site: Site, url: str, section: PicturesSection = ALLOWED, client: str = "anna") -> bytes:
    return await site.fetcher.fetch(url, section, client, Buffered(1 << 30))


async def test_file_is_fetched_from_the_address_that_was_checked(site: Site) -> None:
    assert await fetch(site, "https://pics.test/x.png?size=1") == FILE
    assert site.reached == [(PUBLIC, 443)]
    assert site.requests == ["pics.test/x.png?size=1"]
    assert site.lookups == ["pics.test"], "resolved once: a second lookup could have another result"


async def test_lookups_that_hang_hold_no_thread_of_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, released = threading.Semaphore(0), threading.Event()

    def look_up(*_: Any, **__: Any) -> list[Any]:
        hanging.release()
        released.wait(NEVER_S)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    fetcher = PictureFetcher(Ticker(asyncio.get_running_loop()))
    num_threads = min(32, (os.cpu_count() or 1) + 4)  # of the default executor
    fetches = [
        asyncio.create_task(fetcher.fetch("https://slow.test/x.png", ALLOWED, f"client {number}", Buffered(1 << 30)))
        for number in range(2 * num_threads)
    ]
    try:
        assert await asyncio.to_thread(hanging.acquire, timeout=WAIT_S)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), WAIT_S) == "done"
        assert not any(each.done() for each in fetches)
    finally:
        released.set()
        await asyncio.gather(*fetches, return_exceptions=True)


async def test_client_whose_lookups_hang_has_no_more_of_them_and_others_are_served(site: Site) -> None:
    ended = asyncio.Event()
    site.hanging["slow.test"] = ended
    hurried = msgspec.structs.replace(ALLOWED, timeout_s=0.01)
    fetches = [fetch(site, "https://slow.test/x.png", hurried) for _ in range(4)]
    for end in await asyncio.gather(*fetches, return_exceptions=True):
        assert "took longer" in str(end)
    with pytest.raises(NotFetched, match="still being looked up"):
        await fetch(site, "https://pics.test/x.png")
    assert await fetch(site, "https://pics.test/x.png", client="bob") == FILE
    ended.set()
    await until(lambda: site.lookups.count("ended") == 4)
    assert await fetch(site, "https://pics.test/x.png") == FILE


async def test_redirects_are_followed_to_public_places_only(site: Site) -> None:
    assert await fetch(site, "https://pics.test/hop") == FILE
    for to in (
        "https://inside.test/x.png",
        "https://127.0.0.1/x.png",
        "https://[::ffff:10.0.0.1]/x.png",
        "http://pics.test/x.png",
        "file:///etc/passwd",
    ):
        with pytest.raises(NotFetched, match=r"public internet|only https"):
            await fetch(site, f"https://pics.test/inside?to={to}")
    with pytest.raises(NotFetched, match="redirects to an invalid address"):
        await fetch(site, "https://pics.test/broken")
    with pytest.raises(NotFetched, match="redirects more than 3 times"):
        await fetch(site, "https://pics.test/loop")
    assert {place for place, _ in site.reached} == {PUBLIC}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://inside.test/x.png", "not on the public internet"),
        ("https://nowhere.test/x.png", "cannot be reached"),
        ("http://pics.test/x.png", "only https"),
        ("https://pics.test/missing.png", "status 404"),
        ("https://pics.test/large.png", "more than 1 MB"),
    ],
)
async def test_reason_is_reported_without_details_of_the_network(site: Site, url: str, problem: str) -> None:
    with pytest.raises(NotFetched, match=problem):
        await fetch(site, url)


async def test_certificate_must_be_that_of_the_host(site: Site) -> None:
    site.names["other.test"] = [PUBLIC]
    with pytest.raises(NotFetched, match="cannot be reached"):
        await fetch(site, "https://other.test/x.png")
    assert not site.requests


async def test_authorities_are_read_once_and_not_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    made = ssl.create_default_context()

    def make() -> ssl.SSLContext:
        threads.append(threading.get_ident())
        return made

    async def resolve(host: str) -> list[str]:
        return [PUBLIC]

    port = free_port()
    monkeypatch.setattr(ssl, "create_default_context", make)
    ticker = Ticker(asyncio.get_running_loop())
    fetcher = PictureFetcher(ticker, resolve=resolve, reach=lambda _: ("127.0.0.1", port))
    urls = [f"https://pics.test/{number}" for number in range(3)]
    found = await asyncio.gather(
        *(fetcher.fetch(url, ALLOWED, "anna", Buffered(1 << 30)) for url in urls), return_exceptions=True
    )
    assert all(isinstance(each, NotFetched) for each in found)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_slow_server_is_left(site: Site) -> None:
    hurried = PicturesSection(urls=True, timeout_s=0.2)
    with pytest.raises(NotFetched, match=r"longer than 0\.2 s"):
        await fetch(site, "https://pics.test/slow.png", hurried)


async def test_one_client_does_not_take_the_turns_of_others(site: Site) -> None:
    slow = [asyncio.create_task(fetch(site, "https://pics.test/slow.png")) for _ in range(40)]
    try:
        assert await fetch(site, "https://pics.test/x.png", client="berta") == FILE
        assert len(site.requests) <= 5
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


def chat(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], "seed": 12345678901234567890123}


def blocks(*urls: str) -> dict[str, Any]:
    content = [{"type": "image", "source": {"type": "url", "url": url}} for url in urls]
    results = [{"type": "tool_result", "tool_use_id": "t", "content": content}]
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": results}]}


async def seeing_node(neurons: StartNeuron) -> FakeNeuron:
    sees = {"m": Capabilities(tools=True, vision=True)}
    return await neurons("beast", sizes={"m": GB}, states={"m": ModelState.READY}, capabilities=sees)


async def test_addresses_reach_the_node_unfetched_unless_an_operator_allows_them(
    site: Site, neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await seeing_node(neurons)
    client = await start_gateway(beast, fetcher=site.fetcher)
    await client.post("/v1/chat/completions", chat("https://pics.test/x.png"))
    assert beast.seen[-1].body == chat("https://pics.test/x.png"), "which rejects them"
    assert not site.lookups


async def test_node_gets_files_in_place_of_addresses(
    site: Site, neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await seeing_node(neurons)
    client = await start_gateway(beast, pictures=ALLOWED, fetcher=site.fetcher)
    status, reply = await client.post("/v1/chat/completions", chat("https://pics.test/x.png", data_url(FILE)))
    assert status == 200, reply
    assert beast.seen[-1].body == chat(data_url(FILE), data_url(FILE))
    status, reply = await client.post("/v1/messages", blocks("https://pics.test/x.png", "https://pics.test/x.png"))
    assert status == 200, reply
    (result,) = beast.seen[-1].body["messages"][0]["content"]
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(FILE)}
    assert result["content"] == [{"type": "image", "source": source}] * 2
    assert site.requests.count("pics.test/x.png") == 2, "once for each request"


async def test_unforeseen_error_is_a_response(
    site: Site, neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> bytes:
        raise RuntimeError("unforeseen")

    beast = await seeing_node(neurons)
    client = await start_gateway(beast, pictures=ALLOWED, fetcher=site.fetcher)
    monkeypatch.setattr(site.fetcher, "fetch", fail)
    status, reply = await client.post("/v1/chat/completions", chat("https://pics.test/x.png"))
    assert status == 500, reply
    assert not beast.seen


async def test_error_names_the_picture(site: Site, neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await seeing_node(neurons)
    client = await start_gateway(beast, pictures=ALLOWED, fetcher=site.fetcher)
    for url in ("https://inside.test/x.png", "https://pics.test/missing.png", "http://pics.test/x.png"):
        status, reply = await client.post("/v1/chat/completions", chat("https://pics.test/x.png", url))
        assert (status, reply["error"]["param"]) == (400, "messages[0].content[1]")
    many = [f"https://pics.test/x.png?{number}" for number in range(3)]
    status, reply = await client.post("/v1/chat/completions", chat(*many))
    assert status == 400
    assert "pictures.max_urls" in reply["error"]["message"]
    assert not beast.seen


async def test_files_count_as_buffered_until_the_response_ends(
    site: Site, neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await seeing_node(neurons)
    beast.states["m"] = ModelState.COLD
    beast.load_gate.clear()
    client = await start_gateway(beast, pictures=ALLOWED, fetcher=site.fetcher)
    buffered, body = client.gateway.server.buffered, chat("https://pics.test/x.png")
    asking = asyncio.create_task(client.post("/v1/chat/completions", body))
    await until(lambda: beast.load_requests)
    assert buffered.num_bytes > len(base64_of(FILE))
    beast.load_gate.set()
    assert (await asking)[0] == 200
    assert buffered.num_bytes == 0
    buffered.max_bytes = 900_000  # less than one file may have
    status, reply = await client.post("/v1/chat/completions", body)
    assert (status, reply["error"]["code"]) == (503, "overloaded"), reply
    assert buffered.num_bytes == 0
