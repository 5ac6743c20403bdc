"""What clients see of models and errors: nothing about nodes, files, or models of other keys."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.gateway.proxy.redaction import ErrorRedaction
from cortex.http.upstream.faults import ResponseTooLarge
from cortex.wire.error_encoding import OPENAI
from cortex.wire.errors import UpstreamUnavailable
from cortex.wire.node.protocol import Capabilities, ModelState

from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import FakeNeuron, StartNeuron
    from ..started_gateway import Client, StartGateway


READY = ModelState.READY
SECRETS = ("beast", "/models/", "secret")


@dataclass
class Keyed:
    """A gateway, and the headers of three of its keys."""

    client: Client
    stream_started: asyncio.Event
    """Set once a keepalive has started the stream."""
    operator: dict[str, str]
    user: dict[str, str]
    limited: dict[str, str]


@pytest.fixture
async def keyed(neurons: StartNeuron, start_gateway: StartGateway) -> Keyed:
    """A node with a failing model, and the keys of an operator, of a user, and of a user of one model."""
    stream_started = asyncio.Event()

    async def failing(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        code, status = ("model_not_found", 404) if body["model"] == "gone" else ("load_failed", 502)
        message = "no weights in /models/secret on beast"
        if body.get("stream"):
            await stream_started.wait()
        return web.json_response({"error": {"message": message, "code": code}}, status=status)

    sizes = dict.fromkeys(("mine-1", "mine-2", "secret-model", "huge"), GB) | {"huge": 10_000 * GB}
    states = dict.fromkeys(("mine-1", "mine-2", "secret-model"), READY)
    beast = await neurons("beast", sizes=sizes, states=states, respond=failing)
    operator, user, limited = (
        generate("operator", operator=True),
        generate("user"),
        generate("limited", models=("mine-*", "huge")),
    )
    client = await start_gateway(beast, keys=tuple(key.section for key in (operator, user, limited)), keepalive_s=0.1)
    return Keyed(
        client, stream_started, *({"authorization": f"Bearer {key.text}"} for key in (operator, user, limited))
    )


def is_clean(body: object) -> bool:
    return not any(secret in msgspec.json.encode(body).decode() for secret in SECRETS)


async def test_key_sees_only_models_it_may_use(keyed: Keyed) -> None:
    listed = {
        name: [entry["id"] for entry in (await keyed.client.get("/v1/models", **headers))[1]["data"]]
        for name, headers in (("user", keyed.user), ("limited", keyed.limited))
    }
    assert listed == {"user": ["huge", "mine-1", "mine-2", "secret-model"], "limited": ["huge", "mine-1", "mine-2"]}
    assert (await keyed.client.get("/v1/models/mine-1", **keyed.limited))[0] == 200
    status, body = await keyed.client.get("/v1/models/secret-model", **keyed.limited)
    assert status == 404
    assert "secret-model" not in body["error"]["message"]


async def test_near_misses_name_only_models_of_the_key(keyed: Keyed) -> None:
    for path in ("/v1/models/secret-mode", "/fleet/explain/secret-mode"):
        assert is_clean((await keyed.client.get(path, **keyed.limited))[1])
    chat = {"model": "secret-mode", "messages": []}
    status, body = await keyed.client.post("/v1/chat/completions", chat, **keyed.limited)
    assert status == 403
    assert "secret-model" not in body["error"]["message"], "only the name that was sent"
    assert (
        "secret-model" in (await keyed.client.post("/v1/chat/completions", chat, **keyed.user))[1]["error"]["message"]
    )
    status, body = await keyed.client.post("/v1/chat/completions", {"model": "mine-3", "messages": []}, **keyed.limited)
    assert "mine-1" in body["error"]["message"]


async def test_models_for_another_task_are_named_only_to_their_keys(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    names = ("chat-a", "secret-embedder")
    capabilities = {"chat-a": Capabilities(), "secret-embedder": Capabilities(chat=False, embeddings=True)}
    states = dict.fromkeys(names, READY)
    node = await neurons("beast", sizes=dict.fromkeys(names, GB), states=states, capabilities=capabilities)
    user, limited = generate("user"), generate("limited", models=("chat-a",))
    client = await start_gateway(node, keys=(user.section, limited.section))
    body = {"model": "chat-a", "input": "x"}
    status, hidden = await client.post("/v1/embeddings", body, authorization=f"Bearer {limited.text}")
    assert (status, hidden["error"]["code"]) == (400, "unsupported_modality")
    assert is_clean(hidden)
    _, shown = await client.post("/v1/embeddings", body, authorization=f"Bearer {user.text}")
    assert "use secret-embedder" in shown["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("model", ["mine-1", "huge"])
async def test_error_shows_internals_only_to_operators(keyed: Keyed, path: str, model: str) -> None:
    body = {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    status, shown = await keyed.client.post(path, body, **keyed.operator)
    assert not is_clean(shown)
    for headers in (keyed.user, keyed.limited):
        hidden_status, hidden = await keyed.client.post(path, body, **headers)
        assert hidden_status == status
        assert is_clean(hidden)
        assert hidden["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_error_after_a_keepalive_shows_no_internals(keyed: Keyed, path: str) -> None:
    body = {"model": "mine-1", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with keyed.client.session.post(keyed.client.url + path, json=body, headers=keyed.user) as response:
        assert response.status == 200
        keyed.stream_started.set()
        text = await response.text()
    assert "error" in text
    assert not any(secret in text for secret in SECRETS)


async def test_log_has_the_full_text_of_a_hidden_error(keyed: Keyed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await keyed.client.post("/v1/chat/completions", {"model": "mine-1", "messages": []}, **keyed.user)
    assert "no weights in /models/secret on beast" in caplog.text


async def test_open_gateway_shows_everything(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"huge": 10_000 * GB})
    client = await start_gateway(beast)
    assert not is_clean((await client.chat("huge"))[1])


FAILED = {"code": "load_failed", "message": "no weights in /models/secret on beast"}


async def test_asks_the_node_to_hide_details_from_all_but_operators(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    operator, user = generate("operator", operator=True), generate("user")
    client = await start_gateway(beast, keys=(operator.section, user.section))
    for key in (operator, user):
        chat = {"model": "a", "messages": [{"role": "user", "content": "x"}]}
        await client.post("/v1/chat/completions", chat, authorization=f"Bearer {key.text}")
    assert [seen.headers.get("x-cortex-error-details") for seen in beast.seen] == [None, "none"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_error_event_of_a_foreign_server_shows_no_internals(
    neurons: StartNeuron, start_gateway: StartGateway, path: str
) -> None:
    async def fails(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for text in ('an \\"error\\": ', "text"):
            chunk = f'{{"id":"x","choices":[{{"index":0,"delta":{{"role":"assistant","content":"{text}"}}}}]}}'
            await response.write(f"data: {chunk}\n\n".encode())
        event = b"data: %b\n\n" % msgspec.json.encode({"error": FAILED})
        for piece in (event[:20], event[20:]):
            await asyncio.sleep(0.01)
            await response.write(piece)
        return response

    foreign = await neurons("elsewhere", sizes={"a": GB}, respond=fails, dialects=("openai_chat",))
    operator, user = generate("operator", operator=True), generate("user")
    client = await start_gateway(foreign=(foreign,), keys=(operator.section, user.section))
    body = {"model": "a", "max_tokens": 5, "stream": True, "messages": [], "input": "x"}
    if path != "/v1/responses":
        body["messages"] = [{"role": "user", "content": "x"}]
    shown = {}
    for key in (operator, user):
        headers = {"authorization": f"Bearer {key.text}"}
        async with client.session.post(client.url + path, json=body, headers=headers) as response:
            shown[key.section.name] = await response.text()
    assert "no weights in /models/secret" in shown["operator"]
    assert not any(secret in shown["user"] for secret in SECRETS)
    assert "error" in shown["user"]
    assert r"an \"error\": " in shown["user"], "generated text stays"


async def test_reasons_of_failures_are_for_operators(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    faults = [(502, "load_failed", "no /models/secret")] * 9
    states = {"a": ModelState.FAILED}
    beast = await neurons("beast", sizes={"a": GB}, states=states, reason="no /models/secret", load_faults=faults)
    operator, user = generate("operator", operator=True), generate("user")
    client = await start_gateway(beast, keys=(operator.section, user.section))
    await client.post("/v1/chat/completions", {"model": "a", "messages": []}, authorization=f"Bearer {user.text}")
    for path in ("/v1/models", "/v1/models/a", "/fleet/status", "/fleet/explain/a", "/fleet/decisions"):
        found = [(await client.get(path, authorization=f"Bearer {key.text}"))[1] for key in (operator, user)]
        has_reason = ["/models/secret" in msgspec.json.encode(each).decode() for each in found]
        assert has_reason == [True, False], path
    for key, is_shown in ((operator, True), (user, False)):
        headers = {"authorization": f"Bearer {key.text}"}
        async with client.session.get(client.url + "/fleet/events?nodes=1", headers=headers) as response:
            first = await response.content.readuntil(b"event: fleet")
            first += await response.content.readuntil(b"\n\n")
        assert (b"/models/secret" in first) == is_shown


async def test_key_with_models_sees_only_those_in_the_fleet(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    sizes = {"mine": GB, "secret-1": 20 * GB, "secret-2": 20 * GB}
    beast = await neurons("beast", sizes=sizes, states={"secret-1": ModelState.READY})
    operator = generate("operator", operator=True)
    user, owner = generate("user", models=("mine",)), generate("owner", operator=True, models=("mine",))
    client = await start_gateway(beast, keys=(operator.section, user.section, owner.section))
    bearers = {key.section.name: {"authorization": f"Bearer {key.text}"} for key in (operator, user)}
    async with client.session.get(client.url + "/fleet/events?nodes=1", headers=bearers["user"]) as response:
        for model in ("secret-2", "mine"):  # the first evicts secret-1
            body: dict[str, Any] = {"model": model, "messages": []}
            assert (await client.post("/v1/chat/completions", body, **bearers["operator"]))[0] == 200
        seen = await response.content.readuntil(b"event: model_loaded")
        seen += await response.content.readuntil(b"\n\n")
    assert b"mine" in seen
    assert b"secret" not in seen
    for path in ("/fleet/status", "/fleet/decisions", "/fleet/explain/mine"):
        found = [msgspec.json.encode((await client.get(path, **bearer))[1]) for bearer in bearers.values()]
        assert [b"mine" in each for each in found] == [True, True], path
        assert b"secret" not in found[1], path
    assert [(await client.get("/fleet/explain/secret-1", **bearer))[0] for bearer in bearers.values()] == [200, 404]
    assert (await client.get("/fleet/explain/secret-1", authorization=f"Bearer {owner.text}"))[0] == 200


PLACE = "http://10.0.0.7:8000/org-secret"
TELLING = {
    **{"location": PLACE, "x-litellm-model-api-base": PLACE, "openai-organization": "org-secret", "via": PLACE},
    **{
        "x-cortex-node": "secret",
        "www-authenticate": "Basic",
        "clear-site-data": "*",
        "access-control-allow-origin": "*",
    },
}
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/v1/embeddings": {"input": "x"},
    "/v1/images/generations": {"prompt": "x"},
}


@pytest.mark.parametrize("path", PROMPTS)
async def test_foreign_server_shows_neither_its_place_nor_its_account(
    neurons: StartNeuron, start_gateway: StartGateway, path: str
) -> None:
    status = 200

    async def respond(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        reply: dict[str, Any] = {"id": "1", "created": 1, "model": "a", "choices": [choice], "data": []}
        if status != 200:
            reply = {"error": {"message": f"{status} for org-secret at {PLACE}", "code": "insufficient_quota"}}
        kind = "application/json" if status in (200, 400) else "text/html"
        headers = {**TELLING, "retry-after": "7", "content-type": kind}
        return web.Response(body=msgspec.json.encode(reply), status=status, headers=headers)

    foreign = await neurons("elsewhere", sizes={"a": GB}, respond=respond)
    operator, user = generate("operator", operator=True), generate("user", models=("a",))
    client = await start_gateway(foreign=(foreign,), keys=(operator.section, user.section))

    async def ask(key: NewKey) -> tuple[int, str, dict[str, str]]:
        sent, body = {"authorization": f"Bearer {key.text}"}, {"model": "a", **PROMPTS[path]}
        async with client.session.post(client.url + path, json=body, headers=sent, allow_redirects=False) as response:
            return (
                response.status,
                await response.text(),
                {name.lower(): text for name, text in response.headers.items()},
            )

    found, _, shown = await ask(user)
    assert (found, set(shown) & set(TELLING)) == (200, set())
    for status in (307, 402, 403, 405, 409, 429):
        found, text, shown = await ask(user)
        assert (found, set(shown) & set(TELLING)) == (429 if status == 429 else 502, set())
        assert (shown["content-type"], shown["retry-after"]) == ("application/json", "7")
        assert "org-secret" not in text
        assert "10.0.0.7" not in text
    assert "org-secret" in (await ask(operator))[1]
    for status in (400, 413, 422):
        found, text, shown = await ask(user)
        assert (found, set(shown) & set(TELLING)) == (413 if status == 413 else 400, set())
        error = msgspec.json.decode(text)["error"]
        assert error["message"] == f"{status} for … at …", "about the request"
        assert error["type"] == "invalid_request_error" or found == 413
        assert ("code" in error) == (path != "/v1/messages")
    assert f"422 for org-secret at {PLACE}" in (await ask(operator))[1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_error_about_the_request_names_the_model_as_the_client_did(
    neurons: StartNeuron, start_gateway: StartGateway, path: str, *, is_late: bool
) -> None:
    may_respond = asyncio.Event()

    async def rejects(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await may_respond.wait()
        text = "The model behind-9b-2024 or secret-model of req_0123456789 has a maximum context length of 8,192."
        error = {"message": text, "type": "invalid_request_error", "param": "messages", "code": None}
        return web.json_response({"error": error}, status=400)

    foreign = await neurons("elsewhere", sizes={"behind-9b": GB, "secret-model": GB}, respond=rejects)
    user = generate("user", models=("behind-9b",))
    catalogue = Catalogue(aliases={"smart": "behind-9b"})
    client = await start_gateway(foreign=(foreign,), keys=(user.section,), catalogue=catalogue, keepalive_s=0.05)
    body: dict[str, Any] = {"model": "smart", "max_tokens": 5, "stream": is_late}
    body |= {"input": "x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}
    headers = {"authorization": f"Bearer {user.text}"}
    if not is_late:
        may_respond.set()
    async with client.session.post(client.url + path, json=body, headers=headers) as response:
        may_respond.set()
        text = await response.text()
    assert "The model smart or … of … has a maximum context length of 8,192." in text
    assert "behind" not in text
    if not is_late:
        assert response.status == 400
    if path in ("/v1/chat/completions", "/v1/responses") and not is_late:
        error = msgspec.json.decode(text)["error"]
        field = "messages" if path == "/v1/chat/completions" else "input"
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)


def test_does_not_hold_an_endless_error() -> None:
    redaction = ErrorRedaction(None, OPENAI, lambda status, body: UpstreamUnavailable(f"{status} {len(body)}"))
    redaction.head(500, ())
    for _ in range(10):
        redaction.push(b"x" * 100_000)
    with pytest.raises(ResponseTooLarge, match="1048576"):
        redaction.push(b"x" * 100_000)
