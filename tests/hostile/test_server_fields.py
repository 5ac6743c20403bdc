"""Fields of requests to foreign servers that would use more tokens, or another model, than the key may: they are
rejected by name, or counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.wire.node import headers

from ..gateway.fake_neuron import GB, FakeNeuron, Seen
from ..picture_files import base64_of, data_url, picture

if TYPE_CHECKING:
    from ..gateway.fake_neuron import StartNeuron
    from ..gateway.started_gateway import Client, StartGateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID},
    COMPLETIONS: {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
}
FAKE = base64_of(picture(8, 8)[:24]) + "A" * 100_000
"""Text that begins as a picture does."""


@pytest.fixture
async def foreign(neurons: StartNeuron) -> FakeNeuron:
    return await neurons("foreign", sizes={"a": GB, "b": GB})


@pytest.fixture
def poor() -> NewKey:
    return generate("poor", balance_tokens=1500)


@pytest.fixture
def bound() -> NewKey:
    return generate("bound", models=("a",))


@pytest.fixture
async def client(foreign: FakeNeuron, poor: NewKey, bound: NewKey, start_gateway: StartGateway) -> Client:
    return await start_gateway(foreign=(foreign,), keys=(poor.section, bound.section, generate("free").section))


UNKNOWN = ["n_cmpl", "max_new_tokens", "max_length", "num_predict", "models", "fallbacks", "extra_body", "options"]


@pytest.mark.parametrize("path", LEAST)
async def test_unknown_field_of_a_limited_key_is_rejected_by_name(
    client: Client, foreign: FakeNeuron, poor: NewKey, bound: NewKey, path: str
) -> None:
    for key in (poor, bound):
        for name in UNKNOWN:
            body = {"model": "a", **LEAST[path], name: 100_000}
            status, reply = await client.post(path, body, authorization=f"Bearer {key.text}")
            assert (status, reply["error"]["param"]) == (400, name), reply
            assert "not known here" in reply["error"]["message"]
        status, reply = await client.post(path, {"model": "a", **LEAST[path]}, authorization=f"Bearer {key.text}")
        assert status == 200, reply
    assert len(foreign.seen) == 2


def multipart(*fields: tuple[str, str]) -> bytes:
    parts = [f'--A\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields]
    return "".join([*parts, "--A--\r\n"]).encode()


OPAQUE: dict[str, tuple[str, str, bytes, bytes]] = {
    # path, content type, fields that servers know, and one that may choose a model
    "JSON": (
        *("/v1/audio/speech", "application/json"),
        b'{"model": "a", "input": "hi", "voice": "v", "speed": 1.1}',
        b'{"model": "a", "input": "hi", "extra_body": {"model": "b"}}',
    ),
    "form": (
        *("/v1/images/edits", "application/x-www-form-urlencoded"),
        *(b"model=a&prompt=x&n=1&size=8x8", b"model=a&lora=b"),
    ),
    "multipart": (
        *("/v1/audio/transcriptions", "multipart/form-data; boundary=A"),
        multipart(("model", "a"), ("timestamp_granularities[]", "word")),
        multipart(("model", "a"), ("models", "b")),
    ),
    "query": ("/v1/audio/speech", "", b"model=a&language=en", b"model=a&model_id=b"),
    "pictures": (
        *("/v1/images/generations", "application/json"),
        b'{"model": "a", "prompt": "x", "n": 1}',
        b'{"model": "a", "prompt": "x", "batch_size": 100}',
    ),
}


@pytest.mark.parametrize("name", OPAQUE)
async def test_media_routes_send_no_unknown_field_of_a_key_with_limits(
    neurons: StartNeuron, start_gateway: StartGateway, bound: NewKey, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def respond(node: FakeNeuron, request: web.Request, body: Any) -> web.StreamResponse:
        return web.json_response({})

    monkeypatch.setattr(Seen, "body", property(lambda _: {}))
    free, rich = generate("free"), generate("rich", balance_tokens=10_000)
    foreign = await neurons("foreign", sizes={"a": GB, "b": GB}, respond=respond)
    client = await start_gateway(foreign=(foreign,), keys=(bound.section, free.section, rich.section))
    path, content_type, known, unknown = OPAQUE[name]

    async def reply_to(key: NewKey, sent: bytes) -> tuple[int, str]:
        url, data = (path, sent) if content_type else (f"{path}?{sent.decode()}", b"")
        sent_headers = {"authorization": f"Bearer {key.text}", "content-type": content_type or "application/json"}
        async with client.session.post(client.url + url, data=data, headers=sent_headers) as response:
            return response.status, await response.text()

    for key, sent in ((bound, known), (rich, known), (free, known), (free, unknown)):
        assert await reply_to(key, sent) == (200, "{}")
    for key in (bound, rich):
        status, text = await reply_to(key, unknown)
        assert (status, "not known here" in text) == (400, True), text
    assert len(foreign.seen) == 4


async def test_node_is_told_which_media_requests_are_of_a_key_with_models(
    neurons: StartNeuron, start_gateway: StartGateway, bound: NewKey
) -> None:
    """So that the server of a harness gets no unknown field of it either."""
    free = generate("free")
    node = await neurons("beast", sizes={"a": GB}, harnesses=("speech",))
    catalogue = Catalogue(models=(ModelSpec(id="a", harness="speech"),))
    client = await start_gateway(node, keys=(bound.section, free.section), catalogue=catalogue)
    for key in (bound, free):
        await client.post("/v1/audio/speech", {"model": "a", "input": "hi"}, authorization=f"Bearer {key.text}")
    assert [seen.headers.get(headers.FIELDS) for seen in node.seen] == [headers.KNOWN_FIELDS, None]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"best_of": 8}),
        (CHAT, {"best_of": 8}),
        (CHAT, {"chat_template": "{{ 'x' * 1000000 }}"}),
        (COMPLETIONS, {"prompt": [{"prompt_string": "a"}, {"prompt_string": "b"}]}),
        (COMPLETIONS, {"prompt": ["a", [1], "b"]}),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}),
        (COMPLETIONS, {"max_tokens": 0}),
        (CHAT, {"lora_path": "other"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:,x"}}]}]}),
        ("/v1/embeddings", {"input": [{"image": data_url(picture(8, 8))}]}),
    ],
)
async def test_what_cannot_be_counted_is_not_sent_for_a_key_with_a_budget(
    client: Client, foreign: FakeNeuron, poor: NewKey, path: str, fields: dict[str, Any]
) -> None:
    body = {"model": "a", **LEAST[path], **fields}
    status, reply = await client.post(path, body, authorization=f"Bearer {poor.text}")
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), reply
    assert not foreign.seen


FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown place": (CHAT, {"messages": SAID, "metadata": {"url": f"data:image/png;base64,{FAKE}"}}),
    "text part": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "data": FAKE}]}]},
    ),
    "tool": (CHAT, {"messages": SAID, "tools": [{"type": "function", "function": {"name": "f", "url": FAKE}}]}),
    "arguments of a call": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                *SAID,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"type": "base64", "data": FAKE}}
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
            ],
        },
    ),
    "list in a call": (
        "/api/chat",
        {
            "stream": False,
            "messages": [
                *SAID,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"images": [FAKE, FAKE]}}}],
                },
                {"role": "tool", "content": "x"},
            ],
        },
    ),
}


@pytest.mark.parametrize("name", FILES)
async def test_text_that_looks_like_a_picture_counts_as_text(
    client: Client, foreign: FakeNeuron, poor: NewKey, name: str
) -> None:
    path, fields = FILES[name]
    status, reply = await client.post(path, {"model": "a", **fields}, authorization=f"Bearer {poor.text}")
    assert status == 429, reply
    assert not foreign.seen


async def test_picture_counts_by_its_size(client: Client, foreign: FakeNeuron, poor: NewKey) -> None:
    file = picture(64, 48) + bytes(40_000)
    content = [{"type": "image_url", "image_url": {"url": data_url(file)}}]
    body = {"model": "a", "messages": [{"role": "user", "content": content}], "max_tokens": 10}
    status, reply = await client.post(CHAT, body, authorization=f"Bearer {poor.text}")
    assert status == 200, reply
    assert foreign.seen[-1].body["max_tokens"] == 10


async def test_key_without_limits_may_send_any_field(
    foreign: FakeNeuron, start_gateway: StartGateway, poor: NewKey
) -> None:
    free = generate("free")
    client = await start_gateway(foreign=(foreign,), keys=(poor.section, free.section))
    body = {"model": "a", **LEAST[CHAT], "n_cmpl": 2, "mirostat": 1}
    assert (await client.post(CHAT, body, authorization=f"Bearer {free.text}"))[0] == 200
    assert foreign.seen[-1].body == body


ADDRESS = "http://169.254.169.254/latest"
PART = {"type": "image_url", "image_url": {"url": ADDRESS}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["/etc/passwd"]}]}),
        (CHAT, {"messages": SAID, "documents": [{"url": ADDRESS}]}),
        (COMPLETIONS, {"prompt": {"prompt_string": "x", "multimodal_data": [ADDRESS]}}),
        ("/v1/embeddings", {"input": [{"image": ADDRESS}]}),
        ("/v1/rerank", {"query": {"content": [PART]}, "documents": ["x"]}),
        ("/score", {"text_1": "x", "text_2": {"content": [PART]}}),
        ("/v1/images/generations", {"prompt": "x", "image": ADDRESS}),
        ("/v1/images/edits", {"prompt": "x", "image": "/etc/passwd"}),
        ("/v1/audio/speech", {"input": "x", "voice": ADDRESS}),
        ("/v1/images/edits", b"model=a&prompt=x&image=/etc/passwd"),
        (f"/v1/images/edits?url={ADDRESS}", b"model=a&prompt=x"),
    ],
)
async def test_foreign_server_gets_nothing_to_fetch(
    foreign: FakeNeuron, start_gateway: StartGateway, path: str, fields: dict[str, Any] | bytes
) -> None:
    client = await start_gateway(foreign=(foreign,))
    if isinstance(fields, bytes):
        headers = {"content-type": "application/x-www-form-urlencoded"}
        async with client.session.post(client.url + path, data=fields, headers=headers) as response:
            status, reply = response.status, await response.text()
    else:
        status, reply = await client.post(path, {"model": "a", **fields}, **{"content-type": "application/json"})
    assert (status, "may not fetch" in str(reply)) == (400, True), reply
    assert not foreign.seen
