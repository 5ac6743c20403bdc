"""Requests that only the server of a model understands, through the API of a node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from faulty_models import running_node, write_model
from yarl import URL

from cortex.neuron.node.node import Node
from cortex.wire.node import headers
from cortex.wire.node.protocol import ModelState

from .....waiting import WAIT_S, until
from ....api.served import served
from .commands import config, servers

AUDIO = ("/v1/audio/transcriptions", "/v1/audio/speech", "/v1/audio/voices")
FORM = {"content-type": "multipart/form-data"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
FILE = bytes(range(256)) * 4 * 1024 * 5  # 5 MiB


class Caller:
    def __init__(self, node: Node, session: aiohttp.ClientSession) -> None:
        self.node = node
        self.session = session

    async def __call__(self, path: str, method: str = "POST", **given: Any) -> tuple[int, Any]:
        async with self.session.request(method, path, **given) as response:
            text = await response.text()
            return response.status, json.loads(text) if text and response.content_type == "application/json" else text


@pytest_asyncio.fixture(loop_scope="session")
async def call(tmp_path: Path) -> AsyncIterator[Caller]:
    entry: dict[str, Any] = {
        "upstream_model": "theirs",
        "set_params": {"speed": 2, "nested": {"a": 1}},
        "strip_params": ["voice"],
        "routes": [*AUDIO, "/v1/images/edits", "/v1/embeddings", "/v1/completions", "/infill"],
    }
    settings = config(max_concurrent=1, **entry)
    settings["models"].append({"id": "native", "source": str(write_model(tmp_path / "native"))})
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with (
        running_node(tmp_path, settings) as node,
        served(node, keepalive_s=0.2) as (host, port),
        aiohttp.ClientSession(f"http://{host}:{port}", timeout=timeout) as session,
    ):
        yield Caller(node, session)


def form(*fields: tuple[str, Any], file: bytes | None = FILE) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in fields:
        data.add_field(name, value)
    if file is not None:
        data.add_field("file", file, filename='a "b" ü.wav', content_type="audio/wav")
    return data


async def test_every_form_of_a_request(call: Caller) -> None:
    """The model is found in JSON, in a form with a file before or after it, in the query, and in the path."""
    status, received = await call("/v1/audio/speech", json={"model": "m", "input": "hi", "voice": "x"})
    assert status == 200, received
    sent = {"model": "theirs", "input": "hi", "speed": 2, "nested": {"a": 1}}
    assert json.loads(received["first"]) == sent
    assert (received["method"], received["path"]) == ("POST", "/v1/audio/speech")

    before, after = form(file=None), form(("model", "m"), ("voice", "x"), ("language", "de"))
    before.add_field("file", FILE, filename="a.wav")
    before.add_field("model", "m")
    for data in (before, after):
        status, received = await call("/v1/audio/transcriptions", data=data)
        assert status == 200, received
        assert len(FILE) < received["num_bytes"] < len(FILE) + 2000
        assert 'name="model"\r\n\r\ntheirs\r\n' in received["first"]
        assert 'name="speed"\r\n\r\n2\r\n' in received["first"]
        assert 'name="nested"\r\n\r\n{"a": 1}\r\n' in received["first"]
        whole = received["first"] + received["last"]
        assert 'name="voice"' not in whole
        assert "\r\nm\r\n" not in whole
    assert 'name="language"\r\n\r\nde\r\n' in received["first"]

    status, received = await call("/v1/audio/voices?model=m&x=a%20b", "GET")
    assert (status, received["path"], received["method"]) == (200, "/v1/audio/voices?model=theirs&x=a+b", "GET")
    status, problem = await call("/v1/audio/transcriptions?model=m", data=FILE, headers={"content-type": "audio/wav"})
    assert (status, "in the body only" in problem["error"]["message"]) == (400, True)
    fields = {"model": "m", "voice": "x", "input": "ü &"}
    status, received = await call("/v1/audio/speech", data=fields)
    assert received["first"] == "model=theirs&speed=2&nested=%7B%22a%22%3A+1%7D&input=%C3%BC+%26"

    status, received = await call("/upstream/m/any/thing?q=1", "PUT", data=FILE)
    assert (status, received["path"], received["method"]) == (200, "/any/thing?q=1", "PUT")
    assert received["sha256"] == hashlib.sha256(FILE).hexdigest()
    assert (await call("/upstream/m", "GET"))[1]["state"] == "awake"
    assert (await call("/upstream/m", "HEAD"))[0] == 405


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/audio/speech", {"json": {"model": "m", "input": "hi"}}),
        ("/v1/audio/speech", {"data": {"model": "m", "input": "hi"}}),
        ("/v1/chat/completions", {"json": CHAT}),
        ("/v1/embeddings", {"json": {"model": "m", "input": "hi"}}),
        ("/infill", {"json": {"model": "m", "input_prefix": "a", "input_suffix": "b"}}),
    ],
    ids=["JSON", "form", "chat", "embeddings", "infill"],
)
async def test_slash_at_the_end_of_a_path_is_not_the_servers(call: Caller, path: str, given: dict[str, Any]) -> None:
    plain, ignored = [await call(path + end, **given) for end in ("", "/")]
    assert (ignored[0], ignored[1].get("path")) == (plain[0], plain[1].get("path")), ignored


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/audio/speech", lambda name: {"json": {"model": "m", "input": "hi", name: "x"}}),
        ("/v1/audio/speech", lambda name: {"data": {"model": "m", "input": "hi", name: "x"}}),
        ("/v1/audio/transcriptions", lambda name: {"data": form(("model", "m"), (name, "x"))}),
    ],
    ids=["JSON", "form", "multipart"],
)
async def test_server_gets_no_unknown_field_of_a_key_with_limits(
    call: Caller, path: str, fields: Callable[[str], dict[str, Any]]
) -> None:
    for limited in ({headers.FIELDS: headers.KNOWN_FIELDS}, {headers.TOKEN_LIMIT: "9"}):
        assert (await call(path, **fields("language"), headers=limited))[0] == 200
        status, problem = await call(path, **fields("models"), headers=limited)
        assert (status, problem["error"]["param"]) == (400, "models"), problem
    assert (await call(path, **fields("models")))[0] == 200


async def test_only_harmless_headers_reach_the_server_and_the_client(call: Caller) -> None:
    secret = {
        "authorization": "Bearer k",
        "cookie": "a=b",
        "x-api-key": "k",
        "x-forwarded-for": "1.2.3.4",
        "range": "a",
    }
    _, received = await call("/v1/audio/speech", json={"model": "m"}, headers={**secret, "te": "trailers"})
    names = {name.lower() for name in received["headers"]}
    assert names == {"host", "content-length", "content-type", "accept", "range"}


@pytest.mark.parametrize(
    ("path", "given", "status", "reason"),
    [
        ("/v1/audio/speech", {"json": {"input": "x"}}, 400, "names no model"),
        ("/v1/audio/speech", {"json": {"model": "m" * 5000}}, 400, "not the name of a model"),
        ("/v1/audio/speech", {"json": {"model": 3}}, 400, "Invalid body"),
        ("/v1/audio/speech", {"data": b"{", "headers": {"content-type": "application/json"}}, 400, "not valid JSON"),
        ("/v1/audio/speech", {"json": {"model": "nope"}}, 404, "nope"),
        ("/v1/audio/speech", {"json": {"model": "native"}}, 400, "run by the built-in engine"),
        ("/v1/images/generations", {"json": {"model": "m"}}, 400, "has no /v1/images/generations; it has /v1/audio"),
        (
            "/v1/chat/completions",
            {"json": {"model": "m", "messages": [{"role": "user", "content": "x"}]}},
            400,
            "has no",
        ),
        ("/v1/audio/transcriptions", {"data": form(("model", "m"), ("model", "n"))}, 400, "several models"),
        (
            "/v1/audio/transcriptions",
            {"data": b"--x\r\nno end", "headers": {"content-type": "multipart/form-data; boundary=x"}},
            400,
            "malformed",
        ),
        (
            "/v1/audio/transcriptions",
            {"data": b"--", "headers": FORM},
            400,
            "boundary",
        ),
        ("/upstream/m/%2e%2e/x", {}, 400, "dot segments"),
        ("/upstream/m/%252e%252e/x", {}, 400, "dot segments"),
        ("/upstream/m/a%5cb", {}, 400, "backslashes"),
        ("/v1/audio/speech", {"json": {"model": "m"}, "headers": {"origin": "http://evil.example"}}, 403, "Web pages"),
        ("/upstream/m/x", {"headers": {"sec-fetch-site": "cross-site"}}, 403, "Web pages"),
    ],
)
async def test_rejected_with_a_reason(call: Caller, path: str, given: Any, status: int, reason: str) -> None:
    url: Any = URL(path, encoded=True)
    found, body = await call(url, **given)
    assert (found, reason in str(body)) == (status, True), body


async def test_native_routes_that_a_server_has(call: Caller) -> None:
    status, received = await call("/v1/embeddings", json={"model": "m", "input": "hi"})
    assert (status, json.loads(received["first"])["model"]) == (200, "theirs")
    limited = {headers.PRINCIPAL: "x", headers.TOKEN_LIMIT: "5"}
    assert (await call("/v1/embeddings", json={"model": "m", "input": "hi"}, headers=limited))[0] == 429
    status, received = await call("/v1/completions", json={"model": "m", "prompt": "hi", "stream": True})
    sent = json.loads(received["first"])
    assert (sent["prompt"], sent["stream_options"]) == ("hi", {"include_usage": True})
    status, received = await call("/infill", json={"model": "m", "input_prefix": "a", "input_suffix": "b"})
    assert (status, received["path"]) == (200, "/infill")
    limited[headers.TOKEN_LIMIT] = "3000"
    status, received = await call("/v1/completions", json={"model": "m", "prompt": "hi"}, headers=limited)
    assert 2000 < json.loads(received["first"])["max_tokens"] < 3000


async def test_a_response_is_passed_on_as_it_comes_and_ends_with_its_client(call: Caller) -> None:
    async with call.session.post("/v1/audio/speech", json={"model": "m", "input": "large"}) as response:
        assert response.content_type == "audio/wav"
        assert response.headers[headers.RELAYED] == "1"
        num_bytes = 0
        async for chunk in response.content.iter_any():
            num_bytes += len(chunk)
        assert num_bytes == 256 << 16
    async with call.session.post("/v1/audio/speech", json={"model": "m", "input": "large"}) as response:
        await response.content.readany()
        response.close()
    assert (await call("/v1/audio/speech", json={"model": "m"}))[0] == 200, "its slot is free again"


async def test_a_crash_is_a_retryable_error(call: Caller) -> None:
    status, body = await call("/v1/audio/speech", json={"model": "m", "input": "crash"})
    assert status == 503, body
    await until(lambda: call.node.model("m").state is ModelState.READY)
    assert (await call("/v1/audio/speech", json={"model": "m"}))[0] == 200
    assert len(servers()) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x", "extra": {"image": "http://169.254.169.254/latest"}}),
        ("/v1/completions", {"prompt": "x", "multimodal_data": ["/etc/passwd"]}),
        ("/v1/audio/speech", {"input": "x", "ref_audio": "/etc/passwd"}),
    ],
)
async def test_the_server_gets_nothing_to_fetch(call: Caller, path: str, body: dict[str, Any]) -> None:
    status, problem = await call(path, json={"model": "m", **body})
    assert (status, "may not fetch" in str(problem)) == (400, True), problem
