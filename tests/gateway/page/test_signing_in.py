"""Sign-in to the page without a key: through an OpenID Connect provider, and through a proxy that knows the user."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from aiohttp import ClientSession, FormData

from cortex.gateway.database import StoreError
from cortex.gateway.dispatch.operator.audit import SIGN_IN_ACTIONS
from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.key_store import KeyStore
from cortex.gateway.ledger.keys import generate
from cortex.gateway.ledger.users import SignInSection
from cortex.gateway.page.openid import OpenIDClient, roles_in
from cortex.gateway.page.signing_in import MOST_FAILURES
from cortex.wire.errors import InvalidAPIKey, Overloaded, UpstreamUnavailable
from cortex.wire.node.protocol import ModelState

from ...waiting import WAIT_S, until
from ..fake_neuron import GB
from ..started_gateway import Client

pytest.importorskip("jwt", reason="needs the extra `oidc`")

from cryptography.hazmat.primitives.asymmetric import rsa

from .openid_provider import CLIENT_ID, SECRET, OpenIDProvider

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway

PUBLIC = "http://127.0.0.1:31313"
PAGE = {"x-cortex-page": "1", "sec-fetch-site": "same-origin"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenIDProvider]:
    monkeypatch.setenv("OIDC_SECRET", SECRET)
    found = OpenIDProvider()
    await found.start()
    yield found
    await found.stop()


def section(provider: OpenIDProvider, **fields: Any) -> SignInSection:
    return SignInSection(
        issuer=provider.issuer,
        client_id=CLIENT_ID,
        client_secret_env="OIDC_SECRET",
        public_url=PUBLIC,
        operator_roles=("admins",),
        **fields,
    )


async def visit(client: Client, url: str, cookies: dict[str, str]) -> tuple[int, str, Any]:
    """One step of a browser; cookies are kept. Returns status, the next address and the body."""
    headers = {"cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
    async with client.session.get(url, headers=headers, allow_redirects=False) as response:
        for name, morsel in response.cookies.items():
            cookies[name] = morsel.value
            if name == "cortex_session":
                assert morsel["httponly"]
                assert morsel["samesite"] == "Strict"
        body = await response.json() if response.status >= 400 else None
        return response.status, response.headers.get("location", ""), body


async def sign_in(client: Client, cookies: dict[str, str]) -> tuple[int, Any]:
    _, at_provider, _ = await visit(client, f"{client.url}/session/start", cookies)
    _, callback, _ = await visit(client, at_provider, {})
    parts = urlsplit(callback)
    assert f"{parts.scheme}://{parts.netloc}{parts.path}" == f"{PUBLIC}/session/callback"
    status, home, body = await visit(client, f"{client.url}{parts.path}?{parts.query}", cookies)
    assert status >= 400 or home == f"{PUBLIC}/"
    return status, body


def with_session(cookies: dict[str, str]) -> dict[str, str]:
    return {**PAGE, "cookie": f"cortex_session={cookies['cortex_session']}"}


def forge(cookie: str) -> str:
    """Change the first character: bits of a last one may not count."""
    return ("b" if cookie.startswith("a") else "a") + cookie[1:]


async def test_user_signs_in_with_roles_from_claims_and_is_metered(
    provider: OpenIDProvider, neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB, "b": GB}, states={"a": ModelState.READY, "b": ModelState.READY})
    boss = generate("boss", operator=True)
    lab = GroupSection(name="lab", window_tokens=100_000)
    wanted = section(provider, models=("a",), group="lab")
    client = await start_gateway(beast, keys=(boss.section,), groups=(lab,), sign_in=wanted)
    assert (await client.get("/session/methods"))[1] == {"openid": True, "key": True}
    cookies: dict[str, str] = {}
    assert await sign_in(client, cookies) == (302, None)
    status, who = await client.get("/session", **with_session(cookies))
    assert (status, who["name"], who["operator"], who["open"]) == (200, "anna", False, False)
    for model, expected in (("a", 200), ("b", 403)):
        status, body = await client.post("/v1/chat/completions", {"model": model, **CHAT}, **with_session(cookies))
        assert status == expected, body
    status, _ = await client.post("/fleet/models/a/unload", {}, **with_session(cookies))
    assert status == 403, "not an operator"
    status, _ = await client.post(
        "/v1/chat/completions", {"model": "a", **CHAT}, cookie=with_session(cookies)["cookie"]
    )
    assert status == 401, "a session is for the page"
    _, report = await client.get("/fleet/usage?by=key", Authorization=f"Bearer {boss.text}")
    assert [row["name"] for row in report["rows"]] == ["anna"]
    provider.claims |= {"groups": ["others", "admins"], "preferred_username": "boss"}
    assert await sign_in(client, cookies) == (302, None)
    assert (await client.get("/session", **with_session(cookies)))[1]["operator"] is True
    status, _ = await client.post("/v1/chat/completions", {"model": "a", **CHAT}, **with_session(cookies))
    assert status == 200
    _, report = await client.get("/fleet/usage?by=key", Authorization=f"Bearer {boss.text}")
    assert [row["requests"] for row in report["rows"]] == [2], "the same user under another name"
    assert (await client.get("/session", Authorization=f"Bearer {boss.text}"))[1]["name"] == "boss", "keys still work"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"aud": "another"}, "not valid"),
        ({"iss": "https://elsewhere.example"}, "not valid"),
        ({"exp": 1}, "not valid"),
        ({"nonce": "another"}, "another sign-in"),
        ({"aud": [CLIENT_ID, "another"], "azp": "another"}, "another program"),
    ],
)
async def test_rejects_a_token_that_was_not_made_for_this_sign_in(
    provider: OpenIDProvider, start_gateway: StartGateway, changes: dict[str, Any], reason: str
) -> None:
    client = await start_gateway(sign_in=section(provider))
    provider.changes = changes
    cookies: dict[str, str] = {}
    status, body = await sign_in(client, cookies)
    assert status == 401
    assert reason in body["error"]["message"]
    assert "cortex_session" not in cookies


async def test_rejects_what_does_not_belong_together(provider: OpenIDProvider, start_gateway: StartGateway) -> None:
    client = await start_gateway(sign_in=section(provider, user_roles=("lab",)))
    mine: dict[str, str] = {}
    status, body = await sign_in(client, mine)
    assert (status, "none of the roles" in body["error"]["message"]) == (401, True)
    assert (await client.get("/v1/models"))[0] == 401, "with a provider and no keys, nobody gets in without signing in"
    provider.claims["groups"] = ["lab"]
    _, at_provider, _ = await visit(client, f"{client.url}/session/start", mine)
    _, callback, _ = await visit(client, at_provider, {})
    query = urlsplit(callback).query
    here = f"{client.url}/session/callback?"
    forged = forge(mine["cortex_sign_in"])
    for cookies, sent, reason in (
        ({}, query, "took too long or began elsewhere"),
        ({"cortex_sign_in": forged}, query, "took too long or began elsewhere"),
        (dict(mine), query.replace("state=", "state=x"), "not begun in this browser"),
        (dict(mine), query.replace("code=", "code=x"), "sign in again"),
    ):
        status, _, body = await visit(client, here + sent, cookies)
        assert (status, reason in body["error"]["message"]) == (401, True), body
        assert "cortex_session" not in cookies
    assert (await visit(client, here + query, mine))[0] == 302
    assert (await visit(client, here + query, dict(mine)))[0] == 401, "a code is good once"
    assert (await client.get("/session", **with_session({"cortex_session": forge(mine["cortex_session"])})))[0] == 401
    provider.signing_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    status, body = await sign_in(client, {})
    assert (status, "not valid" in body["error"]["message"]) == (401, True), "signed by somebody else"


async def test_sign_ins_through_the_provider_are_in_the_audit_log(
    provider: OpenIDProvider, start_gateway: StartGateway
) -> None:
    boss = generate("boss", operator=True)
    client = await start_gateway(keys=(boss.section,), sign_in=section(provider))
    assert (await sign_in(client, {}))[0] == 302
    provider.claims |= {"groups": ["admins"], "preferred_username": "olga"}
    assert (await sign_in(client, {}))[0] == 302
    provider.changes = {"aud": "another"}
    assert (await sign_in(client, {}))[0] == 401
    callback = f"{client.url}/session/callback?code=secret&state=x"
    begun: dict[str, str] = {}
    await visit(client, f"{client.url}/session/start", begun)
    for _ in range(MOST_FAILURES - 1):
        assert (await visit(client, callback, begun))[0] == 401
    assert (await visit(client, callback, begun))[0] == 429
    body = await client.get("/fleet/audit?limit=1000", Authorization=f"Bearer {boss.text}")
    entries = body[1]["entries"][::-1]
    assert [(entry["key_name"], entry["status"], entry["detail"]) for entry in entries[:2]] == [
        ("anna", 200, "signed in"),
        ("olga", 200, "signed in as operator"),
    ]
    assert entries[0]["key_id"].startswith("user:")
    assert entries[0]["action"] in SIGN_IN_ACTIONS
    assert [(entry["key_name"], entry["status"]) for entry in entries[2:]] == [("", 401)] * MOST_FAILURES
    assert {(entry["action"], entry["client"]) for entry in entries} == {("GET /session/callback", "127.0.0.1")}
    assert "not valid" in entries[2]["detail"]
    assert "secret" not in str(entries)


@pytest.mark.parametrize(
    ("sent", "message", "description"),
    [
        ("error=access_denied&error_description=Ask+Olga.", "access_denied", "Ask Olga."),
        ("error=boss+signed+in", "no code", ""),
        ("", "no code", ""),
    ],
)
async def test_rejection_of_the_provider_is_shown_and_only_its_code_is_recorded(
    provider: OpenIDProvider, start_gateway: StartGateway, sent: str, message: str, description: str
) -> None:
    boss = generate("boss", operator=True)
    client = await start_gateway(keys=(boss.section,), sign_in=section(provider))
    cookies: dict[str, str] = {}
    _, at_provider, _ = await visit(client, f"{client.url}/session/start", cookies)
    state = parse_qs(urlsplit(at_provider).query)["state"][0]
    status, _, body = await visit(client, f"{client.url}/session/callback?state={state}&{sent}", cookies)
    assert status == 401
    assert body["error"].get("error_description", "") == description
    _, audit = await client.get("/fleet/audit", Authorization=f"Bearer {boss.text}")
    assert [entry["detail"] for entry in audit["entries"]] == [f"The provider did not sign you in: {message}"]


@pytest.mark.parametrize("failure", ["no flow", "no token", "no keys"])
async def test_what_is_not_a_wrong_attempt_keeps_nobody_from_signing_in(
    provider: OpenIDProvider, start_gateway: StartGateway, failure: str
) -> None:
    """Any other page can make a browser call the callback, and a provider that fails is not the user's fault."""
    boss = generate("boss", operator=True)
    client = await start_gateway(keys=(boss.section,), sign_in=section(provider))
    provider.is_failing_at = {"no token": "/token", "no keys": "/jwks"}.get(failure)
    for _ in range(MOST_FAILURES):
        if failure == "no flow":
            assert (await visit(client, f"{client.url}/session/callback?code=x&state=x", {}))[0] == 401
        else:
            assert (await sign_in(client, {}))[0] == 502
    provider.is_failing_at = None
    assert (await sign_in(client, {}))[0] == 302
    _, audit = await client.get("/fleet/audit", Authorization=f"Bearer {boss.text}")
    assert [entry["key_name"] for entry in audit["entries"]] == ["anna", ""], "the same failure is recorded once"


