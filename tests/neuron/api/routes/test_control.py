from typing import Any

import anthropic
import msgspec
import openai
import pytest

from cortex import __version__
from cortex.wire.errors import LoadFailed, ModelUnsupported
from cortex.wire.node.protocol import Discovery, Endpoint, Health, ModelList, ModelState, ModelStatus, NodeEvent
from cortex.wire.sse import Parser


async def test_reports_of_the_node_decode_into_the_wire_types(api: Any) -> None:
    for path, kind in (
        ("/discovery", Discovery),
        ("/health", Health),
        ("/models", ModelList),
        ("/models/org/tiny", ModelStatus),
        ("/models/org/tiny/endpoint", Endpoint),
    ):
        status, body = await api.get(path)
        assert status == 200
        msgspec.convert(body, kind)
    _, endpoint = await api.get("/models/org/tiny/endpoint")
    assert endpoint["base_url"] == api.url + "/v1"
    version = (await api.get("/version"))[1]
    assert (version["name"], version["version"]) == ("neuron", __version__)
    assert {"commit", "python", "platform", "torch", "cuda_version"} < set(version)
    assert (await api.get("/"))[1]["name"] == "neuron"


async def test_loads_and_unloads(api: Any) -> None:
    api.node.state = ModelState.COLD
    status, body, _ = await api.post("/models/load?wait=false", {"model_id": "org/tiny"})
    assert (status, body["state"]) == (202, "cold")
    status, body, _ = await api.post("/models/load", {"model_id": "org/tiny", "quant": "q8_0", "new_field": 1})
    assert (status, body["state"]) == (200, "ready")
    assert api.node.loads[-1].quant == "q8_0"
    status, body, _ = await api.post("/models/unload", {"model_id": "org/tiny"})
    assert (status, body["state"]) == (200, "cold")


async def test_sleeping_model_is_reported_and_counted_as_asleep(api: Any) -> None:
    for _ in range(2):
        status, body, _ = await api.post("/models/unload", {"model_id": "org/tiny", "sleep": True})
        assert (status, body["state"], body["host_bytes"]) == (200, "asleep", 5)
    assert (await api.get("/models/org/tiny"))[1]["state"] == "asleep"
    assert (await api.get("/health"))[1]["models"][0]["host_bytes"] == 5
    async with api.client.get(api.url + "/metrics") as response:
        metrics = await response.text()
    assert 'neuron_model_sleeping_bytes{model="org/tiny"} 5.0' in metrics
    assert 'neuron_model_state{model="org/tiny",state="asleep"} 1.0' in metrics
    assert "neuron_model_bytes{" not in metrics
    assert "neuron_model_replicas{" not in metrics
    status, body, _ = await api.post("/models/unload", {"model_id": "org/tiny", "sleep": 1})
    assert (status, body["error"]["param"]) == (400, "sleep")
    status, body, _ = await api.post("/v1/completions", {"model": "org/tiny", "prompt": "x"})
    assert status == 200
    assert api.node.loads[-1].model_id == "org/tiny", "a request wakes it"


