"""Ollama's API of a node, as its clients use it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from cortex.wire.node.protocol import ModelState, Progress, PullStatus

from ....picture_files import base64_of, png_of_size
from ....waiting import until
from ..conftest import Api

HELLO = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "org/tiny:latest", "messages": HELLO, **fields}


async def lines(api: Api, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with api.client.post(api.url + path, data=json.dumps(body).encode()) as response:
        assert response.status == 200, await response.text()
        return [json.loads(line) for line in (await response.read()).splitlines()]


async def test_listings_have_every_field_that_clients_require(api: Api) -> None:
    version = (await api.get("/api/version"))[1]["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "what VS Code asks for"
    (model,) = (await api.get("/api/tags"))[1]["models"]
    assert model["name"] == model["model"] == "org/tiny"
    assert set(model) == {"name", "model", "modified_at", "size", "digest", "details", "capabilities"}
    assert set(model["details"]) == {
        "parent_model",
        "format",
        "family",
        "families",
        "parameter_size",
        "quantization_level",
    }
    assert model["capabilities"] == ["completion"]
    (loaded,) = (await api.get("/api/ps"))[1]["models"]
    assert (loaded["size"], loaded["size_vram"]) == (6, 0), "on a CPU"
    assert (loaded["context_length"], loaded["digest"]) == (2000, model["digest"])
    assert "expires_at" in loaded
    _, shown, _ = await api.post("/api/show", {"model": "org/tiny"})
    assert shown["model_info"]["general.basename"] == "org/tiny"
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 2000
    assert "messages" in shown["template"]
    assert shown["parameters"].split()[:2] == ["num_ctx", "2000"]
    status, reply, _ = await api.post("/api/show", {"model": "other"})
    assert (status, "There is no model 'other'" in reply["error"]) == (404, True)


async def test_root_answers_on_the_port_of_ollama(api: Api) -> None:
    for method in ("GET", "HEAD"):
        async with api.client.request(method, api.url + "/", headers={"host": "localhost:11434"}) as response:
            assert response.status == 200
            assert await response.text() == ("Ollama is running" if method == "GET" else "")
    async with api.client.get(api.url + "/", headers={"user-agent": "ollama-python/0.6.1"}) as response:
        assert await response.text() == "Ollama is running"
    async with api.client.head(api.url + "/api/version") as response:
        assert response.status == 200


async def test_stream_ends_with_counts_and_durations(api: Api) -> None:
    api.node.script.first_s = 0.05
    api.node.script.pause_s = 0.005
    waited = {"x-cortex-waited-ms": "1500"}
    async with api.client.post(api.url + "/api/chat", json=chat(), headers=waited) as response:
        received = [json.loads(line) for line in (await response.read()).splitlines()]
    *deltas, last = received
    assert "".join(line["message"]["content"] for line in deltas) == "Hello there!"
    assert {line["done"] for line in deltas} == {False}
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 13)
    assert last["prompt_eval_count"] == len(api.node.submitted[0].prompt)
    assert last["prompt_eval_duration"] >= 50_000_000
    assert last["eval_duration"] >= 12 * 5_000_000
    assert last["load_duration"] >= 1_500_000_000
    parts = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert last["total_duration"] == pytest.approx(sum(last[part] for part in parts), abs=3)


async def test_calls_thoughts_and_schemas(api: Api) -> None:
    api.node.script.text = 'Hm.</think><tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    _, reply, headers = await api.post(
        "/api/chat", chat(stream=False, tools=tools, think=True, options={"tfs_z": 1, "num_gpu": 1})
    )
    message = reply["message"]
    assert message["thinking"] == "Hm."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"index": 0, "name": "weather", "arguments": {"city": "Ulm"}}
    ]
    assert headers["x-cortex-ignored-fields"] == "options.tfs_z"
    assert (await api.post("/api/chat", chat(stream=False, format={"type": "object"})))[0] == 200
    assert api.node.submitted[-1].grammar is not None


async def test_raw_prompt_has_no_template(api: Api) -> None:
    (reply,) = await lines(api, "/api/generate", {"model": "org/tiny", "prompt": "abc", "raw": True, "stream": False})
    assert reply["response"] == "Hello there!"
    assert api.node.text_model.decode(api.node.submitted[0].prompt) == "abc"


async def test_context_option_is_a_cap(api: Api) -> None:
    long = [{"role": "user", "content": "x" * 300}]
    status, reply, _ = await api.post("/api/chat", chat(messages=long, options={"num_ctx": 200}))
    assert (status, reply["code"]) == (400, "context_length_exceeded")
    assert (await api.post("/api/chat", chat(stream=False, options={"num_ctx": 100_000})))[0] == 200
    assert api.node.submitted[-1].max_tokens == 2000 - len(api.node.submitted[-1].prompt)
    assert (await api.post("/api/chat", chat(stream=False, options={"num_ctx": 200})))[0] == 200
    assert api.node.submitted[-1].max_tokens == 200 - len(api.node.submitted[-1].prompt)


async def test_images_are_rejected_by_a_model_without_vision(api: Api) -> None:
    message = [{"role": "user", "content": "What?", "images": [base64_of(png_of_size(64, 48))]}]
    status, reply, _ = await api.post("/api/chat", chat(messages=message))
    assert (status, reply["code"]) == (400, "unsupported_modality")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_request_without_a_prompt_loads_and_unloads(api: Api, path: str) -> None:
    api.node.state = ModelState.COLD
    (loaded,) = await lines(api, path, {"model": "org/tiny", "keep_alive": -1})
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert api.node.state is ModelState.READY
    (unloaded,) = await lines(api, path, {"model": "org/tiny", "keep_alive": "0s"})
    assert unloaded["done_reason"] == "unload"
    await until(lambda: api.node.state is ModelState.COLD)
    assert len(api.node.loads) == 1
    assert not api.node.submitted


async def test_unloads_after_the_last_response_that_says_so(api: Api) -> None:
    await lines(api, "/api/chat", chat(keep_alive="5m"))
    await lines(api, "/api/chat", chat(keep_alive=-1))
    async with api.client.post(
        api.url + "/api/chat", json=chat(keep_alive=0), headers={"x-cortex-principal": "alice"}
    ) as response:
        await response.read()
    assert api.node.state is ModelState.READY, "a gateway decides itself"
    await lines(api, "/api/chat", chat(keep_alive=0))
    await until(lambda: api.node.state is ModelState.COLD)


async def test_pull_streams_its_progress(api: Api) -> None:
    pulls = api.node.files.pulls
    async with api.client.post(api.url + "/api/pull", json={"model": "hf.co/org/big:Q4_K_M"}) as response:
        assert json.loads(await response.content.readline()) == {"status": "pulling manifest"}
        assert pulls["org/big"].quant == "Q4_K_M"
        progress = Progress(stage="download", done_bytes=3, total_bytes=9)
        pulls["org/big"] = PullStatus(model_id="org/big", state="running", progress=progress)
        line = json.loads((await response.content.readline()).strip())
        assert (line["total"], line["completed"]) == (9, 3)
        assert line["status"] == f"pulling {line['digest'].removeprefix('sha256:')[:12]}"
        pulls["org/big"] = PullStatus(model_id="org/big", state="done")
        assert json.loads((await response.content.readline()).strip()) == {"status": "success"}


async def test_failed_pull_ends_with_an_error(api: Api) -> None:
    async with api.client.post(api.url + "/api/pull", json={"model": "org/big"}) as response:
        await response.content.readline()
        reason = "the hub has no such repository"
        failed = PullStatus(model_id="org/big", state="failed", code="source_not_found", reason=reason)
        api.node.files.pulls["org/big"] = failed
        assert json.loads((await response.content.readline()).strip())["error"] == reason


@pytest.mark.parametrize("path", ["/api/create", "/api/copy", "/api/push"])
async def test_routes_without_a_meaning_say_why(api: Api, path: str) -> None:
    status, reply, _ = await api.post(path, b"binary")
    assert status == 501
    assert "is not implemented: " in reply["error"]


async def test_upload_is_kept_whatever_its_size(api: Api) -> None:
    path, content = f"{api.url}/api/blobs/sha256:{'0' * 64}", b"x" * (3 << 20)
    for expected in (404, 200):
        async with api.client.head(path) as response:
            assert response.status == expected
        async with api.client.post(path, data=content) as response:
            assert response.status == 201
    assert api.node.files.uploads == {"0" * 64: content}


async def test_delete_is_never_of_a_model_in_memory(api: Api) -> None:
    async with api.client.delete(api.url + "/api/delete", json={"model": "org/tiny"}) as response:
        assert response.status == 409
        assert "is in memory" in msgspec.json.decode(await response.read())["error"]


async def test_embeddings_fail_like_those_of_openai(api: Api) -> None:
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        status, reply, _ = await api.post(path, {"model": "org/tiny", field: "hi"})
        assert (status, reply["code"]) == (400, "unsupported_modality")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/generate", {"prompt": "a(", "suffix": ")b"}),
        ("/v1/completions", {"prompt": "a(", "suffix": ")b"}),
        ("/infill", {"input_prefix": "a(", "input_suffix": ")b"}),
        ("/infill", {"input_extra": [], "input_prefix": "a(", "input_suffix": ")b", "samplers": []}),
    ],
)
async def test_fills_in_between_prefix_and_suffix(api: Api, path: str, fields: dict[str, Any]) -> None:
    status, _, _ = await api.post(path, {"model": "org/tiny", "stream": False, **fields})
    assert status == 200
    prompt = api.node.text_model.decode(api.node.submitted[-1].prompt)
    assert prompt == "<|fim_prefix|>a(<|fim_suffix|>)b<|fim_middle|>"


async def test_infill_has_llama_cpps_fields(api: Api) -> None:
    extra = [{"filename": "x.py", "text": "x = 1"}]
    fields = {"input_extra": extra, "input_prefix": "a", "prompt": "(", "input_suffix": ")b", "n_predict": 3}
    _, reply, _ = await api.post("/infill", {"model": "org/tiny", "stream": False, **fields})
    prompt = api.node.text_model.decode(api.node.submitted[-1].prompt)
    assert prompt == "x = 1\n<|fim_prefix|>a<|fim_suffix|>)b<|fim_middle|>("
    assert (reply["stop"], reply["truncated"], reply["tokens"]) == (True, False, [])
    assert {"prompt_n", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"} <= set(
        reply["timings"]
    )
