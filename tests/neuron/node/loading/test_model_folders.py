from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from faulty_models import running_node, write_model
from msgspec.structs import replace

from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.inspection_process.preflight import inspect
from cortex.neuron.node.library import Library, scan_folders
from cortex.neuron.node.node import Node
from cortex.neuron.weights.hub.file_digests import FileDigests
from cortex.wire.errors import LoadFailed, ModelInUse, ModelUnsupported
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState

from ....waiting import until
from ..node_calls import load


def put(path: Path, *, age_s: float = 60) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    put_back(path, age_s=age_s)


def put_back(path: Path, *, age_s: float = 60) -> None:
    at = time.time() - age_s
    os.utime(path, (at, at))


def test_finds_gguf_files_and_checkpoints_by_their_paths(tmp_path: Path) -> None:
    for name in (
        "small-q4.gguf",
        "qwen/large-00001-of-00002.gguf",
        "qwen/large-00002-of-00002.gguf",
        "qwen/mmproj-large.gguf",
        "org/dense/config.json",
        "org/dense/model-00001-of-00002.safetensors",
        "org/dense/model-00002-of-00002.safetensors",
        "org/adapter/weights.safetensors",
        ".hidden/x.gguf",
        "a/b/c/d/e/deep.gguf",
        "readme.md",
    ):
        put(tmp_path / name)
    put(tmp_path / "copying.gguf", age_s=0)
    put(tmp_path / "org" / "arriving" / "config.json")
    put(tmp_path / "org" / "arriving" / "model.safetensors", age_s=0)
    assert scan_folders([tmp_path, tmp_path / "none"]) == {
        "small-q4": tmp_path / "small-q4.gguf",
        "qwen/large": tmp_path / "qwen" / "large-00001-of-00002.gguf",
        "org/dense": tmp_path / "org" / "dense",
    }
    assert scan_folders([tmp_path / "org" / "dense"]) == {"dense": tmp_path / "org" / "dense"}


def test_models_come_and_go_with_their_files_and_configured_ones_stay(tmp_path: Path) -> None:
    library = Library(NeuronConfig(model_dirs=(tmp_path,)), {"HF_HOME": str(tmp_path / "hub")})
    assert library.found_in_folders({"a": tmp_path / "a.gguf", "b": tmp_path / "b.gguf"}) == []
    assert {model.id: model.source for model in library} == {
        "a": str(tmp_path / "a.gguf"),
        "b": str(tmp_path / "b.gguf"),
    }
    assert library.found_in_folders({"a": tmp_path / "a.gguf"}) == ["b"]
    library.forget("b")
    assert [model.id for model in library] == ["a"]
    assert library.found_in_folders({"a": tmp_path / "a.gguf"}) == []


