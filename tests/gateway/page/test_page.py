"""The page's routes: what a browser gets, what a program gets, and who is signed in."""

from __future__ import annotations

import asyncio
import gzip
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.ledger.keys import generate
from cortex.gateway.ledger.sessions import LIFETIME_S, SECRET_FILE, Sessions
from cortex.gateway.page.signing_in import MOST_FAILURES

from ...waiting import WAIT_S

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import Client, StartGateway


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PAGE = {"x-cortex-page": "1"}


async def sign_in(client: Client, key_text: str, **headers: str) -> tuple[int, str]:
    """The status, and the cookie as a browser would send it back."""
    body = msgspec.json.encode({"key": key_text})
    async with client.session.post(client.url + "/session", data=body, headers=PAGE | headers) as response:
        return response.status, response.headers.get("set-cookie", "").partition(";")[0]


async def test_browsers_get_the_page_and_programs_the_greeting(start_gateway: StartGateway) -> None:
    client = await start_gateway()
    async with client.session.get(client.url + "/", headers=BROWSER) as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        assert "page/js/main.js" in await response.text()
        policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    _, greeting = await client.get("/")
    assert greeting["name"] == "cortex"


async def test_page_files_need_no_key_and_are_cached_by_their_etag(start_gateway: StartGateway) -> None:
    client = await start_gateway(keys=(generate("anna").section,))
    url = client.url + "/page/js/main.js"
    async with client.session.get(url, headers={"accept-encoding": "gzip"}, auto_decompress=False) as response:
        assert response.headers["content-encoding"] == "gzip"
        assert b"import" in gzip.decompress(await response.read())
        etag = response.headers["etag"]
    async with client.session.get(url, headers={"if-none-match": etag}) as response:
        assert response.status == 304
    for missing in ("/page/", "/page/../server.py", "/page/%2e%2e/page.py", "/page/nothing.js"):
        async with client.session.get(client.url + missing) as response:
            assert response.status == 404 or "text/html" not in response.headers["content-type"]


async def test_sign_in_gives_a_cookie_that_scripts_cannot_read(start_gateway: StartGateway, tmp_path: Path) -> None:
    anna, ben = generate("anna", operator=True), generate("ben")
    client = await start_gateway(keys=(anna.section, ben.section))
    body = msgspec.json.encode({"key": f" {anna.text}\n"})
    https = {"x-forwarded-proto": "https"}
    async with client.session.post(client.url + "/session", data=body, headers=PAGE | https) as response:
        cookie = response.headers["set-cookie"]
    for attribute in ("HttpOnly", "SameSite=Strict", f"Max-Age={LIFETIME_S}", "Secure"):
        assert attribute in cookie
    assert anna.text not in cookie
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600

    for key, is_operator in ((anna, True), (ben, False)):
        _, session = await sign_in(client, key.text)
        status, who = await client.get("/session", cookie=session)
        assert (status, who["name"], who["operator"]) == (200, key.section.name, is_operator)
    assert (await client.get("/session"))[0] == 401
    assert (await sign_in(client, "ck-wrong"))[0] == 401


