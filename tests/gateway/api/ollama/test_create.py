"""Models that clients create, copy and delete."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.rules import EvictionRules
from cortex.gateway.created_models import FILE_NAME
from cortex.wire.node.protocol import ModelState

from ....waiting import until
from ...fake_neuron import GB

if TYPE_CHECKING:
    from pathlib import Path

    from ...fake_neuron import StartNeuron
    from ...started_gateway import StartGateway

PIRATE = {"model": "pirate", "from": "a", "system": "Arr.", "parameters": {"temperature": 0.25}, "license": "MIT"}


async def test_created_model_is_served_shown_copied_and_deleted(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(beast, catalogue=Catalogue(models=(ModelSpec(id="a", context_tokens=4096),)))
    assert b'"success"' in await client.stream("/api/create", PIRATE)
    assert (await client.chat("pirate"))[0] == 200
    body = beast.seen[-1].body
    assert (body["model"], body["temperature"], body["messages"][0]["content"]) == ("a", 0.25, "Arr.")
    _, shown = await client.post("/api/show", {"model": "pirate"})
    assert (shown["license"], shown["system"], shown["details"]["parent_model"]) == ("MIT", "Arr.", "a")
    assert "PARAMETER temperature 0.25" in shown["modelfile"]
    assert "temperature                    0.25" in shown["parameters"]
    async with client.session.post(
        client.url + "/api/copy", data=msgspec.json.encode({"source": "pirate", "destination": "copy"})
    ) as response:
        assert response.status == 200
    await client.chat("copy")
    assert beast.seen[-1].body["temperature"] == 0.25
    kept = msgspec.json.decode(next(tmp_path.rglob(FILE_NAME)).read_bytes())
    assert set(kept["aliases"]) == {"pirate", "copy"}
    async with client.session.delete(client.url + "/api/delete", data=b'{"model":"pirate"}') as response:
        assert response.status == 200
    assert (await client.chat("pirate"))[0] == 404
    assert (await client.chat("copy"))[0] == 200


async def test_model_with_more_context_or_of_the_hub_is_one_of_its_own(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(beast, catalogue=Catalogue(models=(ModelSpec(id="a", context_tokens=4096),)))
    for body in (
        {"model": "short", "from": "a", "parameters": {"num_ctx": 2048}},
        {"model": "long", "from": "a", "parameters": {"num_ctx": 8192}},
        {"model": "file", "from": "/models/x.gguf"},
        {"model": "hub", "from": "hf.co/org/name:Q4_K_M"},
    ):
        status, reply = await client.post("/api/create", body | {"stream": False})
        assert (status, reply["status"]) == (200, "success"), reply
    catalogue = client.gateway.dispatcher.catalogue
    assert catalogue.resolve("short").model_id == "a"
    assert (catalogue.spec("long").source, catalogue.spec("long").context_tokens) == ("a", 8192)
    assert catalogue.spec("file").source == "/models/x.gguf"
    assert (catalogue.spec("hub").source, catalogue.spec("hub").quant) == ("org/name", "Q4_K_M")


async def test_created_models_are_listed_and_deleted_by_themselves(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(beast, catalogue=Catalogue(models=(ModelSpec(id="a", context_tokens=4096),)))
    for body in (PIRATE, {"model": "long", "from": "a", "parameters": {"num_ctx": 8192}}):
        assert (await client.post("/api/create", {**body, "stream": False}))[0] == 200
    assert await client.get("/fleet/created") == (200, {"models": ["long", "pirate"]})
    for name, expected in (("pirate", 200), ("long", 200), ("a", 404)):
        async with client.session.delete(f"{client.url}/fleet/created/{name}") as response:
            assert response.status == expected
    assert (await client.get("/fleet/created"))[1] == {"models": []}
    assert client.gateway.dispatcher.catalogue.ids == {"a"}
    assert not beast.delete_requests


async def test_show_has_the_facts_of_the_source_of_a_model_that_was_never_loaded(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY}, templates={"a": "{{ messages }}"})
    client = await start_gateway(beast)
    body = {"model": "long", "from": "a", "parameters": {"num_ctx": 131072}, "stream": False}
    assert (await client.post("/api/create", body))[0] == 200
    of_source, shown = [(await client.post("/api/show", {"model": name}))[1] for name in ("a", "long")]
    assert (shown["template"], shown["details"]) == (
        of_source["template"],
        of_source["details"] | {"parent_model": "a"},
    )
    assert "131072" in shown["parameters"]
    assert [each["name"] for each in (await client.get("/api/ps"))[1]["models"]] == ["a"]


async def test_model_of_uploaded_files_is_listed_once_renamed_and_deleted_with_them(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={})
    client = await start_gateway(beast)
    digest = f"sha256:{hashlib.sha256(b'weights').hexdigest()}"
    body = {"model": "own", "files": {"x.gguf": digest}, "stream": False}
    status, reply = await client.post("/api/create", body)
    assert (status, "No node has all these files" in reply["error"]) == (400, True)
    for expected in (404, 200):
        async with client.session.head(f"{client.url}/api/blobs/{digest}") as response:
            assert response.status == expected
        async with client.session.post(f"{client.url}/api/blobs/{digest}", data=b"weights") as response:
            assert response.status == 201
    status, reply = await client.post("/api/create", body)
    assert status == 200, reply
    repository = reply["using"]
    fleet = client.gateway.dispatcher
    await until(lambda: repository in fleet.fleet.live_models())
    async with client.session.get(client.url + "/api/tags") as response:
        assert [each["name"] for each in (await response.json())["models"]] == ["own"]
    async with client.session.post(
        client.url + "/api/copy", json={"source": "own", "destination": "renamed"}
    ) as response:
        assert response.status == 200
    for name, deleted in (("own", []), ("renamed", [repository])):
        async with client.session.delete(client.url + "/api/delete", json={"model": name}) as response:
            assert response.status == 200
        assert [each.model_id for each in beast.delete_requests] == deleted
        if name == "own":
            assert fleet.catalogue.spec("renamed").source == repository
    assert not fleet.catalogue.ids


async def test_files_of_one_model_go_to_one_node(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    small, large = await neurons("small", sizes={}), await neurons("large", sizes={})
    large.free_disk_bytes = 2 * small.free_disk_bytes
    digests = [f"sha256:{number * 64}" for number in "ab"]
    small.uploads[digests[0]] = b"of another model"
    client = await start_gateway(small, large)
    for digest in reversed(digests):
        async with client.session.post(f"{client.url}/api/blobs/{digest}", data=b"weights") as response:
            assert response.status == 201
        if digest == digests[1]:
            async with client.session.head(f"{client.url}/api/blobs/{digests[0]}") as response:
                assert response.status == 404, "another node has it"
    assert set(large.uploads) == set(digests)
    files = {"config.json": digests[0], "model.safetensors": digests[1]}
    status, reply = await client.post("/api/create", {"model": "own", "files": files, "stream": False})
    assert (status, list(large.sizes)) == (200, [reply.get("using")]), reply


async def test_template_that_the_files_do_not_have_leaves_nothing(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={})
    client = await start_gateway(beast)
    digest = f"sha256:{hashlib.sha256(b'weights').hexdigest()}"
    async with client.session.post(f"{client.url}/api/blobs/{digest}", data=b"weights") as response:
        assert response.status == 201
    body = {"model": "own", "files": {"x.gguf": digest}, "template": "<|other|>{{ .Nothing }}"}
    assert (await client.post("/api/create", body))[0] == 400
    assert (len(beast.delete_requests), client.gateway.dispatcher.catalogue.ids) == (1, frozenset())


async def test_created_model_that_is_created_from_itself_keeps_its_files(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(await neurons("beast", sizes={"a": GB}))
    for body in ({"from": "/models/x.gguf"}, {"from": "own", "system": "Arr."}):
        status, reply = await client.post("/api/create", {"model": "own", "stream": False, **body})
        assert status == 200, reply
    found = client.gateway.dispatcher.catalogue.resolve("own")
    assert (found.spec.source, found.alias) == ("/models/x.gguf", None)
    assert found.preset is not None
    assert found.preset.system == "Arr."


async def test_name_of_a_created_model_is_no_pattern(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(await neurons("beast", sizes={"a": GB}))
    for name in ("*", "gpt-?", "[a-z]"):
        status, reply = await client.post("/api/create", {"model": name, "from": "a"})
        assert (status, "pattern" in reply["error"]) == (400, True)
        status, reply = await client.post("/api/copy", {"source": "a", "destination": name})
        assert (status, "pattern" in reply["error"]) == (400, True)


async def test_names_of_the_configuration_are_not_replaced(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB, "b": GB})
    client = await start_gateway(beast, catalogue=Catalogue(models=(ModelSpec(id="a"),)))
    for name in ("a", "b"):
        status, reply = await client.post("/api/create", {"model": name, "from": "a"})
        assert (status, "already" in reply["error"]) == (400, True)
    status, reply = await client.post("/api/create", {"model": "c", "from": "nothing"})
    assert status == 404


async def test_template_that_the_files_do_not_have_is_converted_and_kept(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    served = ModelSpec(id="served", harness="vllm")
    client = await start_gateway(beast, catalogue=Catalogue(models=(ModelSpec(id="a"), served)))
    for source in ("a", "/models/x.gguf", "org/name"):
        body = {"model": "own", "from": source, "template": "<|other|>{{ .Prompt }}", "stream": False}
        status, reply = await client.post("/api/create", body)
        assert status == 200, reply
        spec = client.gateway.dispatcher.catalogue.spec("own")
        assert spec.source == source
        assert spec.load_request.chat_template is not None
        assert "<|other|>" in spec.load_request.chat_template
        _, shown = await client.post("/api/show", {"model": "own"})
        assert shown["template"] == spec.chat_template
    for source, template, problem in (
        ("a", "{{ index .Messages 0 }}", "the function index. Supported are text, .System"),
        ("served", "<|other|>{{ .Prompt }}", "leave TEMPLATE out"),
    ):
        status, reply = await client.post("/api/create", {"model": "c", "from": source, "template": template})
        assert (status, problem in reply["error"]) == (400, True), reply


async def test_keep_alive_keeps_the_model_within_the_limit_of_the_operator(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(beast, rules=EvictionRules(max_keep_alive_s=60))
    dispatcher = client.gateway.dispatcher
    demand = dispatcher.fleet.demand
    assert demand is not None
    kept = demand.kept_until
    messages = [{"role": "user", "content": "x"}]
    for keep_alive, least_s, most_s in (("5s", 0, 5), ("10m", 5, 60), (-1, 5, 60)):
        body = {"model": "a", "messages": messages, "stream": False, "keep_alive": keep_alive}
        assert (await client.post("/api/chat", body))[0] == 200
        await until(lambda: "a" in kept)
        assert least_s < kept.pop("a") - dispatcher.now <= most_s