async def test_files_are_pulled_cancelled_and_not_deleted_while_in_use(api: Any) -> None:
    status, body, _ = await api.post("/files/pull", {"model_id": "org/new", "quant": "Q4_K_M"})
    assert (status, body["state"], body["quant"]) == (202, "running", "Q4_K_M")
    assert (await api.get("/files/pulls/org/new"))[1]["state"] == "running"
    assert (await api.post("/files/cancel", {"model_id": "org/new"}))[1]["state"] == "cancelled"
    status, body, _ = await api.post("/files/cancel", {"model_id": "org/other"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    status, body, _ = await api.post("/files/delete", {"model_id": "org/tiny"})
    assert (status, body["error"]["code"]) == (409, "model_in_use")
    status, body, _ = await api.post("/files/pull", {"quant": "Q4_K_M"})
    assert (status, body["error"]["code"]) == (400, "invalid_value")


async def test_recycles_only_a_device_without_models(api: Any) -> None:
    assert (await api.post("/devices/0/recycle", {}))[:2] == (200, {"device": 0, "recycled": False})
    api.node.state = ModelState.COLD
    assert (await api.post("/devices/0/recycle", {}))[:2] == (200, {"device": 0, "recycled": True})
    status, body, _ = await api.post("/devices/7/recycle", {})
    assert (status, body["error"]["code"]) == (404, "route_not_found")
    assert "it has 0" in body["error"]["message"]


async def test_rejects_invalid_load_requests(api: Any) -> None:
    status, body, _ = await api.post("/models/load", {"model_id": 3})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_value", "model_id")
    status, body, _ = await api.post("/models/load", b"{")
    assert (status, body["error"]["code"]) == (400, "malformed_json")
    status, body, _ = await api.post("/models/load", {"model_id": "nope"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    api.node.load_error = LoadFailed("wrong magic")
    status, body, _ = await api.post("/models/load", {"model_id": "org/tiny"})
    assert (status, body["error"]["message"]) == (502, "wrong magic")
    api.node.load_error = ModelUnsupported("mamba9000 is not supported")
    status, body, _ = await api.post("/models/load", {"model_id": "org/tiny"})
    assert (status, body["error"]["message"]) == (422, "mamba9000 is not supported")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "route_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/models", 405, "method_not_allowed"),
        ("GET", "/models/none/such", 404, "model_not_found"),
        ("POST", "/v1/embeddings", 400, "malformed_json"),
    ],
)
async def test_every_error_is_json(api: Any, method: str, path: str, status: int, code: str) -> None:
    async with api.client.request(method, api.url + path) as response:
        assert response.status == status
        assert response.content_type == "application/json"
        assert (await response.json())["error"]["code"] == code
        assert response.headers["x-request-id"]
        assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/batches"])
async def test_responses_to_anthropic_clients_have_their_request_id(api: Any, path: str) -> None:
    _, _, headers = await api.post(path, {"model": "none"}, **{"x-request-id": "abc-1"})
    assert headers["request-id"] == "abc-1"


async def test_anthropic_client_gets_its_form_of_an_unknown_model(api: Any) -> None:
    async with api.client.get(api.url + "/v1/models/none", headers={"anthropic-version": "2023-06-01"}) as response:
        assert (response.status, (await response.json())["error"]["type"]) == (404, "not_found_error")


async def test_listed_model_has_its_context_as_other_servers_name_it(api: Any) -> None:
    _, listed = await api.get("/v1/models")
    assert listed["data"][0]["max_model_len"] == api.node.context_tokens
    _, page = await api.get(f"/v1/models?after_id={listed['last_id']}")
    assert (page["data"], page["has_more"]) == ([], False)


async def test_errors_on_anthropic_paths_have_the_anthropic_form(api: Any) -> None:
    async with api.client.get(api.url + "/v1/messages") as response:
        assert (await response.json()) == {
            "type": "error",
            "error": {"type": "not_found_error", "message": "GET is not allowed on /v1/messages; use POST."},
        }


async def test_both_sdks_list_models_and_retrieve_one_with_a_slash(api: Any) -> None:
    async with openai.AsyncOpenAI(api_key="k", base_url=api.url + "/v1", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["org/tiny"]
        model = await client.models.retrieve("org/tiny")
        assert (model.id, model.object) == ("org/tiny", "model")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/none")
    async with anthropic.AsyncAnthropic(api_key="k", base_url=api.url, max_retries=0) as other:
        listed = [entry async for entry in other.models.list()]
        assert [(entry.id, entry.display_name, entry.type) for entry in listed] == [("org/tiny", "org/tiny", "model")]
        assert listed[0].created_at.year >= 2024


async def test_streams_events(api: Any) -> None:
    api.node.events = [
        NodeEvent(kind="model", at_s=1.0, model=ModelStatus(id="org/tiny", state=ModelState.READY)),
        NodeEvent(kind="shutdown", at_s=2.0),
    ]
    async with api.client.get(api.url + "/events") as response:
        frames = Parser().feed(await response.read())
    assert [frame.event for frame in frames] == ["model", "shutdown"]
    assert msgspec.json.decode(frames[0].data, type=NodeEvent) == api.node.events[0]


async def test_counts_tokens_without_loading_weights(api: Any) -> None:
    api.node.state = ModelState.COLD
    messages = [{"role": "user", "content": "hello"}]
    async with anthropic.AsyncAnthropic(api_key="k", base_url=api.url, max_retries=0) as client:
        counted = await client.messages.count_tokens(model="org/tiny", messages=messages)
    status, body, _ = await api.post("/tokenize", {"model": "org/tiny", "messages": messages})
    assert status == 200
    assert counted.input_tokens == body["count"] == len(body["tokens"])
    assert not api.node.loads
    await api.post("/v1/messages", {"model": "org/tiny", "messages": messages, "max_tokens": 5})
    assert api.node.submitted[0].prompt == tuple(body["tokens"])


async def test_removes_the_billing_line_only_for_direct_clients(api: Any) -> None:
    line = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    body = {"model": "org/tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}

    async def count(body: dict[str, Any], **headers: str) -> int:
        _, counted, _ = await api.post("/v1/messages/count_tokens", body, **headers)
        await api.post("/v1/messages", body, **headers)
        assert len(api.node.submitted[-1].prompt) == counted["input_tokens"]
        return int(counted["input_tokens"])

    plain = await count(body)
    assert await count({**body, "system": [line]}) == plain
    assert await count({**body, "system": [line]}, **{"x-cortex-principal": ""}) > plain + len(line["text"])


async def test_tokenize_does_not_apply_the_template_to_text(api: Any) -> None:
    _, body, _ = await api.post("/tokenize", {"model": "org/tiny", "prompt": "abc"})
    assert body["count"] == 3
    assert api.node.text_model.decode(body["tokens"]) == "abc"
    status, body, _ = await api.post("/tokenize", {"model": "org/tiny"})
    assert (status, body["error"]["param"]) == (400, "text")


async def test_exposes_every_metric(api: Any, chat_body: Any) -> None:
    api.node.script.cached = 2
    await api.post("/v1/chat/completions", chat_body())
    await api.post("/v1/chat/completions", chat_body(temperature=-1))
    await api.post("/v1/chat/completions", chat_body(model="made-up"))
    async with api.client.get(api.url + "/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain")
        lines = (await response.text()).splitlines()
    prompt_tokens = len(api.node.submitted[0].prompt)
    named = 'gen_ai_operation_name="chat",gen_ai_provider_name="cortex",gen_ai_request_model="org/tiny"'
    for expected in (
        'neuron_requests_total{dialect="openai_chat",model="org/tiny",outcome="ok"} 1.0',
        'neuron_request_errors_total{code="invalid_value",model="unknown"} 1.0',
        'neuron_request_errors_total{code="model_not_found",model="unknown"} 1.0',
        f'neuron_prompt_tokens_total{{model="org/tiny"}} {float(prompt_tokens)}',
        'neuron_cached_prompt_tokens_total{model="org/tiny"} 2.0',
        'neuron_completion_tokens_total{model="org/tiny"} 13.0',
        'neuron_tokenised_characters_total{model="org/tiny"} 11.0',
        f"gen_ai_server_time_to_first_token_seconds_count{{{named}}} 1.0",
        f"gen_ai_server_time_per_output_token_seconds_count{{{named}}} 1.0",
        f'gen_ai_server_request_duration_seconds_count{{error_type="",{named}}} 1.0',
        'neuron_inter_token_seconds_bucket{le="+Inf",model="org/tiny"} 12.0',
        'neuron_queue_depth{model="org/tiny"} 3.0',
        'neuron_running_requests{model="org/tiny"} 2.0',
        'neuron_kv_used_ratio{model="org/tiny"} 0.25',
        'neuron_model_state{model="org/tiny",state="ready"} 1.0',
        'neuron_model_state{model="org/tiny",state="cold"} 0.0',
        'neuron_model_bytes{model="org/tiny"} 6.0',
        'neuron_model_replicas{model="org/tiny"} 1.0',
        'neuron_device_memory_free_bytes{device="0"} 4.0',
        'neuron_device_temperature_celsius{device="0"} 40.0',
        'neuron_engine_steps_total{model="org/tiny"} 7.0',
        'neuron_preemptions_total{model="org/tiny"} 1.0',
        'neuron_failed_kernel_passes_total{model="org/tiny"} 0.0',
        'neuron_kv_used_pages{model="org/tiny"} 4.0',
        "# TYPE gen_ai_server_time_to_first_token_seconds histogram",
    ):
        assert expected in lines, expected


async def test_llama_cpps_routes(api: Any) -> None:
    _, listed = await api.get("/models")
    assert listed["data"][0]["status"] == {"value": "loaded"}
    assert listed["models"][0]["id"] == "org/tiny"
    _, tokens, _ = await api.post("/tokenize", {"model": "org/tiny", "content": "hé", "with_pieces": True})
    assert [token["piece"] for token in tokens["tokens"]] == ["h", [195], [169]]
    marked = {"model": "org/tiny", "content": "<|im_start|>"}
    assert (await api.post("/tokenize", marked))[1]["count"] == 1
    assert (await api.post("/tokenize", {**marked, "parse_special": False}))[1]["count"] > 1
    with_special = (await api.post("/tokenize", {**marked, "add_special": True}))[1]
    assert with_special["tokens"] == (await api.post("/tokenize", marked))[1]["tokens"], "it has no begin token"
    ids = [token["id"] for token in tokens["tokens"]]
    assert (await api.post("/detokenize", {"model": "org/tiny", "tokens": ids}))[1] == {"content": "hé"}
    status, reply, _ = await api.post("/detokenize", {"model": "org/tiny", "tokens": [10**6]})
    assert (status, reply["error"]["param"]) == (400, "tokens")
    messages = [{"role": "user", "content": "hi"}]
    _, applied, _ = await api.post("/apply-template", {"model": "org/tiny", "messages": messages})
    assert applied["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    _, props = await api.get("/props?model=org/tiny")
    assert props["default_generation_settings"]["n_ctx"] == 2000
    assert "<|im_start|>" in props["chat_template"]
    assert (await api.get("/props"))[1]["role"] == "router"
    assert (await api.post("/models/unload", {"model": "org/tiny"}, **{"content-type": "application/json"}))[0] == 200
    assert (await api.get("/models"))[1]["data"][0]["status"] == {"value": "unloaded"}


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "a\x00", "a\u202eb", ""])
@pytest.mark.parametrize("path", ["/models/load", "/files/pull"])
async def test_new_model_has_a_printable_name(api: Any, path: str, name: str) -> None:
    status, body, _ = await api.post(path, {"model_id": name})
    assert (status, body["error"]["param"]) == (400, "model_id"), body
    assert "not printable" in body["error"]["message"]
