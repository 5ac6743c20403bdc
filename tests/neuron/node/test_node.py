"""A whole node with real workers and an engine that fails on demand."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import faulty_engine
import faulty_models
import pytest
from faulty_models import running_node, write_model

from cortex.neuron.engine.memory.host import anonymous_bytes
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.template.prompt import PromptRules
from cortex.neuron.weights.errors import HubUnreachable
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.wire.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InsufficientCapacity,
    InvalidValue,
    LoadFailed,
    ModelNotFound,
    Overloaded,
    PromptTooLongForMemory,
    Recovering,
    ShuttingDown,
)
from cortex.wire.node import LoadRequest, ModelState, UnloadRequest
from cortex.wire.packed_request import pack
from cortex.wire.requests import GenerateRequest

WAIT_S = 30.0
"""Upper bound of a wait; only reached on failure."""


def models(tmp_path, **behaviours):
    """Config entries for one model directory per name."""
    return {
        "models": [
            {"id": name, "source": str(write_model(tmp_path / name, **behaviour))}
            for name, behaviour in behaviours.items()
        ]
    }


def request(request_id="r", token=faulty_engine.PLAIN, max_tokens=5, **fields):
    return EngineRequest(id=request_id, prompt=(token,), max_tokens=max_tokens, **fields)


async def tokens_of(generation):
    return [token async for batch in generation for output in batch for token in output.tokens]


async def load(node, model_id="m", **fields):
    return await node.load(LoadRequest(model_id=model_id, **fields), wait=True)


async def until(condition) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def worker_of(node):
    return node.devices.supervisors[0].process_id


def alive(process_id):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, 0)
        return True
    return False


async def test_loads_generates_and_unloads(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={"bytes": 64 << 20})) as node:
        assert node.model("m").state is ModelState.COLD
        assert node.health().devices[0].worker == "none"
        status = await load(node)
        assert (status.state, status.family, status.devices) == (ModelState.READY, "llama", (0,))
        assert status.measured_bytes > 60 << 20
        assert status.context_tokens == faulty_engine.CONTEXT_TOKENS
        assert status.capabilities.tools
        assert await tokens_of(node.submit("m", request())) == [1, 2, 3, 4, 5]
        status = await node.unload(UnloadRequest(model_id="m"))
        assert (status.state, status.measured_bytes) == (ModelState.COLD, None)
        with pytest.raises(Overloaded, match="not loaded"):
            node.submit("m", request())


async def test_unknown_model_is_not_found_and_similar_names_are_listed(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, qwen={})) as node:
        for call in (lambda: node.model("qwem"), lambda: node.submit("qwem", request())):
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
        with pytest.raises(Overloaded, match="loading"):
            node.submit("m", request())
        await until(lambda: (p := node.model("m").progress) is not None and p.stage == "read")
        await load(node)
        assert node.model("m").progress is None


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
        assert reason in status.reason
        assert not node.devices.supervisors[0].has_models
        with pytest.raises(LoadFailed, match=reason):
            node.submit("m", request())
        write_model(tmp_path / "m")
        assert (await load(node)).state is ModelState.READY


async def test_preflight_rejects_before_any_worker_is_started(tmp_path: Path) -> None:
    config = models(tmp_path, gpt={"config": {"model_type": "gpt2"}}, m={}) | {"model_roots": [str(tmp_path)]}
    (tmp_path / "empty").mkdir()
    async with running_node(tmp_path, config) as node:
        for model_id, fields, reason in (
            ("gpt", {}, "model_type 'gpt2'"),
            ("m", {"quant": "q4_k"}, "not quantised at load on this node.*for q4_k name a GGUF"),
            (str(tmp_path / "empty"), {}, "no \\*.safetensors"),
            ("m", {"devices": (7,)}, "device 7"),
            ("m", {"tensor_parallel": 2}, "tensor_parallel"),
            ("m", {"harness": "vllm"}, "no harness"),
        ):
            with pytest.raises(LoadFailed, match=reason):
                await load(node, model_id, **fields)
        assert worker_of(node) is None
        assert (await load(node)).state is ModelState.READY  # options of a rejected request are not kept


async def test_rejects_a_model_that_does_not_fit_with_needed_and_available_bytes(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}), "limits": {"min_free_vram_mb": 1 << 30}}
    async with running_node(tmp_path, config) as node:
        with pytest.raises(InsufficientCapacity, match="needs at least") as rejected:
            await load(node)
        (row,) = rejected.value.details["devices"]
        assert row["need_bytes"] > row["have_bytes"] == 0
        assert row["kept_free_bytes"] >= 1 << 50
        assert worker_of(node) is None


async def test_reports_the_memory_that_a_load_leaves_free(tmp_path: Path) -> None:
    """The gateway places models by these numbers."""
    async with running_node(tmp_path, {**models(tmp_path, m={}), "limits": {"min_free_vram_mb": 512}}) as node:
        (device,) = node.health().devices
        assert (device.kept_free_bytes, device.kept_free_share) == (512 << 20, 0.5)
        await until(lambda: node.model("m").estimate_bytes)
        assert node.model("m").least_bytes > 0


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
    async with running_node(tmp_path, models(tmp_path, m={"step_s": 0.005})) as node:
        await load(node)
        running = asyncio.create_task(tokens_of(node.submit("m", request(max_tokens=200))))
        await until(lambda: node.model("m").load.running == 1)
        unloading = asyncio.create_task(node.unload(UnloadRequest(model_id="m", drain_s=60)))
        await until(lambda: node.model("m").state is ModelState.UNLOADING)
        with pytest.raises(Overloaded):
            node.submit("m", request("late"))
        assert len(await running) == 200
        assert (await unloading).state is ModelState.COLD


async def test_forced_unload_ends_a_drain_in_progress(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        running = asyncio.create_task(tokens_of(node.submit("m", request(max_tokens=10**6))))
        await until(lambda: node.model("m").load.running == 1)
        patient = asyncio.create_task(node.unload(UnloadRequest(model_id="m", drain_s=60)))
        await until(lambda: node.model("m").state is ModelState.UNLOADING)
        await asyncio.wait_for(node.unload(UnloadRequest(model_id="m", force=True)), WAIT_S)
        assert (await asyncio.wait_for(patient, WAIT_S)).state is ModelState.COLD
        with pytest.raises(ShuttingDown):
            await running


async def test_load_during_an_unload_loads_the_model_again(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        keep = node.submit("m", request(max_tokens=10**6))
        unloading = asyncio.create_task(node.unload(UnloadRequest(model_id="m", drain_s=0.3)))
        await until(lambda: node.model("m").state is ModelState.UNLOADING)
        assert (await load(node)).state is ModelState.READY
        await unloading
        assert await tokens_of(node.submit("m", request("again"))) == [1, 2, 3, 4, 5]
        keep.cancel()


async def test_recovers_each_time_its_worker_is_killed_mid_stream(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        for _ in range(6):
            stream = node.submit("m", request("long", max_tokens=10**6))
            await anext(stream)
            os.kill(worker_of(node), signal.SIGKILL)
            with pytest.raises(Recovering):
                await tokens_of(stream)
            with pytest.raises(Recovering):
                node.submit("m", request())
            await load(node)
            assert await tokens_of(node.submit("m", request("short"))) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("token", [faulty_engine.DEVICE_FAULT, faulty_engine.HANG, faulty_engine.SEGFAULT])
async def test_device_fault_ends_streams_with_a_retryable_error_and_the_models_recover(tmp_path: Path, token) -> None:
    timeouts = WorkerTimeouts(step_s=3.0)
    async with running_node(tmp_path, models(tmp_path, m={}, other={}), timeouts=timeouts) as node:
        await load(node)
        await load(node, "other")
        innocent = node.submit("other", request("innocent", max_tokens=10**6))
        await anext(innocent)
        with pytest.raises(Recovering):
            await tokens_of(node.submit("m", request("fatal", token)))
        with pytest.raises(Recovering):
            await tokens_of(innocent)
        assert node.model("m").state is ModelState.RECOVERING
        await asyncio.gather(load(node), load(node, "other"))
        assert await tokens_of(node.submit("m", request())) == [1, 2, 3, 4, 5]


async def test_model_fails_after_repeated_faults(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        write_model(tmp_path / "m", load="fault")
        os.kill(worker_of(node), signal.SIGKILL)
        await until(lambda: node.model("m").state is ModelState.RECOVERING)
        await until(lambda: node.model("m").state is ModelState.FAILED)
        assert "gave up after" in node.model("m").reason
        write_model(tmp_path / "m")
        assert (await load(node)).state is ModelState.READY


async def test_error_of_one_request_does_not_affect_others(tmp_path: Path) -> None:
    async with running_node(
        tmp_path,
        models(tmp_path, m={}),
    ) as node:
        await load(node)
        other = node.submit("m", request("other", max_tokens=300))
        first = await anext(other)
        with pytest.raises(InvalidValue, match="top_k"):
            await tokens_of(node.submit("m", request("rejected", faulty_engine.REFUSED)))
        with pytest.raises(Overloaded, match="out of memory"):
            await tokens_of(node.submit("m", request("huge", faulty_engine.OUT_OF_MEMORY)))
        assert sum(len(output.tokens) for output in first) + len(await tokens_of(other)) == 300
        with pytest.raises(PromptTooLongForMemory, match=r"prompt is too long.* maximum context length is less than"):
            await tokens_of(node.submit("m", request("alone", faulty_engine.OUT_OF_MEMORY)))
        with pytest.raises(GenerationFailed, match="must match"):
            await tokens_of(node.submit("m", request("buggy", faulty_engine.BUG)))
        assert node.model("m").state is ModelState.READY


async def test_rejects_a_prompt_over_the_limit_with_both_counts(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}), "limits": {"max_prompt_tokens": 100}}
    async with running_node(tmp_path, config) as node:
        await load(node)
        for num_tokens in (101, 5000):
            with pytest.raises(
                ContextLengthExceeded, match=f"prompt is too long: {num_tokens} tokens > 100 maximum"
            ) as (rejected):
                node.submit("m", EngineRequest(id="x", prompt=(1,) * num_tokens, max_tokens=1))
            assert "This model's maximum context length is 100 tokens" in rejected.value.message
            assert "limits.max_prompt_tokens" in rejected.value.message


async def test_rejects_a_prompt_over_the_loaded_context_in_the_words_that_clients_match(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        with pytest.raises(ContextLengthExceeded, match="prompt is too long: 5000 tokens > 4095 maximum") as rejected:
            node.submit("m", EngineRequest(id="x", prompt=(1,) * 5000, max_tokens=1))
        assert "This model's maximum context length is 4096 tokens" in rejected.value.message


async def test_cancelled_request_frees_its_slot_in_every_phase(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}), "limits": {"max_num_seqs": 1, "max_queue": 4}}
    async with running_node(tmp_path, config) as node:
        await load(node)
        running = node.submit("m", request("running", max_tokens=10**6))
        queued = node.submit("m", request("queued"))
        await anext(running)
        assert (node.model("m").load.running, node.model("m").load.waiting) == (1, 1)
        queued.cancel()
        queued.cancel()
        assert [output.finish async for batch in queued for output in batch] == ["cancelled"]
        assert node.model("m").load.waiting == 0
        running.cancel()
        await until(lambda: node.model("m").load.running == 0)
        assert node.model("m").idle_s >= 0
        assert await tokens_of(node.submit("m", request("next"))) == [1, 2, 3, 4, 5]


async def test_full_queue_rejects_with_retry_after(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}), "limits": {"max_num_seqs": 1, "max_queue": 1}}
    async with running_node(tmp_path, config) as node:
        await load(node)
        first = node.submit("m", request("first", max_tokens=10**6))
        second = node.submit("m", request("second"))
        with pytest.raises(Overloaded) as rejected:
            node.submit("m", request("third"))
        assert rejected.value.retry_after_s >= 1
        first.cancel()
        assert await tokens_of(second) == [1, 2, 3, 4, 5]


async def test_keeps_requests_in_the_queue_while_the_cache_is_full(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={"num_pages": 1})) as node:
        await load(node)
        first = node.submit("m", request("first", max_tokens=10**6))
        await anext(first)
        await until(lambda: node.model("m").load.kv_used_fraction == 1.0)
        second = node.submit("m", request("second"))
        assert (node.model("m").load.running, node.model("m").load.waiting) == (1, 1)
        first.cancel()
        assert await tokens_of(second) == [1, 2, 3, 4, 5]


async def test_reads_do_not_wait_for_busy_engines_or_loads(tmp_path: Path) -> None:
    config = models(tmp_path, m={"step_s": 0.002}, slow={"pieces": 100, "piece_s": 0.01})
    async with running_node(tmp_path, config) as node:
        await load(node)
        streams = [
            asyncio.create_task(tokens_of(node.submit("m", request(f"s{n}", max_tokens=500)))) for n in range(64)
        ]
        await node.load(LoadRequest(model_id="slow"), wait=False)
        num_reads = 0
        while not all(stream.done() for stream in streams):
            node.health()
            node.models()
            num_reads += 1
            await asyncio.sleep(0.005)
        assert num_reads > 20, "a read that waited for the engine would take as long as the streams"
        assert {len(stream.result()) for stream in streams} == {500}


async def test_load_cycles_of_two_models_do_not_leak_memory(tmp_path: Path) -> None:
    behaviour = {"bytes": 80 << 20}
    async with running_node(tmp_path, models(tmp_path, a=behaviour, b=behaviour)) as node:
        sizes = []
        for _ in range(6):
            for model_id in ("a", "b"):
                await load(node, model_id)
                await tokens_of(node.submit(model_id, request()))
                await node.unload(UnloadRequest(model_id=model_id))
            sizes.append(anonymous_bytes(worker_of(node)))
        assert sizes[-1] - sizes[1] < 64 << 20


async def test_failed_default_model_does_not_stop_the_next(tmp_path: Path) -> None:
    defaults = [
        {"model_id": "bad", "source": str(write_model(tmp_path / "bad", load="refuse"))},
        {"model_id": "good", "source": str(write_model(tmp_path / "good"))},
    ]
    async with running_node(tmp_path, {"default_models": defaults}) as node:
        assert node.health().activation.state == "running"
        await until(lambda: node.health().activation.state == "done")
        activation = node.health().activation
        assert (activation.completed, activation.failed, activation.pending) == (("good",), ("bad",), ())
        assert node.model("good").state is ModelState.READY


async def test_retries_default_models_until_the_hub_is_reachable(tmp_path: Path) -> None:
    path, attempts = write_model(tmp_path / "m"), []

    def fetch(source, cache, quant, progress, cancelled):
        attempts.append(source)
        if len(attempts) < 3:
            raise HubUnreachable("the hub does not respond")
        return path

    defaults = [{"model_id": "org/model"}]
    async with running_node(tmp_path, {"default_models": defaults}, fetch=fetch, find_local=lambda *_: None) as node:
        await until(lambda: node.health().activation.state == "done")
        assert node.health().activation.completed == ("org/model",)
        assert len(attempts) == 3


async def test_download_reports_progress_and_can_be_cancelled(tmp_path: Path) -> None:
    cancelled_seen = []

    def fetch(source, cache, quant, progress, cancelled):
        for done in range(1000):
            progress(done, 1000)
            time.sleep(0.01)
            if cancelled():
                cancelled_seen.append(True)
                raise HubUnreachable("cancelled")
        return tmp_path

    async with running_node(tmp_path, fetch=fetch, find_local=lambda *_: None) as node:
        await node.load(LoadRequest(model_id="org/model"), wait=False)
        await until(lambda: node.model("org/model").state is ModelState.DOWNLOADING)
        progress = node.model("org/model").progress
        assert (progress.stage, progress.total_bytes) == ("download", 1000)
        await asyncio.wait_for(node.unload(UnloadRequest(model_id="org/model")), WAIT_S)
        assert cancelled_seen == [True]


async def test_reads_text_without_loading_the_weights(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        one, two = await asyncio.gather(node.text("m"), node.text("m"))
        assert one is two
        assert node.model("m").state is ModelState.COLD
        assert worker_of(node) is None
        with pytest.raises(ModelNotFound):
            await node.text("unknown")


async def test_cold_model_reports_its_size_without_starting_a_tokenizer(tmp_path: Path) -> None:
    made = []

    def open_text(path):
        made.append(path)
        return faulty_models.PlainText(path)

    async with running_node(tmp_path, models(tmp_path, m={}), open_text=open_text) as node:
        await until(lambda: node.model("m").estimate_bytes)
        assert node.model("m").family == "llama"
        assert node.model("m").capabilities.tools
        assert made == []
        for _ in range(2):
            await load(node, "m")
            await node.text("m")
            await node.unload(UnloadRequest(model_id="m"))
        assert len(made) == 1


@pytest.mark.parametrize("pieces", [1, 1000])
async def test_unreadable_tokenizer_fails_the_load_and_leaves_nothing_loaded(tmp_path: Path, pieces: int) -> None:
    """Whether the weights are loaded before or after it."""
    broken = True

    class BrokenText(faulty_models.PlainText):
        async def read(self):
            if broken:
                await asyncio.sleep(0.3)
                raise TextFileMalformed("tokenizer.json is not a tokenizer; download the model again")
            return await super().read()

    behaviour = {"pieces": pieces, "piece_s": 0.005}
    async with running_node(tmp_path, models(tmp_path, m=behaviour, n={}), open_text=BrokenText) as node:
        with pytest.raises(LoadFailed, match="tokenizer"):
            await load(node, "m")
        assert node.model("m").state is ModelState.FAILED
        assert not node.devices.supervisors[0].has_models
        broken = False
        await load(node, "n")


async def test_load_cancelled_while_the_tokenizer_is_read_leaves_nothing(tmp_path: Path) -> None:
    class SlowText(faulty_models.PlainText):
        async def read(self) -> None:
            self.closed = asyncio.Event()
            await self.closed.wait()
            raise Recovering("closed")

        async def close(self) -> None:
            self.closed.set()

    async with running_node(tmp_path, models(tmp_path, m={}), open_text=SlowText) as node:
        loading = asyncio.create_task(load(node, "m"))
        await until(lambda: node.devices.supervisors[0].has_models)
        await asyncio.sleep(0.2)  # by now the worker has loaded it
        await node.unload(UnloadRequest(model_id="m"))
        with pytest.raises(LoadFailed, match="unloaded while"):
            await loading
        assert not node.devices.supervisors[0].has_models


async def test_recovers_when_the_worker_is_lost_after_the_weights_and_before_the_tokenizer(tmp_path: Path) -> None:
    tokenizer_ready = asyncio.Event()

    class SlowText(faulty_models.PlainText):
        async def read(self):
            await tokenizer_ready.wait()
            return await super().read()

    async with running_node(tmp_path, models(tmp_path, m={}), open_text=SlowText) as node:
        loading = asyncio.create_task(load(node, "m"))
        await until(lambda: (p := node.model("m").progress) is not None and p.stage == "read")
        await asyncio.sleep(0.2)  # by now the worker has loaded it
        os.kill(worker_of(node), signal.SIGKILL)
        await until(lambda: worker_of(node) is None)
        tokenizer_ready.set()
        assert (await asyncio.wait_for(loading, WAIT_S)).state is ModelState.READY
        assert await asyncio.wait_for(tokens_of(node.submit("m", request())), WAIT_S) == [1, 2, 3, 4, 5]


async def test_tokenizer_process_ends_while_its_model_is_not_in_memory(tmp_path: Path) -> None:
    calls = []

    class WatchedText(faulty_models.PlainText):
        async def wake(self) -> None:
            calls.append("wake")

        async def rest(self) -> None:
            calls.append("rest")

        async def close(self) -> None:
            calls.append("close")

    async with running_node(tmp_path, models(tmp_path, m={}), open_text=WatchedText) as node:
        for count in (1, 2):
            await load(node, "m")
            await node.unload(UnloadRequest(model_id="m"))
            assert calls.count("wake") == count
            assert calls[-1] == "rest"
    assert calls[-1] == "close"


async def test_prompts_are_prepared_by_the_rules_of_their_model(tmp_path: Path) -> None:
    class RecordingText(faulty_models.PlainText):
        async def prepare(self, request, rules, *, is_long):
            return rules

    config = models(tmp_path, m={})
    config["models"][0]["control_tokens_in_messages"] = True
    config |= {"limits": {"max_prompt_tokens": 77}, "text": {"max_prompt_mb": 1, "max_grammar_kb": 2}}
    packed = pack(GenerateRequest(model="m", prompt="x"))
    async with running_node(tmp_path, config, open_text=RecordingText) as node:
        await load(node, "m")
        rules = await node.prepare(packed, principal="p")
        assert rules == PromptRules(4096, 77, 1_000_000, 2000, 2.0, control_tokens_in_messages=True)
        rules = await node.prepare(packed, principal="p", in_context=False)
        assert rules == PromptRules(None, None, 1_000_000, 2000, 2.0, control_tokens_in_messages=True)
        with pytest.raises(ModelNotFound):
            await node.prepare(pack(GenerateRequest(model="unknown", prompt="x")), principal="p")


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


async def test_close_ends_queued_requests_at_once_and_drains_running_ones(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={"step_s": 0.005}), "limits": {"max_num_seqs": 1}, "drain_s": 60.0}
    async with running_node(tmp_path, config) as node:
        await load(node)
        worker = worker_of(node)
        running = asyncio.create_task(tokens_of(node.submit("m", request("running", max_tokens=200))))
        queued = asyncio.create_task(tokens_of(node.submit("m", request("queued"))))
        await until(lambda: node.model("m").load.waiting == 1)
        closing = asyncio.create_task(node.close())
        with pytest.raises(ShuttingDown):
            await asyncio.wait_for(queued, WAIT_S)
        assert not running.done()
        with pytest.raises(ShuttingDown):
            node.submit("m", request("late"))
        with pytest.raises(ShuttingDown):
            await load(node)
        assert node.health().status == "draining"
        assert len(await running) == 200
        await closing
        assert not alive(worker)


async def test_close_is_bounded_and_leaves_no_process(tmp_path: Path) -> None:
    config = {**models(tmp_path, m={}, slow={"load": "hang"}), "drain_s": 0.2}
    async with running_node(tmp_path, config, timeouts=WorkerTimeouts(unload_s=1.0)) as node:
        await load(node)
        worker = worker_of(node)
        endless = asyncio.create_task(tokens_of(node.submit("m", request(max_tokens=10**6))))
        loading = asyncio.create_task(load(node, "slow"))
        await until(lambda: (p := node.model("slow").progress) is not None and p.stage == "read")
        await asyncio.wait_for(node.close(), WAIT_S)
        for task in (endless, loading):
            with pytest.raises(ShuttingDown):
                await task
        assert not alive(worker)
        assert worker_of(node) is None
