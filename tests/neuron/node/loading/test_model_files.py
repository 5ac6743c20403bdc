"""Downloads without a load, deletion and disk use, against a hub on localhost."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from faulty_models import running_node, write_model

from cortex.neuron.node.dependencies import fetch
from cortex.neuron.node.node import Node
from cortex.neuron.weights.errors import FilesMissing
from cortex.wire.errors import InvalidValue, LoadFailed, ModelInUse, ModelNotFound
from cortex.wire.node.neighbours import repository_of
from cortex.wire.node.orders import AssembleRequest, FilesRequest, LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState

from ....waiting import WAIT_S, until
from ...weights.hub.slow_digests import SlowDigests

MODEL = "org/model"
REQUEST = FilesRequest(model_id=MODEL)


def stall(handler: Any, data: bytes) -> bytes:
    """Sends half of a file, and the rest when the hub is released."""
    hub = handler.hub
    hub.stalled.set()
    hub.release.wait(WAIT_S)
    return data[: len(data) // 2]


@pytest.fixture
def real_files(monkeypatch: pytest.MonkeyPatch, start_hub: Any, tmp_path: Path) -> Any:
    """Starts a hub with the files of a small model, and points the node at it."""

    def start(**options: Any) -> Any:
        folder = write_model(tmp_path / "original", bytes=1 << 20)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        hub = start_hub(files, repository=MODEL, **options)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        return hub

    return start


async def ended(node: Node) -> str:
    await until(lambda: node.files.pull_status(MODEL).state != "running")
    return node.files.pull_status(MODEL).state


async def test_pulled_model_is_on_disk_listed_and_loads(real_files: Any, tmp_path: Path) -> None:
    hub = real_files()
    num_bytes = sum(map(len, hub.files.values()))
    async with running_node(tmp_path, fetch=fetch) as node:
        assert node.files.pull(REQUEST).state == "running"
        assert await ended(node) == "done", node.files.pull_status(MODEL)
        (status,) = node.health().pulls
        assert status.progress is not None
        assert (status.progress.stage, status.progress.done_bytes) == ("download", num_bytes)
        assert node.model(MODEL).state is ModelState.COLD, "a pull does not load"
        assert node.model(MODEL).disk_bytes == num_bytes
        disk = node.health().disk
        assert disk is not None
        assert disk.models_bytes == num_bytes
        hub.files.clear()
        assert (await node.load(LoadRequest(model_id=MODEL), wait=True)).state is ModelState.READY


async def test_files_are_deleted_only_when_the_model_is_out_of_memory(real_files: Any, tmp_path: Path) -> None:
    real_files()
    async with running_node(tmp_path, fetch=fetch) as node:
        await node.load(LoadRequest(model_id=MODEL), wait=True)
        with pytest.raises(ModelInUse, match="unload it first"):
            await node.files.delete(REQUEST)
        await node.unload(UnloadRequest(model_id=MODEL))
        outside = tmp_path / "outside"
        outside.write_text("kept")
        (tmp_path / "hub" / "models--org--model" / "snapshots" / "link").symlink_to(tmp_path)
        deleted = await node.files.delete(REQUEST)
        assert deleted.freed_bytes > 0
        assert list((tmp_path / "hub").glob("models--*")) == []
        assert outside.read_text() == "kept"
        with pytest.raises(ModelNotFound):
            node.model(MODEL)
        with pytest.raises(ModelNotFound):
            await node.files.delete(REQUEST)


async def test_cancelled_pull_keeps_what_it_has_and_the_next_one_continues(real_files: Any, tmp_path: Path) -> None:
    hub = real_files()
    hub.faults = [stall] * 8
    async with running_node(tmp_path, fetch=fetch) as node:
        node.files.pull(REQUEST)
        await asyncio.to_thread(hub.stalled.wait, 30)
        with pytest.raises(ModelInUse, match="cancel"):
            node.files.pull(FilesRequest(model_id=MODEL, quant="Q4_K_M"))
        with pytest.raises(ModelInUse, match="being downloaded"):
            await node.files.delete(REQUEST)
        assert (await node.files.cancel(MODEL)).state == "cancelled"
        hub.faults.clear()
        hub.release.set()
        node.files.pull(REQUEST)
        assert await ended(node) == "done"


async def test_model_of_uploaded_files_is_listed_loads_and_is_deleted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "original", bytes=1 << 20)
    order = AssembleRequest(repository="uploaded/own", files={})
    async with running_node(tmp_path, fetch=fetch) as node:
        for path in folder.iterdir():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            await node.files.upload(digest, path.read_bytes())
            order.files[path.name] = digest
        with pytest.raises(InvalidValue, match="No model can be made"):
            await node.files.assemble(msgspec.structs.replace(order, files={"config.json": order.files["config.json"]}))
        with pytest.raises(ModelNotFound):
            node.model("uploaded/own")
        await node.files.assemble(order)
        assert node.model("uploaded/own").disk_bytes == sum(path.stat().st_size for path in folder.iterdir())
        assert (await node.load(LoadRequest(model_id="mine", source="uploaded/own"), wait=True)).state == "ready"
        with pytest.raises(ModelInUse):
            await node.files.delete(FilesRequest(model_id="uploaded/own"))
        assert await node.files.has_upload(digest)
        await node.unload(UnloadRequest(model_id="mine"))
        await node.files.delete(FilesRequest(model_id="uploaded/own"))
        assert not await node.files.has_upload(digest)


async def test_damaged_upload_is_rejected(tmp_path: Path) -> None:
    async with running_node(tmp_path, fetch=fetch) as node:
        with pytest.raises(InvalidValue, match="SHA-256"):
            await node.files.upload("0" * 64, b"x")


async def test_failed_pull_reports_the_reason(real_files: Any, tmp_path: Path) -> None:
    real_files(listing_status=404)
    async with running_node(tmp_path, fetch=fetch) as node:
        node.files.pull(REQUEST)
        assert await ended(node) == "failed"
        assert MODEL in (node.files.pull_status(MODEL).reason or "")
        assert node.files.pull_status(MODEL).code == "source_not_found"
        assert node.models() == (), "a name that the hub does not know is not listed"
        with pytest.raises(ModelNotFound):
            node.files.pull(FilesRequest(model_id="no-hub-id"))


async def test_model_outside_the_cache_is_never_deleted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine", bytes=1 << 20)
    config = {"models": [{"id": "m", "source": str(folder)}]}
    async with running_node(tmp_path, config) as node:
        with pytest.raises(LoadFailed, match="outside the cache"):
            await node.files.delete(FilesRequest(model_id="m"))
        assert any(folder.iterdir())


async def test_deletes_only_the_quantisation_of_the_model_and_no_repository_of_two_models(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "a"
    snapshot.mkdir(parents=True)
    for quant in ("Q4_K_M", "Q8_0"):
        (snapshot / f"model-{quant}.gguf").write_bytes(b"x")
    models = [{"id": "small", "source": MODEL, "quant": "Q4_K_M"}, {"id": "large", "source": MODEL}]
    async with running_node(tmp_path, {"models": models}) as node:
        await node.files.delete(FilesRequest(model_id="small"))
        assert [path.name for path in snapshot.iterdir()] == ["model-Q8_0.gguf"]
        with pytest.raises(ModelInUse, match="small is configured with the same repository"):
            await node.files.delete(FilesRequest(model_id="large"))
        assert [path.name for path in snapshot.iterdir()] == ["model-Q8_0.gguf"]


async def test_dense_weights_that_two_models_are_quantised_from_are_not_deleted_with_one_of_them(
    tmp_path: Path,
) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "a"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x")
    models = [{"id": "small", "source": MODEL, "quant": "q4"}, {"id": "large", "source": MODEL, "quant": "q8"}]
    async with running_node(tmp_path, {"models": models}) as node:
        with pytest.raises(ModelInUse, match="large is configured with the same repository"):
            await node.files.delete(FilesRequest(model_id="small"))
        with pytest.raises(ModelNotFound, match="has no q4 of org/model"):
            await node.files.delete(FilesRequest(model_id="small", quant="q4"))
        assert (snapshot / "model.safetensors").exists()


async def test_offer_of_the_hub_is_read_without_a_download(
    real_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = real_files()
    async with running_node(tmp_path, fetch=fetch) as node:
        offer = await node.files.offer(MODEL)
        assert [(each.quant, each.num_bytes) for each in offer.variants] == [(None, sum(map(len, hub.files.values())))]
        assert node.models() == ()
        for name in ("no-hub-id", "../../etc/passwd"):
            with pytest.raises(ModelNotFound):
                await node.files.offer(name)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(LoadFailed, match="offline"):
            await node.files.offer(MODEL)


async def test_clients_that_wait_for_the_digests_of_a_model_take_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(write_model(tmp_path / "theirs", bytes=1 << 20))
    repository = repository_of(source)
    assert repository is not None
    async with running_node(tmp_path, {"models": [{"id": "m", "source": source}]}) as node:
        digests = SlowDigests(monkeypatch)
        waiting = [asyncio.create_task(node.files.shared(repository, "main")) for _ in range(64)]
        try:
            await until(digests.has_begun.is_set)
            waiting.pop().cancel()
            async with asyncio.timeout(WAIT_S / 2):
                await asyncio.to_thread(int)
        finally:
            digests.may_end.set()
        listings = await asyncio.gather(*waiting)
        assert len({listing.commit for listing in listings}) == 1


async def test_any_number_of_downloads_leaves_threads_to_the_rest_of_the_daemon(tmp_path: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def fetch_late(*_: Any) -> Path:
        has_begun.set()
        may_end.wait(WAIT_S)
        raise FilesMissing("gone")

    async with running_node(tmp_path, fetch=fetch_late) as node:
        for number in range(64):
            node.files.pull(FilesRequest(model_id=f"org/model-{number}"))
        try:
            await until(has_begun.is_set)
            async with asyncio.timeout(WAIT_S / 4):
                await asyncio.to_thread(int)
        finally:
            may_end.set()
        await until(lambda: all(pull.state == "failed" for pull in node.files.pulls))
