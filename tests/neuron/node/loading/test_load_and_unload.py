"""A whole node with real workers and an engine that fails on demand: loads, unloads and their failures."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faulty_engine
import pytest
from faulty_models import models, running_node, write_model

from cortex.neuron.engine.memory.dtypes import likely_multiplies_codes
from cortex.neuron.node.harness.estimates import Footprint
from cortex.neuron.node.harness.forecast import Forecast
from cortex.neuron.node.inspection_process.preflight import ModelMetadata
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.loading.loader import Inspection, ModelLoader
from cortex.neuron.worker.discovery import DeviceReading, Inventory
from cortex.wire.errors import (
    InsufficientCapacity,
    LoadFailed,
    ModelInUse,
    ModelNotFound,
    Overloaded,
    Recovering,
    ShuttingDown,
)
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import Device, ModelState

from ....waiting import NEVER_S, WAIT_S, until
from ...generations import Reader
from ..node_calls import has_worker, held, load, request, tokens_of, worker_bytes, worker_of


async def test_loads_generates_and_unloads(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={"bytes": 64 << 20})) as node:
        assert node.model("m").state is ModelState.COLD
        assert node.health().devices[0].worker == "none"
        status = await load(node)
        assert (status.state, status.family, status.devices) == (ModelState.READY, "llama", (0,))
        assert status.load_s
        assert status.measured_bytes is not None
        assert status.measured_bytes > 60 << 20
        assert status.context_tokens == faulty_engine.CONTEXT_TOKENS
        assert status.capabilities.tools
        assert await tokens_of(node.generate("m", request())) == [1, 2, 3, 4, 5]
        status = await node.unload(UnloadRequest(model_id="m"))
        assert (status.state, status.measured_bytes) == (ModelState.COLD, None)
        with pytest.raises(Overloaded, match="not loaded"):
            node.generate("m", request())


async def test_model_that_only_a_load_request_named_is_forgotten_and_a_configured_one_stays(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        source = node.model("m").source
        assert (await load(node, "alias", source=source)).state is ModelState.READY
        await load(node)
        assert (await node.unload(UnloadRequest(model_id="alias", forget=True))).state is ModelState.COLD
        assert (await node.unload(UnloadRequest(model_id="m", forget=True))).state is ModelState.READY
        assert [model.id for model in node.models()] == ["m"]
        assert (await load(node, "alias", source=source)).state is ModelState.READY


async def test_order_for_a_longer_context_leaves_a_model_that_has_one_or_is_being_loaded(tmp_path: Path) -> None:
    seen = faulty_engine.CONTEXT_TOKENS
    async with running_node(tmp_path, models(tmp_path, m={"pieces": 30, "piece_s": 0.02})) as node:
        loading = asyncio.create_task(load(node))
        await until(lambda: node.model("m").state is ModelState.LOADING)
        order = UnloadRequest(model_id="m", seen_context_tokens=seen)
        assert (await node.unload(order)).state is ModelState.LOADING
        await loading
        assert (await node.unload(UnloadRequest(model_id="m", seen_context_tokens=seen - 1))).state is ModelState.READY
        assert (await node.unload(order)).state is ModelState.COLD
        assert (await node.unload(order)).state is ModelState.COLD


async def test_unknown_model_is_not_found_and_similar_names_are_listed(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, qwen={})) as node:
        for call in (lambda: node.model("qwem"), lambda: node.generate("qwem", request())):
            with pytest.raises(ModelNotFound, match="did you mean qwen"):
                call()
        with pytest.raises(ModelNotFound):
            await load(node, "qwem")
        with pytest.raises(ModelNotFound):
            await node.unload(UnloadRequest(model_id="qwem"))


async def test_loads_a_directory_by_its_path(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "somewhere"))
    async with running_node(tmp_path, {"model_roots": [str(tmp_path)]}) as node:
        assert (await load(node, path)).state is ModelState.READY
        assert (await load(node, "short", source=path)).state is ModelState.READY


async def test_joins_concurrent_loads_of_one_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_node(tmp_path, models(tmp_path, m={"pieces": 10, "piece_s": 0.02})) as node:
        statuses = await asyncio.gather(*(load(node) for _ in range(5)))
        assert {status.state for status in statuses} == {ModelState.READY}
        assert [line for line in caplog.messages if "loading → ready" in line] == ["m: loading → ready"]


async def test_reports_progress_while_loading_and_joins_the_load(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={"pieces": 30, "piece_s": 0.02})) as node:
        status = await node.load(LoadRequest(model_id="m"), wait=False)
        assert status.state is ModelState.LOADING
        with pytest.raises(Recovering, match="loading"):  # a gateway waits, instead of passing the error on
            node.generate("m", request())
        await until(lambda: (p := node.model("m").progress) is not None and p.stage == "read")
        await load(node)
        assert node.model("m").progress is None


async def test_load_is_joined_only_in_its_quantisation_also_before_its_files_are_read(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await until(lambda: node.model("m").estimate_bytes)  # as its files are
        for quant in ("q8_0", "int8"):
            assert (await node.load(LoadRequest(model_id="m", quant=quant), wait=False)).state is ModelState.LOADING
        with pytest.raises(ModelInUse, match="loading as q8_0, not as q4"):
            await node.load(LoadRequest(model_id="m", quant="q4"), wait=False)
        with pytest.raises(ModelInUse, match="loading as q8_0, not as bf16"):
            await node.load(LoadRequest(model_id="m", quant="bf16"), wait=False)


@pytest.mark.parametrize(
    ("behaviour", "reason"), [({"load": "refuse"}, "of no use"), ({"load": "bug"}, "KeyError")], ids=["rejected", "bug"]
)
async def test_failed_load_reports_the_reason_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, behaviour: dict[str, Any], reason: str
) -> None:
    async with running_node(tmp_path, models(tmp_path, m=behaviour)) as node:
        with pytest.raises(LoadFailed, match=reason):
            await load(node)
        status = node.model("m")
        assert status.state is ModelState.FAILED
        assert reason in (status.reason or "")
        assert not node.devices.supervisors[0].has_models
        with pytest.raises(LoadFailed, match=reason):
            node.generate("m", request())
        write_model(tmp_path / "m")
        assert (await load(node)).state is ModelState.READY


async def test_preflight_rejects_before_any_worker_is_started(tmp_path: Path) -> None:
    config = models(tmp_path, gpt={"config": {"model_type": "gptj"}}, m={}) | {"model_roots": [str(tmp_path)]}
    (tmp_path / "empty").mkdir()
    async with running_node(tmp_path, config) as node:
        for rejected, reason in (
            (LoadRequest(model_id="gpt"), "GPTJForCausalLM of the installed transformers"),
            (
                LoadRequest(model_id="m", quant="fp8"),
                "not quantised as fp8 at load on this node.*; choose q8 or q4, or omit",
            ),
            (LoadRequest(model_id=str(tmp_path / "empty")), "no \\*.safetensors"),
            (LoadRequest(model_id="m", devices=(7,)), "device 7"),
            (LoadRequest(model_id="m", tensor_parallel=2), "tensor_parallel"),
            (LoadRequest(model_id="m", harness="vllm"), "no harness"),
        ):
            with pytest.raises(LoadFailed, match=reason):
                await node.load(rejected, wait=True)
        assert not has_worker(node)
        assert (await load(node)).state is ModelState.READY  # options of a rejected request are not kept


async def test_rejects_a_model_that_does_not_fit_with_needed_and_available_bytes(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}), "limits": {"min_free_vram_mb": 1 << 30}}
    async with running_node(tmp_path, config) as node:
        with pytest.raises(InsufficientCapacity, match="needs at least") as rejected:
            await load(node)
        (row,) = rejected.value.details["devices"]
        assert row["need_bytes"] > row["have_bytes"] == 0
        assert row["kept_free_bytes"] >= 1 << 50
        assert not has_worker(node)


async def test_rejection_for_lack_of_memory_says_what_the_model_needs_when_quantised(tmp_path: Path) -> None:
    card = Device(index=0, kind="cuda", name="card", total_bytes=1 << 30)
    readings = {0: DeviceReading(1 << 30, 1 << 20)}
    full_card = {"discover": lambda: Inventory((card,), readings=readings), "read_devices": lambda _: readings}
    async with running_node(tmp_path, models(tmp_path, m={}), **full_card) as node:
        with pytest.raises(InsufficientCapacity, match=r"quantised at load .*needs at least .* as q4_k, .* as q8_0"):
            await node.load(LoadRequest(model_id="m"), wait=True)
        status = node.model("m")
        sizes = {size.quant: size for size in status.quantised}
        assert {"q4_k", "q5_k", "q6_k", "q8_0"} <= sizes.keys()
        assert status.requested_quant is None
        with pytest.raises(InsufficientCapacity, match="needs at least") as rejected:
            await node.load(LoadRequest(model_id="m", quant="int4"), wait=True)
        assert "quantised at load" not in rejected.value.message
        status = node.model("m")
        assert (status.quant, status.requested_quant) == ("q4_k", "int4")
        assert status.least_bytes == sizes["q4_k"].least_bytes


async def test_inspection_of_the_library_does_not_replace_that_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, is_slow, may_end, ended = ModelLoader.read, asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_for_the_library(loader: ModelLoader, model: KnownModel, path: Path) -> Inspection:
        inspection = await read(loader, model, path)
        if model.quant is None and not is_slow.is_set():
            is_slow.set()
            await may_end.wait()
            asyncio.get_running_loop().call_soon(ended.set)
        return inspection

    monkeypatch.setattr(ModelLoader, "read", slow_for_the_library)
    card = Device(index=0, kind="cuda", name="card", total_bytes=1 << 30)
    readings = {0: DeviceReading(1 << 30, 1 << 20)}
    full_card = {"discover": lambda: Inventory((card,), readings=readings), "read_devices": lambda _: readings}
    async with running_node(tmp_path, models(tmp_path, m={}), **full_card) as node:
        await is_slow.wait()
        with pytest.raises(InsufficientCapacity):
            await node.load(LoadRequest(model_id="m", quant="int4"), wait=True)
        may_end.set()
        await ended.wait()
        assert node.model("m").quant == "q4_k"


async def test_reports_the_memory_that_a_load_leaves_free(tmp_path: Path) -> None:
    """The gateway places models by these numbers."""
    async with running_node(tmp_path, {**models(tmp_path, m={}), "limits": {"min_free_vram_mb": 512}}) as node:
        (device,) = node.health().devices
        assert (device.kept_free_bytes, device.kept_free_share) == (512 << 20, 0.5)
        await until(lambda: node.model("m").estimate_bytes)
        assert node.model("m").least_bytes


async def test_polls_compute_an_estimate_again_only_if_something_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    footprint, computed = Forecast.footprint, list[KnownModel]()

    def counted(forecast: Forecast, model: KnownModel, metadata: ModelMetadata, devices: Sequence[Device]) -> Footprint:
        computed.append(model)
        return footprint(forecast, model, metadata, devices)

    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await until(lambda: node.model("m").estimate_bytes)
        whole_bytes = node.model("m").estimate_bytes or 0
        monkeypatch.setattr(Forecast, "footprint", counted)
        for _ in range(3):
            assert node.health().models[0].estimate_bytes == whole_bytes
        assert not computed
        is_coded = not likely_multiplies_codes()
        monkeypatch.setattr("cortex.neuron.node.harness.forecast.likely_multiplies_codes", lambda: is_coded)
        node.health()
        assert len(computed) == 1
        await node.load(LoadRequest(model_id="m", max_bytes=whole_bytes // 2), wait=False)
        assert node.health().models[0].estimate_bytes != whole_bytes
        assert len(computed) == 2


async def test_unload_cancels_a_load_in_progress(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={"pieces": 1000, "piece_s": 0.01})) as node:
        waiting = asyncio.create_task(load(node))
        await until(lambda: (p := node.model("m").progress) is not None and p.stage == "read")
        status = await asyncio.wait_for(node.unload(UnloadRequest(model_id="m")), WAIT_S)
        assert status.state is ModelState.COLD
        with pytest.raises(LoadFailed, match="unloaded while"):
            await waiting
        assert not node.devices.supervisors[0].has_models


async def test_unload_right_after_a_load_request_ends(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await node.load(LoadRequest(model_id="m"), wait=False)
        assert (await asyncio.wait_for(node.unload(UnloadRequest(model_id="m")), WAIT_S)).state is ModelState.COLD
        assert (await load(node)).state is ModelState.READY


async def test_unload_waits_for_running_requests_and_rejects_new_ones(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        with held(worker_of(node)):
            running = asyncio.create_task(tokens_of(node.generate("m", request(max_tokens=200))))
            await until(lambda: node.model("m").load.running == 1)
            unloading = asyncio.create_task(node.unload(UnloadRequest(model_id="m", drain_s=NEVER_S)))
            await until(lambda: node.model("m").state is ModelState.UNLOADING)
            with pytest.raises(Overloaded):
                node.generate("m", request("late"))
        assert len(await running) == 200
        assert (await unloading).state is ModelState.COLD


async def test_forced_unload_ends_a_drain_in_progress(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        running = asyncio.create_task(tokens_of(node.generate("m", request(max_tokens=10**6))))
        await until(lambda: node.model("m").load.running == 1)
        patient = asyncio.create_task(node.unload(UnloadRequest(model_id="m", drain_s=NEVER_S)))
        await until(lambda: node.model("m").state is ModelState.UNLOADING)
        await asyncio.wait_for(node.unload(UnloadRequest(model_id="m", force=True)), WAIT_S)
        assert (await asyncio.wait_for(patient, WAIT_S)).state is ModelState.COLD
        with pytest.raises(ShuttingDown):
            await running


async def test_load_during_an_unload_loads_the_model_again(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        keep = Reader(node.generate("m", request(max_tokens=10**6)))
        unloading = asyncio.create_task(node.unload(UnloadRequest(model_id="m", drain_s=0.3)))
        await until(lambda: node.model("m").state is ModelState.UNLOADING)
        assert (await load(node)).state is ModelState.READY
        await unloading
        assert await tokens_of(node.generate("m", request("again"))) == [1, 2, 3, 4, 5]
        keep.cancel()


async def test_load_cycles_of_two_models_do_not_leak_memory(tmp_path: Path) -> None:
    behaviour = {"bytes": 80 << 20}
    async with running_node(tmp_path, models(tmp_path, a=behaviour, b=behaviour)) as node:
        sizes = []
        for _ in range(6):
            for model_id in ("a", "b"):
                await load(node, model_id)
                await tokens_of(node.generate(model_id, request()))
                await node.unload(UnloadRequest(model_id=model_id))
            sizes.append(worker_bytes(node))
        assert sizes[-1] - sizes[1] < 64 << 20


async def test_subscriber_gets_every_state(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={"pieces": 10, "piece_s": 0.02})) as node:
        states = []

        async def collect_states() -> None:
            async for event in node.subscribe():
                if event.model is not None:
                    states.append(event.model.state.value)

        subscriber = asyncio.create_task(collect_states())
        await asyncio.sleep(0)
        await load(node)
        await until(lambda: states[-1:] == ["ready"])
        await node.unload(UnloadRequest(model_id="m"))
        await until(lambda: states[-1:] == ["cold"])
        assert list(dict.fromkeys(states)) == ["loading", "ready", "unloading", "cold"]
        await node.close()
        await asyncio.wait_for(subscriber, WAIT_S)