async def test_session_may_do_what_its_key_may(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    node = await neurons("n", sizes={"a": 1, "b": 1})
    anna, ben = generate("anna", operator=True), generate("ben", models=("a",))
    client = await start_gateway(node, keys=(anna.section, ben.section))
    _, operator = await sign_in(client, anna.text)
    _, user = await sign_in(client, ben.text)
    _, listed = await client.get("/v1/models", cookie=user)
    assert [model["id"] for model in listed["data"]] == ["a"]
    assert (await client.post("/fleet/models/a/load", cookie=user, **PAGE))[0] == 403
    assert (await client.post("/fleet/models/a/load", cookie=operator, **PAGE))[0] == 200
    chat = {"model": "a", "messages": [{"role": "user", "content": "hello"}]}
    assert (await client.post("/v1/chat/completions", chat, cookie=user, **PAGE))[0] == 200
    assert "cookie" not in node.seen[0].headers


async def test_forged_requests_with_a_session_are_rejected(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    node = await neurons("n", sizes={"a": 1})
    anna = generate("anna", operator=True)
    client = await start_gateway(node, keys=(anna.section,))
    _, session = await sign_in(client, anna.text)
    assert (await client.post("/fleet/models/a/load", cookie=session))[0] == 401, "without the page's header"
    for site in ("cross-site", "same-site"):
        forged = {"cookie": session, "sec-fetch-site": site}
        assert (await client.post("/fleet/models/a/load", **forged, **PAGE))[0] == 401
        assert (await client.get("/fleet/status", **forged))[0] == 401
        assert (await sign_in(client, anna.text, **{"sec-fetch-site": site}))[0] == 400
    assert not node.load_requests


async def test_other_sites_cannot_order_an_open_gateway(start_gateway: StartGateway, neurons: StartNeuron) -> None:
    node = await neurons("n", sizes={"a": 1})
    client = await start_gateway(node)
    assert (await client.post("/fleet/models/a/load", **{"sec-fetch-site": "cross-site"}))[0] == 403
    assert not node.load_requests


async def test_session_ends_with_its_time_its_key_or_a_changed_byte(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    anna, ben = generate("anna"), generate("ben")
    client = await start_gateway(keys=(anna.section, ben.section))
    _, session = await sign_in(client, anna.text)
    assert (await client.get("/session", cookie=session))[0] == 200

    head, _, signature = session.rpartition(".")
    key_id, _, expires = head.rpartition(".")
    ben_id = key_id.replace(anna.section.id, ben.section.id)
    later = f"{key_id}.{int(expires) + 9}"
    changed = [
        f"{later}.{signature}",
        f"{head}.{signature[:-1]}",
        f"{ben_id}.{expires}.{signature}",
        f"{head}.é",
        key_id,
    ]
    for forged in changed:
        assert (await client.get("/session", cookie=forged))[0] == 401, forged

    past = Sessions(tmp_path, clock=lambda: 1000.0).issue(anna.section)
    assert (await client.get("/session", cookie=f"cortex_session={past}"))[0] == 401

    gateway = client.gateway
    expired = msgspec.structs.replace(anna.section, expires="2020-01-01")
    for keys in ((ben.section, expired), (ben.section,)):
        await gateway.reconfigure(msgspec.structs.replace(gateway.config, keys=keys), Catalogue())
        assert (await client.get("/session", cookie=session))[0] == 401


async def test_session_outlives_a_restart_of_the_gateway(start_gateway: StartGateway) -> None:
    anna = generate("anna")
    first = await start_gateway(keys=(anna.section,))
    _, session = await sign_in(first, anna.text)
    await first.gateway.close()
    second = await start_gateway(keys=(anna.section,))
    assert (await second.get("/session", cookie=session))[0] == 200


async def test_sign_ins_are_in_the_audit_log_without_what_was_sent(start_gateway: StartGateway) -> None:
    anna, ben = generate("anna", operator=True), generate("ben")
    client = await start_gateway(keys=(anna.section, ben.section))
    wrong = anna.text[:-4] + "zzzz"
    signed_in = [(anna.text, 200), *[(ben.text, 200)] * 5]
    for key_text, expected in (*signed_in, *[(wrong, 401)] * MOST_FAILURES, (anna.text, 429)):
        assert (await sign_in(client, key_text))[0] == expected
    _, body = await client.get("/fleet/audit?limit=1000", authorization=f"Bearer {anna.text}")
    entries = body["entries"][::-1]
    assert [(entry["key_id"], entry["key_name"], entry["status"], entry["detail"]) for entry in entries[:2]] == [
        (anna.section.id, "anna", 200, "signed in as operator"),
        (ben.section.id, "ben", 200, "signed in"),
    ]
    assert [(entry["key_id"], entry["status"]) for entry in entries[2:]] == [("", 401)] * MOST_FAILURES
    assert "unknown" in entries[2]["detail"]
    assert {(entry["action"], entry["client"]) for entry in entries} == {("POST /session", "127.0.0.1")}
    assert wrong not in str(entries)


async def test_no_way_to_write_the_path_of_a_sign_in_makes_it_another_action(start_gateway: StartGateway) -> None:
    anna = generate("anna", operator=True)
    client = await start_gateway(keys=(anna.section,))
    for path in ("/session", "/session/", "/session//"):
        body = msgspec.json.encode({"key": anna.text})
        assert (await client.post(path, body, **PAGE))[0] == 200
    _, body = await client.get("/fleet/audit", authorization=f"Bearer {anna.text}")
    assert [entry["action"] for entry in body["entries"]] == ["POST /session"]


async def test_sign_out_removes_the_cookie(start_gateway: StartGateway) -> None:
    client = await start_gateway(keys=(generate("anna").section,))
    async with client.session.delete(client.url + "/session", headers=PAGE) as response:
        assert "cortex_session=; " in response.headers["set-cookie"]
        assert "Max-Age=0" in response.headers["set-cookie"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"key": 3}', b"\xff"])
async def test_sign_in_with_a_malformed_body_is_rejected(start_gateway: StartGateway, body: bytes) -> None:
    client = await start_gateway(keys=(generate("anna").section,))
    assert (await client.post("/session", body, **PAGE))[0] == 400


async def test_event_stream_has_every_node_and_then_what_changes(
    start_gateway: StartGateway, neurons: StartNeuron
) -> None:
    node = await neurons("n", sizes={"a": 1, "b": 1})
    client = await start_gateway(node)
    async with client.session.get(client.url + "/fleet/events?nodes=1") as response:

        async def next_event(kind: str) -> dict[str, Any]:
            async with asyncio.timeout(WAIT_S):
                while (await response.content.readline()).strip() != f"event: {kind}".encode():
                    pass
                return msgspec.json.decode(
                    (await response.content.readline()).removeprefix(b"data: "), type=dict[str, Any]
                )

        first = await next_event("fleet")
        assert first["nodes"][0]["cold_models"] == ["a", "b"]
        await client.post("/fleet/models/a/load")
        changed = await next_event("node")
        while not changed["models"] or changed["models"][0]["state"] != "ready":
            changed = await next_event("node")
        assert (changed["models"][0]["id"], changed["models"][0]["pinned_by"]) == ("a", None)

        pinning = Catalogue(models=(ModelSpec(id="a", pinned_on=("n",)),))
        await client.gateway.reconfigure(client.gateway.config, pinning)
        (pinned,) = (await next_event("fleet"))["nodes"][0]["models"]
        assert pinned["pinned_by"] == "catalogue", "pins of the catalogue are no change of a node"


@pytest.mark.parametrize("path", ["/fleet/events?nodes=1", "/fleet/activity/events"])
async def test_event_streams_are_kept_alive_and_do_not_delay_a_shutdown(start_gateway: StartGateway, path: str) -> None:
    client = await start_gateway(keepalive_s=0.1)
    async with client.session.get(client.url + path) as response:
        async with asyncio.timeout(WAIT_S):
            for _ in range(3):
                while (await response.content.readline()) != b": keepalive\n":
                    pass
            await client.gateway.close(grace_s=3600)
            await response.content.read()