async def test_node_serves_models_of_its_folders_and_forgets_those_that_are_gone(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    for file in write_model(folder / "org" / "m", bytes=1 << 20).iterdir():
        put_back(file)
    put(folder / "gone.gguf")
    async with running_node(tmp_path, {"model_dirs": [str(folder)]}) as node:
        assert {status.id for status in node.models()} == {"org/m", "gone"}
        assert (await load(node, "org/m")).state is ModelState.READY
        (folder / "gone.gguf").unlink()
        (folder / "org" / "m" / "config.json").unlink()
        await node.scan_library()
        assert {status.id for status in node.models()} == {"org/m"}, "it is in memory"
        await node.unload(UnloadRequest(model_id="org/m"))
        await node.scan_library()
        assert node.models() == ()


async def test_path_without_files_is_reported_until_they_come(tmp_path: Path) -> None:
    path = tmp_path / "late"
    async with running_node(tmp_path, {"models": [{"id": "m", "source": str(path)}]}, scan_s=0.05) as node:
        await until(lambda: node.model("m").reason)
        assert f"no complete model at {path}" in (node.model("m").reason or "")
        assert (node.model("m").state, node.model("m").reason_code) == (ModelState.COLD, "source_not_found")
        write_model(tmp_path / "copy").rename(path)
        await until(lambda: node.model("m").estimate_bytes is not None)
        assert node.model("m").reason is None


async def test_model_that_a_catalogue_names_by_path_is_sized_or_found_missing_without_a_load(tmp_path: Path) -> None:
    roots, path = tmp_path / "roots", tmp_path / "roots" / "m"
    roots.mkdir()
    write_model(tmp_path / "copy").rename(path)
    async with running_node(tmp_path, {"model_roots": [str(roots)]}) as node:
        status = await node.inspect(LoadRequest(model_id="m", source=str(path), context_tokens=64))
        assert (status.state, status.reason) == (ModelState.COLD, None)
        assert status.estimate_bytes is not None
        longer = await node.inspect(LoadRequest(model_id="m", source=str(path), context_tokens=4096))
        assert (longer.estimate_bytes or 0) > status.estimate_bytes, "the options of the catalogue count"
        status = await node.inspect(LoadRequest(model_id="m", source=str(roots / "typo")))
        assert (status.reason_code, status.estimate_bytes) == ("source_not_found", None)
        assert f"no complete model at {roots / 'typo'}" in (status.reason or "")
        with pytest.raises(LoadFailed, match="outside the model roots"):
            await node.inspect(LoadRequest(model_id="other", source=str(tmp_path / "elsewhere")))
        assert {each.id for each in node.models()} == {"m"}
        await node.unload(UnloadRequest(model_id="m", forget=True))
        assert node.models() == ()


async def test_options_that_a_catalogue_takes_back_hold_no_more(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m")
    plain = LoadRequest(model_id="m", source=str(path))
    async with running_node(tmp_path, {"model_roots": [str(tmp_path)]}) as node:
        given = await node.inspect(replace(plain, context_tokens=64))
        plain_bytes = (await node.inspect(plain)).estimate_bytes
        assert (plain_bytes or 0) > (given.estimate_bytes or 0)
        await node.inspect(replace(plain, context_tokens=64))
        loaded = await node.load(plain, wait=True)
        assert loaded.estimate_bytes == given.estimate_bytes, "a load that names none has those of the inspection"
        await node.inspect(plain)
        await node.unload(UnloadRequest(model_id="m"))
        assert (await node.load(plain, wait=True)).estimate_bytes == plain_bytes, "also while it was in memory"
        await node.unload(UnloadRequest(model_id="m"))
        described = await node.inspect(replace(plain, context_tokens=64))
        assert described.estimate_bytes == given.estimate_bytes, "not those of the last load"
        moved = await node.inspect(replace(plain, source=str(write_model(tmp_path / "moved"))))
        assert moved.source == str(tmp_path / "moved")


async def test_options_of_a_catalogue_are_those_of_the_next_load_of_a_model_in_a_folder(tmp_path: Path) -> None:
    folder, own = tmp_path / "models", write_model(tmp_path / "own")
    for file in write_model(folder / "m", bytes=1 << 20).iterdir():
        put_back(file)
    config = {"model_dirs": [str(folder)], "models": [{"id": "own", "source": str(own)}]}
    plain, given = LoadRequest(model_id="m"), LoadRequest(model_id="m", kv_dtype="fp8")
    async with running_node(tmp_path, config) as node:
        await until(lambda: node.model("m").estimate_bytes)
        plain_bytes = node.model("m").estimate_bytes or 0
        given_bytes = (await node.inspect(given)).estimate_bytes or 0
        assert given_bytes < plain_bytes
        assert (node.model("m").estimate_bytes, node.model("m").state) == (given_bytes, ModelState.COLD)
        assert (await node.inspect(plain)).estimate_bytes == plain_bytes
        await node.load(given, wait=True)
        await node.unload(UnloadRequest(model_id="m"))
        assert node.model("m").estimate_bytes == given_bytes
        assert (await node.inspect(plain)).estimate_bytes == plain_bytes, "the load had options that are gone"
        await node.inspect(given)
        await node.unload(UnloadRequest(model_id="m", forget=True))
        assert node.model("m").estimate_bytes == plain_bytes, "no entry names it any more"
        await node.inspect(replace(given, source=str(own)))
        assert node.model("m").source == str(folder / "m")
        before = node.model("own")
        assert await node.inspect(replace(given, model_id="own")) == before, "the node's own configuration names it"


async def test_inspection_with_an_unknown_harness_is_rejected_and_not_kept(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m")
    async with running_node(tmp_path, {"model_roots": [str(tmp_path)]}) as node:
        with pytest.raises(ModelUnsupported, match="no harness 'other'"):
            await node.inspect(LoadRequest(model_id="m", source=str(path), harness="other"))
        assert node.models() == ()


async def test_files_that_are_being_deleted_are_not_inspected(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        node.files._deleting.add("org/m")  # noqa: SLF001 - a deletion takes no time that a test could use
        with pytest.raises(ModelInUse, match="being deleted"):
            await node.inspect(LoadRequest(model_id="org/m"))


async def test_truncated_files_are_damaged_until_they_change(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    file = write_model(folder / "m") / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    put(folder / "g.gguf")
    for each in file.parent.iterdir():
        put_back(each)
    async with running_node(tmp_path, {"model_dirs": [str(folder)]}, scan_s=0.05) as node:
        await until(lambda: node.model("m").reason and node.model("g").reason)
        for name in ("m", "g"):
            status = node.model(name)
            assert (status.state, status.reason_code) == (ModelState.COLD, "files_damaged")
            assert str(folder / name) in (status.reason or "")
        file.write_bytes(whole)
        put_back(file)
        await until(lambda: node.model("m").estimate_bytes is not None)
        assert node.model("m").reason is None


async def test_changed_files_of_a_loaded_model_are_reported_once_and_read_by_the_next_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_model(tmp_path / "m")
    async with running_node(tmp_path, {"models": [{"id": "m", "source": str(path)}]}, scan_s=0.05) as node:
        loaded = await load(node, "m")
        assert not loaded.files_changed
        write_model(path, config={"max_position_embeddings": 2048})
        await until(lambda: node.model("m").files_changed)
        await node.scan_library()
        assert node.model("m").state is ModelState.READY
        assert caplog.text.count("has changed since it was loaded") == 1
        await node.unload(UnloadRequest(model_id="m"))
        again = await load(node, "m")
        assert not again.files_changed
        assert (again.full_context_tokens, loaded.full_context_tokens) == (2048, 4096)


async def test_digest_is_that_of_every_byte_of_loaded_models_and_of_those_with_equal_samples(tmp_path: Path) -> None:
    header = b'{"model.embed_tokens.weight": {"dtype": "F32", "shape": [64, 4], "data_offsets": [0, 1024]}}'
    for name, first in (("base", b"a"), ("tuned", b"b")):
        weights = len(header).to_bytes(8, "little") + header + first + bytes(1023)
        (write_model(tmp_path / name) / "model.safetensors").write_bytes(weights)
    assert len({inspect(tmp_path / name).digest for name in ("base", "tuned")}) == 1, "the byte is in no sample"

    @asynccontextmanager
    async def node_with(*names: str) -> AsyncIterator[Node]:
        models = [{"id": name, "source": str(tmp_path / name)} for name in names]
        digests = partial(FileDigests, tmp_path / "digests.json", small_bytes=10)
        async with running_node(tmp_path, {"models": models}, scan_s=0.05, digests=digests) as node:
            yield node

    async with node_with("base") as node:
        await until(lambda: node.model("base").digest)
        assert node.model("base").content_digest == "", "to read every file on a disk would take days"
        await load(node, "base")
        await until(lambda: node.model("base").content_digest)
        digest = node.model("base").content_digest
    async with node_with("base", "tuned") as node:
        await until(lambda: node.model("base").content_digest == digest)
        await until(lambda: node.model("tuned").content_digest not in ("", digest))


async def test_inspection_follows_the_files_of_a_model_that_is_not_in_memory(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m")
    async with running_node(tmp_path, {"models": [{"id": "m", "source": str(path)}]}, scan_s=0.05) as node:
        await until(lambda: node.model("m").estimate_bytes is not None)
        (path / "model.safetensors").write_bytes(b"cut")
        await until(lambda: node.model("m").reason_code == "files_damaged")
        assert node.model("m").estimate_bytes is None
