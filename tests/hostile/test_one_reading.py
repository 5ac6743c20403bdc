"""A key's models against bodies that servers read in other ways than the gateway: through a real gateway, to a foreign
server that has a model which the key may not use."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.gateway.ledger.keys import NewKey, generate

from ..gateway.fake_neuron import GB, FakeNeuron, Seen

if TYPE_CHECKING:
    from ..gateway.fake_neuron import StartNeuron
    from ..gateway.started_gateway import Client, StartGateway

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
MESSAGES = b'"messages": [{"role": "user", "content": "hi"}]'
JSON = "application/json"
FORM = "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"


def part(name: str, value: str, end: str = "\r\n", boundary: str = "A") -> str:
    lines = [f"--{boundary}", f'Content-Disposition: form-data; name="{name}"', "", value, ""]
    return end.join(lines)


def form(*parts: str, boundary: str = "A") -> bytes:
    return ("".join(parts) + f"--{boundary}--\r\n").encode()


TWO_FORMS = form(part("model", "fsecret", boundary="B"), boundary="B").replace(b"--B--\r\n", b"") + form(
    part("model", "fa")
)
HIDDEN = part("model", "fsecret", end="\n").rstrip("\n")
BYPASSES: dict[str, tuple[str, dict[str, str], bytes]] = {
    # path, headers, body
    "other letters": (CHAT, {}, b'{"model": "fa", "Model": "fsecret", %b}' % MESSAGES),
    "capitals": (CHAT, {}, b'{"MODEL": "fsecret", "model": "fa", %b}' % MESSAGES),
    "separators": (CHAT, {}, b'{"mod_el": "fsecret", "model": "fa", %b}' % MESSAGES),
    "NUL": (CHAT, {}, b'{"model\\u0000": "fsecret", "model": "fa", %b}' % MESSAGES),
    "twice": (CHAT, {}, b'{"model": "fsecret", "model": "fa", %b}' % MESSAGES),
    "twice with escapes": (CHAT, {}, rb'{"mod\u0065l": "fsecret", "model": "fa", %b}' % MESSAGES),
    "BOM": (CHAT, {}, b'\xef\xbb\xbf{"model": "fa", %b}' % MESSAGES),
    "UTF-16": (CHAT, {}, (b'{"model": "fa", %b}' % MESSAGES).decode().encode("utf-16")),
    "two objects": (CHAT, {}, b'{"model": "fa", %b}{"model": "fsecret"}' % MESSAGES),
    "completions": ("/v1/completions", {}, b'{"model": "fa", "Model": "fsecret", "prompt": "hi"}'),
    "embeddings": ("/v1/embeddings", {}, b'{"model": "fa", "MODEL": "fsecret", "input": "hi"}'),
    "rerank": ("/v1/rerank", {}, b'{"model": "fa", "Model": "fsecret", "query": "x", "documents": ["y"]}'),
    "speech": (SPEECH, {"content-type": JSON}, b'{"model": "fa", "Model": "fsecret", "input": "hi"}'),
    "speech with a charset": (
        SPEECH,
        {"content-type": f"{JSON}; charset=utf-16"},
        b'{"model": "fsecret", "model": "fa", "input": "hi"}',
    ),
    "query and a body without a type": (f"{SPEECH}?model=fa", {}, b'{"model": "fsecret"}'),
    "query and a body of another type": (f"{SPEECH}?model=fa", {"content-type": "audio/wav"}, b'{"model": "fsecret"}'),
    "query and JSON": (f"{SPEECH}?model=fsecret", {"content-type": JSON}, b'{"model": "fa", "input": "hi"}'),
    "query with other letters": (f"{SPEECH}?model=fa&Model=fsecret", {}, b""),
    "query with brackets": (f"{SPEECH}?model=fa&model%5B%5D=fsecret", {}, b""),
    "query with a semicolon": (f"{SPEECH}?x=1;model=fsecret&model=fa", {}, b""),
    "form with a semicolon": (SPEECH, {"content-type": URLENCODED}, b"x=1;model=fsecret&model=fa"),
    "form with other letters": (SPEECH, {"content-type": URLENCODED}, b"model=fa&mod%65L=fsecret"),
    "form with a charset": (SPEECH, {"content-type": f"{URLENCODED}; charset=utf-7"}, b"model=fa"),
    "parameter that ends with boundary": (SPEECH, {"content-type": f"{FORM}; xboundary=A; boundary=B"}, TWO_FORMS),
    "two boundaries": (SPEECH, {"content-type": f"{FORM}; boundary=A; boundary=B"}, TWO_FORMS),
    "encoded boundary": (SPEECH, {"content-type": f"{FORM}; boundary=A; boundary*=utf-8''B"}, TWO_FORMS),
    "two types": (SPEECH, {"content-type": f"{FORM}; boundary=A, {JSON}"}, TWO_FORMS),
    "preamble": (SPEECH, {"content-type": f"{FORM}; boundary=A"}, TWO_FORMS),
    "field with other letters": (
        SPEECH,
        {"content-type": f"{FORM}; boundary=A"},
        form(part("model", "fa"), part("Model", "fsecret")),
    ),
    "bare line feeds": (
        SPEECH,
        {"content-type": f"{FORM}; boundary=A"},
        form(part("model", "fa"), part("note", f"x\n{HIDDEN}")),
    ),
    "folded header": (
        SPEECH,
        {"content-type": f"{FORM}; boundary=A"},
        form(part("model", "fa"), part("x", "fsecret").replace('name="x"', 'name="x"\r\n ; name="model"')),
    ),
    "encoded field": (
        SPEECH,
        {"content-type": f"{FORM}; boundary=A"},
        form(part("model", "=66a").replace("\r\n\r\n", "\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n")),
    ),
}


@pytest.fixture
async def alice() -> NewKey:
    return generate("alice", models=("fa",))


@pytest.fixture
async def foreign(neurons: StartNeuron) -> FakeNeuron:
    async def respond(node: FakeNeuron, request: web.Request, body: Any) -> web.StreamResponse:
        node.seen[-1].headers["query"] = request.query_string
        return web.json_response({"choices": [], "data": [], "results": []})

    return await neurons("foreign", sizes={"fa": GB, "fsecret": GB}, respond=respond)


@pytest.fixture
async def client(
    foreign: FakeNeuron, alice: NewKey, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> Client:
    monkeypatch.setattr(Seen, "body", property(lambda _: {}))
    return await start_gateway(foreign=(foreign,), keys=(alice.section,))


@pytest.mark.parametrize("name", BYPASSES)
async def test_server_gets_no_model_that_the_key_may_not_use(
    client: Client, foreign: FakeNeuron, alice: NewKey, name: str
) -> None:
    path, headers, body = BYPASSES[name]
    sent = {"authorization": f"Bearer {alice.text}", **headers}
    skipped = () if headers else ("content-type",)
    async with client.session.post(client.url + path, data=body, headers=sent, skip_auto_headers=skipped) as response:
        text = await response.text()
    if response.status >= 400:
        assert response.status in (400, 403, 415), text
        assert not foreign.seen
        return
    [seen] = foreign.seen
    readable = _read_elsewhere(seen)
    assert readable == {"fa"}, seen.raw


def _read_elsewhere(seen: Seen) -> set[str]:
    """The models that servers find, however they read what they got."""
    content_type = seen.headers.get("content-type", "")
    found = {
        value for pair in seen.headers["query"].replace(";", "&").split("&") for value in [_value_of(pair)] if value
    }
    if content_type == JSON:
        return found | {value for name, value in _members(seen.raw) if name.casefold() == "model"}
    if content_type == URLENCODED:
        pairs = seen.raw.decode().replace(";", "&").split("&")
        return found | {value for pair in pairs for value in [_value_of(pair)] if value}
    if content_type.startswith(FORM):
        boundary = content_type.removeprefix(f"{FORM}; boundary=")
        lines = seen.raw.decode().replace("\r\n", "\n").split("\n")
        for index, line in enumerate(lines):
            if line == f"--{boundary}" and 'name="model"' in lines[index + 1]:
                found.add(lines[lines.index("", index) + 1])
    return found


def _value_of(pair: str) -> str | None:
    name, _, value = pair.partition("=")
    return value if name.casefold().startswith("model") else None


def _members(raw: bytes) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = json.loads(raw, object_pairs_hook=lambda each: each)
    return pairs


async def test_two_content_types_are_rejected(client: Client, foreign: FakeNeuron, alice: NewKey) -> None:
    body = form(part("model", "fa"))
    head = (
        f"POST {SPEECH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {alice.text}\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: {FORM}; boundary=A\r\nContent-Type: {FORM}; boundary=B\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(head.encode() + body)
    response = await reader.read()
    writer.close()
    assert response.startswith(b"HTTP/1.1 400 "), response
    assert b"one Content-Type header" in response
    assert not foreign.seen


async def test_case_of_the_limit_does_not_lift_the_budget(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    key = generate("alice", balance_tokens=500)
    foreign = await neurons("foreign", sizes={"a": GB})
    client = await start_gateway(foreign=(foreign,), keys=(key.section,))
    body = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}
    for name in ("Max_Tokens", "maxTokens", "MAX_COMPLETION_TOKENS", "max_token\u017f", "N", "n_"):
        sent = msgspec.json.encode({**body, name: 100_000})
        status, reply = await client.post(CHAT, sent, authorization=f"Bearer {key.text}")
        assert (status, reply["error"]["param"]) == (400, name)
    assert not foreign.seen
