"""Who may use a node: keys, and requests that a web page of another site sends."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession

from cortex.http.limits import ClientLimits
from cortex.http.request import Request
from cortex.http.routing import Router
from cortex.http.tls import client_context
from cortex.neuron.api.access import NodeKeys, read_keys
from cortex.neuron.api.routes.models import ModelRoutes
from cortex.neuron.api.routes.transfers import KvBlocks, SharedFiles
from cortex.neuron.api.server import ReloadableSettings, client_limits
from cortex.neuron.config import Limits, NeuronConfig
from cortex.settings import Listen, SettingsError
from cortex.wire.node.kv_blocks import PATH as KV_PATH
from cortex.wire.node.kv_blocks import SCOPE
from cortex.wire.node.neighbours import PATH as SHARED_FILES
from cortex.wire.node.neighbours import key_hash, new_ticket

from ...waiting import until, until_response
from .served import served

KEY, OTHER = "nk-0123456789abcdef", "nk-fedcba9876543210"
BEARER = {"authorization": f"Bearer {KEY}"}
LOAD = {"model_id": "org/tiny"}


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": f"Bearer {OTHER}"}, {"authorization": KEY}, {"x-api-key": ""}, {"x-api-key": KEY + "x"}],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", "/models/load"), ("POST", "/devices/0/recycle"), ("POST", "/v1/chat/completions")),
        *(("GET", "/models"), ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/events"), ("GET", "/nowhere")),
        ("GET", "/shares"),
    ],
)
async def test_rejects_every_route_without_a_valid_key(
    api: Any, node_keys: NodeKeys, headers: dict[str, str], method: str, path: str
) -> None:
    node_keys.use([KEY])
    async with api.client.request(method, api.url + path, headers=headers, data=b"{}") as response:
        assert response.status == 401
        assert (await response.json())["error"]["code"] == "invalid_api_key"
    assert not api.node.loads


@pytest.mark.parametrize("headers", [BEARER, {"x-api-key": KEY}, {"authorization": f"bearer {OTHER}"}])
async def test_serves_callers_with_any_of_its_keys(
    api: Any, node_keys: NodeKeys, chat_body: Any, headers: dict[str, str]
) -> None:
    node_keys.use([KEY, OTHER])
    assert (await api.post("/models/load", LOAD, **headers))[0] == 200
    assert (await api.post("/v1/chat/completions", chat_body(), **headers))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "opening"),
    [
        ("POST", KV_PATH, SCOPE),
        ("GET", f"{SHARED_FILES}org/tiny", "org/tiny"),
        ("GET", f"{SHARED_FILES}org/tiny/0123", "org/tiny"),
        ("GET", f"{SHARED_FILES}kv/blocks", "kv/blocks"),
        ("GET", f"{SHARED_FILES}org/tiny%2F..%2Fother", None),
        ("GET", "/v1/models", None),
        ("GET", "/nowhere", None),
    ],
)
def test_ticket_opens_one_repository_or_kv_blocks_and_nothing_else(method: str, path: str, opening: str | None) -> None:
    keys = NodeKeys([KEY])
    node: Any = None
    routes = Router([*SharedFiles(node, None).routes(), *KvBlocks(node).routes(), *ModelRoutes(node).routes()])
    match = routes.match(Request(method.encode(), path.encode(), b"", (), b"", "127.0.0.1"))
    for scope in ("org/tiny", "kv/blocks", SCOPE):
        ticket = new_ticket(key_hash(KEY), scope, time.time())
        assert keys.admits_ticket(ticket, match) == (scope == opening)


async def test_health_has_only_the_status_for_callers_without_a_key(api: Any, node_keys: NodeKeys) -> None:
    node_keys.use([KEY])
    assert await api.get("/health") == (200, {"status": "ok"})
    async with api.client.get(api.url + "/health", headers={"x-api-key": OTHER}) as response:
        assert response.status == 401, "a wrong key is reported"
    async with api.client.get(api.url + "/health", headers=BEARER) as response:
        assert (await response.json())["models"][0]["id"] == "org/tiny"


async def test_removing_the_last_key_admits_nobody(api: Any, node_keys: NodeKeys) -> None:
    node_keys.use([KEY])
    node_keys.use([])
    assert (await api.post("/models/load", LOAD, **BEARER))[0] == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
        ({"host": "beast.internal:13131"}, 200),
        ({"host": "node.example.com"}, 200),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/models/load", "/models/unload"])
async def test_control_without_keys_rejects_what_a_web_page_can_send(
    api: Any, path: str, headers: dict[str, str], status: int
) -> None:
    assert (await api.post(path, LOAD, **headers))[0] == status
    assert len(api.node.loads) == (status == 200 and path == "/models/load")


@pytest.mark.parametrize("path", ["/v1/chat/completion", "/model/load"])
async def test_a_mistyped_route_is_not_found_whatever_it_is_sent(api: Any, path: str) -> None:
    status, reply, _ = await api.post(path, LOAD, **{"content-type": "application/x-www-form-urlencoded"})
    assert (status, reply["error"]["code"]) == (404, "route_not_found")


async def test_inference_and_reads_reject_a_foreign_name_and_undeclared_bodies_of_pages(
    api: Any, chat_body: Any
) -> None:
    chat = "/v1/chat/completions"
    assert (await api.post(chat, chat_body(), host="evil.example"))[0] == 403
    assert (await api.post(chat, chat_body(), **{"origin": "https://evil.example", "content-type": ""}))[0] == 415
    assert (await api.post(chat, chat_body(), **{"content-type": ""}))[0] == 200
    async with api.client.get(api.url + "/models", headers={"host": "evil.example"}) as response:
        assert response.status == 403


def test_reads_keys_from_the_file_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# of the gateway\n\n {OTHER} \n")
    assert read_keys(NeuronConfig(keys=(KEY,), key_file=Path("keys")), tmp_path) == (KEY, OTHER)


@pytest.mark.parametrize(("text", "reason"), [(None, "No such file"), ("# none\n", "has no key"), ("short\n", "key 1")])
def test_rejects_an_unusable_key_file(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(SettingsError, match=reason):
        read_keys(NeuronConfig(key_file=Path("keys")), tmp_path)


@pytest.mark.parametrize(
    "key", ["short", "has a space in the middle", "ümläute-in-a-long-key", "line\nbreak-in-the-key"]
)
def test_rejects_keys_that_can_be_guessed_or_not_sent(key: str) -> None:
    with pytest.raises(ValueError, match="neuron key"):
        NeuronConfig(keys=(key,))


@pytest.mark.parametrize("listen", ["0.0.0.0:13131", "[::]:13131", "10.0.0.1:13131", "beast.internal:13131"])
def test_listens_beyond_loopback_only_with_a_key_or_if_insecure(listen: str) -> None:
    config = NeuronConfig(listen=Listen(listen))
    with pytest.raises(SettingsError, match="--insecure"):
        ReloadableSettings(config, None, insecure=False)
    ReloadableSettings(config, None, insecure=True)
    ReloadableSettings(NeuronConfig(listen=Listen(listen), keys=(KEY,)), None, insecure=False)


def test_needs_no_key_on_loopback() -> None:
    for listen in ("127.0.0.1:13131", "[::1]:13131", "localhost:13131"):
        ReloadableSettings(NeuronConfig(listen=Listen(listen)), None, insecure=False)


async def test_uses_changed_keys_and_keeps_the_old_ones_when_the_change_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, keys = tmp_path / "neuron.toml", tmp_path / "keys"
    path.write_text('key_file = "keys"\n')
    keys.write_text(KEY)
    reloadable = ReloadableSettings(NeuronConfig(key_file=Path("keys")), path, insecure=False)
    keys.write_text(f"{OTHER}\n")  # before the first look, as while the node starts
    watching = asyncio.create_task(reloadable.watch(check_s=0.01))
    await until(lambda: reloadable.keys.recognises(OTHER))
    assert not reloadable.keys.recognises(KEY), "a removed key is revoked"
    keys.write_text("short\n")
    await until(lambda: "the old one stays in force" in caplog.text)
    assert reloadable.keys.recognises(OTHER)
    path.write_text(f'keys = ["{KEY}"]\nkey_file = "keys"\n')
    keys.write_text(f"{OTHER}{OTHER}\n")
    await until(lambda: reloadable.keys.recognises(KEY))
    watching.cancel()


async def test_speaks_https_with_a_certificate(node: Any, authority: Any) -> None:
    issued = authority.issue("neuron")
    config = NeuronConfig(listen=Listen("127.0.0.1:0"), tls_cert=issued.cert, tls_key=issued.key)
    reloadable = ReloadableSettings(config, None, insecure=False)
    assert reloadable.certificate is not None
    trust = client_context(authority.own.cert)
    serving = served(node, tls=reloadable.certificate.context, access=reloadable.access, scheme="https")
    async with serving as (_, port), ClientSession() as session:
        async with session.get(f"https://localhost:{port}/models/org/tiny/endpoint", ssl=trust) as response:
            assert (await response.json())["base_url"] == f"https://localhost:{port}/v1"
        with pytest.raises(ClientError):
            await session.get(f"http://localhost:{port}/health")
        with pytest.raises(ClientError):
            await session.get(f"https://localhost:{port}/health")


@pytest.mark.parametrize(
    ("configured", "status"),
    [
        (Limits(max_connections=3, max_connections_per_client=3), b" 503 "),
        (Limits(max_connections_per_client=3), b" 429 "),
    ],
    ids=["in all", "per address"],
)
async def test_connections_over_a_limit_are_rejected_until_others_close(
    node: Any, configured: Limits, status: bytes
) -> None:
    limits = client_limits(NeuronConfig(limits=configured), 1024)
    async with served(node, limits=limits) as address:
        opened = [await asyncio.open_connection(*address) for _ in range(3)]
        reader, writer = await asyncio.open_connection(*address)
        assert status in await reader.readline()
        writer.close()
        opened.pop()[1].close()

        async def responds() -> bool:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            response = await reader.read()
            writer.close()
            return b" 200 " in response[:20]

        await until_response(responds)
        for _, writer in opened:
            writer.close()


async def test_connections_that_do_not_end_their_handshake_count(node: Any, authority: Any) -> None:
    issued = authority.issue("neuron")
    config = NeuronConfig(listen=Listen("127.0.0.1:0"), tls_cert=issued.cert, tls_key=issued.key)
    reloadable = ReloadableSettings(config, None, insecure=False)
    assert reloadable.certificate is not None
    async with served(node, tls=reloadable.certificate.context, limits=ClientLimits(num_connections=2)) as address:
        silent = [await asyncio.open_connection(*address) for _ in range(2)]
        reader, writer = await asyncio.open_connection(*address)
        assert await reader.read() == b"", "closed without a response"
        for _, each in (*silent, (reader, writer)):
            each.close()


def test_certificate_and_key_belong_together() -> None:
    with pytest.raises(ValueError, match="belong together"):
        NeuronConfig(tls_cert=Path("cert.pem"))