async def test_provider_that_does_not_respond_is_a_502(start_gateway: StartGateway) -> None:
    wanted = SignInSection(issuer="http://127.0.0.1:9/x", client_id="c", public_url=PUBLIC)
    client = await start_gateway(sign_in=wanted)
    status, _, body = await visit(client, f"{client.url}/session/start", {})
    assert (status, "does not respond" in body["error"]["message"]) == (502, True)


async def test_configuration_that_is_not_applied_leaves_sign_in_as_it_was(
    provider: OpenIDProvider, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await start_gateway(sign_in=section(provider))

    async def fail(*_: object) -> None:
        raise StoreError("the database is away")

    config = msgspec.structs.replace(client.gateway.config, sign_in=SignInSection())
    with monkeypatch.context() as patch:
        patch.setattr(KeyStore, "read", fail)
        with pytest.raises(StoreError):
            await client.gateway.reconfigure(config, client.gateway.dispatcher.catalogue)
    assert (await sign_in(client, {}))[0] == 302


class HangingProvider:
    """Accepts connections and never responds, until it is released."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.released = asyncio.Event()

    async def __aenter__(self) -> HangingProvider:
        self._server = await asyncio.start_server(self._hold, "127.0.0.1", 0)
        self.issuer = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.released.set()
        self._server.close()
        await self._server.wait_closed()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        self.num_connections += 1
        await self.released.wait()
        writer.close()


async def test_sign_ins_at_a_provider_that_hangs_share_one_call_and_hold_up_nothing_else(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    async with HangingProvider() as hanging:
        wanted = SignInSection(issuer=hanging.issuer, client_id="c", public_url=PUBLIC)
        key = generate("anna")
        client = await start_gateway(beast, keys=(key.section,), sign_in=wanted)
        visits = [asyncio.create_task(visit(client, f"{client.url}/session/start", {})) for _ in range(50)]
        await until(lambda: hanging.num_connections)
        async with client.session.get(f"{client.url}/") as page:
            assert page.status == 200
        form = FormData({"model": "a"})
        form.add_field("file", bytes(100_000), filename="a.wav")
        authorized = {"Authorization": f"Bearer {key.text}"}
        url = f"{client.url}/v1/audio/transcriptions"
        async with client.session.post(url, data=form, headers=authorized) as uploaded:
            assert uploaded.status not in (401, 502, 503), "it was read"
        hanging.released.set()
        for status, _, body in await asyncio.gather(*visits):
            assert (status, "does not respond" in body["error"]["message"]) == (502, True)
        assert hanging.num_connections == 1


ENDLESS = {
    "head": b"HTTP/1.1 200 OK\r\n",
    "body": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n",
}


@pytest.mark.parametrize("part", ENDLESS)
async def test_response_of_the_provider_that_never_ends_is_a_502(part: str) -> None:
    ends = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ENDLESS[part])
        with contextlib.suppress(ConnectionError):
            while not ends.is_set():
                writer.write(b" " if part == "body" else b"x")
                await writer.drain()
                await asyncio.sleep(0.1)
        writer.close()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        issuer = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = OpenIDClient(SignInSection(issuer=issuer, client_id="c", public_url=PUBLIC), {}, timeout_s=1.0)
        try:
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(UpstreamUnavailable, match="does not respond: no end within 1 s"):
                    await client.begin()
        finally:
            ends.set()
            await client.close()


async def test_failure_of_the_provider_is_remembered_for_a_moment() -> None:
    now = 100.0
    async with HangingProvider() as hanging:
        hanging.released.set()
        wanted = SignInSection(issuer=hanging.issuer, client_id="c", public_url=PUBLIC)
        client = OpenIDClient(wanted, {}, clock=lambda: now)
        for _ in range(3):
            with pytest.raises(UpstreamUnavailable, match="does not respond"):
                await client.begin()
        assert hanging.num_connections == 1
        now += 60.0
        with pytest.raises(UpstreamUnavailable, match="does not respond"):
            await client.begin()
        assert hanging.num_connections == 2
        await client.close()


async def test_key_that_the_provider_withdrew_stops_counting(provider: OpenIDProvider) -> None:
    now = 100.0
    client = OpenIDClient(section(provider), {"OIDC_SECRET": SECRET}, clock=lambda: now)

    async def sign_in_directly() -> str:
        location, flow = await client.begin()
        async with ClientSession() as session, session.get(location, allow_redirects=False) as response:
            query = urlsplit(response.headers["location"]).query
        return (await client.complete(query.encode(), flow)).name

    try:
        assert await sign_in_directly() == "anna"
        provider.published_id = "2"
        assert await sign_in_directly() == "anna", "the keys are cached"
        now += 301.0
        with pytest.raises(InvalidAPIKey, match="names no key"):
            await sign_in_directly()
    finally:
        await client.close()


async def test_code_exchanges_at_a_provider_that_hangs_are_limited(provider: OpenIDProvider) -> None:
    client = OpenIDClient(section(provider), {"OIDC_SECRET": SECRET})
    _, flow = await client.begin()
    provider.hangs_at = "/token"
    query = f"code=x&state={flow.state}".encode()
    calls = [asyncio.create_task(client.complete(query, flow)) for _ in range(40)]
    await provider.hanging.wait()
    rejected, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert all(isinstance(each.exception(), Overloaded) for each in rejected)
    provider.hangs_at = None
    provider.released.set()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(each) for each in ends} == {Overloaded, InvalidAPIKey}, "the others were tried"
    await client.close()


async def test_trusted_proxy_names_the_user_and_nobody_else_can(start_gateway: StartGateway) -> None:
    headers = {"x-forwarded-user": "carl", "x-forwarded-groups": "lab, admins", **PAGE}
    trusted = SignInSection(proxy_addresses=("127.0.0.0/8",), operator_roles=("admins",))
    client = await start_gateway(sign_in=trusted)
    status, who = await client.get("/session", **headers)
    assert (status, who["name"], who["operator"]) == (200, "carl", True)
    assert (await client.get("/session", **PAGE))[0] == 401, "the proxy names nobody"
    status, _ = await client.post("/fleet/models/a/load", {}, **{**headers, "sec-fetch-site": "cross-site"})
    assert status == 401, "a page of another site makes the browser send it"
    elsewhere = SignInSection(proxy_addresses=("10.0.0.1",), operator_roles=("admins",))
    client = await start_gateway(sign_in=elsewhere)
    assert (await client.get("/session", **headers))[0] == 401


@pytest.mark.parametrize(
    ("claims", "path", "roles"),
    [
        ({"groups": ["a", 1, "b"]}, "groups", ("a", "b")),
        ({"role": "a"}, "role", ("a",)),
        ({"realm_access": {"roles": ["a"]}}, "realm_access.roles", ("a",)),
        ({"https://x.example/roles": ["a"]}, "https://x.example/roles", ("a",)),
        ({"groups": None}, "groups", ()),
        ({}, "a.b", ()),
    ],
)
def test_roles_are_found_in_claims(claims: dict[str, Any], path: str, roles: tuple[str, ...]) -> None:
    assert roles_in(claims, path) == roles


@pytest.mark.parametrize(
    "fields",
    [
        {"issuer": "http://login.example", "client_id": "c", "public_url": PUBLIC},
        {"issuer": "https://login.example", "client_id": "c"},
        {"issuer": "https://login.example", "public_url": PUBLIC},
        {"proxy_addresses": ("beast",)},
    ],
)
def test_invalid_section_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"issuer|public_url|client_id|proxy_addresses"):
        SignInSection(**fields)


async def test_conversations_are_kept_for_their_owner_if_the_operator_allows_it(start_gateway: StartGateway) -> None:
    trusted = SignInSection(proxy_addresses=("127.0.0.0/8",), conversations=True)
    client = await start_gateway(sign_in=trusted)
    anna, bert = ({"x-forwarded-user": name, **PAGE} for name in ("anna", "bert"))
    assert (await client.get("/session", **anna))[1]["conversations"] is True
    url = f"{client.url}/session/conversations"

    async def put(number: int, headers: dict[str, str], path: str | None = None) -> int:
        body = {"id": f"c{number}", "changed": number, "turns": [{"user": "x" * 100_000}]}
        async with client.session.put(f"{url}/{path or body['id']}", json=body, headers=headers) as response:
            return response.status

    async def listed(headers: dict[str, str]) -> list[str]:
        _, body = await client.get("/session/conversations", **headers)
        return [each["id"] for each in body["conversations"]]

    assert [await put(number, anna) for number in range(62)] == [200] * 62
    assert await put(1, anna, "another") == 400
    assert await listed(anna) == [f"c{number}" for number in range(61, 1, -1)], "the latest ones"
    assert await listed(bert) == []
    for headers, expected in ((bert, 404), (anna, 200)):
        async with client.session.delete(f"{url}/c61", headers=headers) as response:
            assert response.status == expected
    assert (await listed(anna))[0] == "c60"
    without = await start_gateway(sign_in=SignInSection(proxy_addresses=("127.0.0.0/8",)))
    assert (await without.get("/session/conversations", **anna))[0] == 404
    assert (await without.get("/session", **anna))[1]["conversations"] is False
