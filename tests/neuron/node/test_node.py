"""A whole node with real workers and an engine that fails on demand."""

import asyncio
import contextlib
import os
import signal
import time

import faulty_engine
import faulty_models
import pytest
from faulty_models import running_node, write_model

from cortex.neuron.engine.memory.host import anonymous_bytes
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.weights.errors import HubUnreachable
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

WAIT_S = 30.0
"""How long tests wait for what must happen; only reached on failure."""


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


async def answer(generation):
    return [token async for batch in generation for output in batch for token in output.tokens]


async def load(node, model_id="m", **fields):
    return await node.load(LoadRequest(model_id=model_id, **fields), wait=True)


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def worker_of(node):
    return node._supervisors[0].process_id


def alive(process_id):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, 0)
        return True
    return False


async def test_load_answer_unload(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={"bytes": 1 << 20})) as node:
        assert node.model("m").state is ModelState.COLD
        assert node.health().devices[0].worker == "none"
        status = await load(node)
        assert (status.state, status.family, status.devices) == (ModelState.READY, "llama", (0,))
        assert status.measured_bytes >= 1 << 20
        assert status.context_tokens == faulty_engine.CONTEXT_TOKENS
        assert status.capabilities.tools
        assert await answer(node.submit("m", request())) == [1, 2, 3, 4, 5]
        status = await node.unload(UnloadRequest(model_id="m"))
        assert (status.state, status.measured_bytes) == (ModelState.COLD, None)
        with pytest.raises(Overloaded, match="not loaded"):
            node.submit("m", request())


async def test_unknown_models_are_not_found_with_near_misses(tmp_path):
    async with running_node(tmp_path, models(tmp_path, qwen={})) as node:
        for ask in (lambda: node.model("qwem"), lambda: node.submit("qwem", request())):
            with pytest.raises(ModelNotFound, match="did you mean qwen"):
                ask()
        with pytest.raises(ModelNotFound):
            await load(node, "qwem")
        with pytest.raises(ModelNotFound):
            await node.unload(UnloadRequest(model_id="qwem"))


async def test_a_directory_is_a_model_too(tmp_path):
    path = str(write_model(tmp_path / "somewhere"))
    async with running_node(tmp_path) as node:
        assert (await load(node, path)).state is ModelState.READY
        assert (await load(node, "short", source=path)).state is ModelState.READY


async def test_many_loads_of_one_model_are_one_load(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={"pieces": 10, "piece_s": 0.02})) as node:
        statuses = await asyncio.gather(*(load(node) for _ in range(5)))
        assert {status.state for status in statuses} == {ModelState.READY}
        assert len(node._supervisors[0]._models) == 1


async def test_loading_is_seen_with_progress_and_joined(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={"pieces": 30, "piece_s": 0.02})) as node:
        status = await node.load(LoadRequest(model_id="m"), wait=False)
        assert status.state is ModelState.LOADING
        with pytest.raises(Overloaded, match="loading"):
            node.submit("m", request())
        await until(lambda: (p := node.model("m").progress) is not None and p.stage == "read")
        await load(node)
        assert node.model("m").progress is None


@pytest.mark.parametrize(
    ("behaviour", "reason"), [({"load": "refuse"}, "of no use"), ({"load": "bug"}, "KeyError")], ids=["refused", "bug"]
)
async def test_a_failed_load_says_why_leaves_nothing_and_can_be_asked_again(tmp_path, behaviour, reason):
    async with running_node(tmp_path, models(tmp_path, m=behaviour)) as node:
        with pytest.raises(LoadFailed, match=reason):
            await load(node)
        status = node.model("m")
        assert status.state is ModelState.FAILED
        assert reason in status.reason
        assert not node._supervisors[0].has_models
        with pytest.raises(LoadFailed, match=reason):
            node.submit("m", request())
        write_model(tmp_path / "m")
        assert (await load(node)).state is ModelState.READY


async def test_preflight_refuses_before_any_worker_is_started(tmp_path):
    config = models(tmp_path, gpt={"config": {"model_type": "gpt2"}}, m={})
    (tmp_path / "empty").mkdir()
    async with running_node(tmp_path, config) as node:
        for model_id, fields, reason in (
            ("gpt", {}, "model_type 'gpt2'"),
            ("m", {"quant": "q4_k"}, "not quantised at load; for q4_k name a GGUF"),
            (str(tmp_path / "empty"), {}, "no \\*.safetensors"),
            ("m", {"devices": (7,)}, "device 7"),
            ("m", {"tensor_parallel": 2}, "tensor_parallel"),
            ("m", {"harness": "vllm"}, "no harness"),
        ):
            with pytest.raises(LoadFailed, match=reason):
                await load(node, model_id, **fields)
        assert worker_of(node) is None
        assert (await load(node)).state is ModelState.READY  # what a bad request asked for does not stick


async def test_what_does_not_fit_is_refused_with_need_and_have(tmp_path):
    config = {**models(tmp_path, m={}), "limits": {"min_free_vram_mb": 1 << 30}}
    async with running_node(tmp_path, config) as node:
        with pytest.raises(InsufficientCapacity, match="needs at least") as refused:
            await load(node)
        (row,) = refused.value.details["devices"]
        assert row["need_bytes"] > row["have_bytes"] == 0
        assert row["kept_free_bytes"] >= 1 << 50
        assert worker_of(node) is None


async def test_what_a_load_leaves_free_is_what_the_node_reports(tmp_path):
    """A gateway reckons with it: what it counts on is what the node gives."""
    async with running_node(tmp_path, {**models(tmp_path, m={}), "limits": {"min_free_vram_mb": 512}}) as node:
        (device,) = node.health().devices
        assert (device.kept_free_bytes, device.kept_free_share) == (512 << 20, 0.5)
        await until(lambda: node.model("m").estimate_bytes)
        assert node.model("m").least_bytes > 0


async def test_unloading_while_loading_calls_the_load_off(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={"pieces": 1000, "piece_s": 0.01})) as node:
        waiting = asyncio.create_task(load(node))
        await until(lambda: (p := node.model("m").progress) is not None and p.stage == "read")
        status = await asyncio.wait_for(node.unload(UnloadRequest(model_id="m")), WAIT_S)
        assert status.state is ModelState.COLD
        with pytest.raises(LoadFailed, match="unloaded while"):
            await waiting
        assert not node._supervisors[0].has_models


async def test_unloading_right_after_asking_to_load_is_not_stuck(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await node.load(LoadRequest(model_id="m"), wait=False)
        assert (await asyncio.wait_for(node.unload(UnloadRequest(model_id="m")), WAIT_S)).state is ModelState.COLD
        assert (await load(node)).state is ModelState.READY


async def test_an_unload_waits_for_running_requests_and_turns_new_ones_away(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={"step_s": 0.005})) as node:
        await load(node)
        running = asyncio.create_task(answer(node.submit("m", request(max_tokens=60))))
        await asyncio.sleep(0.05)
        unloading = asyncio.create_task(node.unload(UnloadRequest(model_id="m", drain_s=5)))
        await asyncio.sleep(0.05)
        assert node.model("m").state is ModelState.UNLOADING
        with pytest.raises(Overloaded):
            node.submit("m", request("late"))
        assert len(await running) == 60
        assert (await unloading).state is ModelState.COLD


async def test_a_forced_unload_overtakes_one_that_drains(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        running = asyncio.create_task(answer(node.submit("m", request(max_tokens=10**6))))
        await asyncio.sleep(0.05)
        patient = asyncio.create_task(node.unload(UnloadRequest(model_id="m", drain_s=60)))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(node.unload(UnloadRequest(model_id="m", force=True)), WAIT_S)
        assert (await asyncio.wait_for(patient, WAIT_S)).state is ModelState.COLD
        with pytest.raises(ShuttingDown):
            await running


async def test_asking_for_a_model_that_is_on_its_way_out_brings_it_back(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        keep = node.submit("m", request(max_tokens=10**6))
        unloading = asyncio.create_task(node.unload(UnloadRequest(model_id="m", drain_s=0.3)))
        await asyncio.sleep(0.05)
        assert (await load(node)).state is ModelState.READY
        await unloading
        assert await answer(node.submit("m", request("again"))) == [1, 2, 3, 4, 5]
        keep.cancel()


async def test_killed_mid_stream_time_after_time_it_answers_again_within_seconds(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        for _ in range(6):
            stream = node.submit("m", request("long", max_tokens=10**6))
            await anext(stream)
            os.kill(worker_of(node), signal.SIGKILL)
            with pytest.raises(Recovering):
                await answer(stream)
            with pytest.raises(Recovering):
                node.submit("m", request())
            await load(node)
            assert await answer(node.submit("m", request("short"))) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("token", [faulty_engine.DEVICE_FAULT, faulty_engine.HANG, faulty_engine.SEGFAULT])
async def test_a_device_fault_ends_streams_with_a_retryable_error_and_the_model_comes_back(tmp_path, token):
    async with running_node(tmp_path, models(tmp_path, m={}, other={})) as node:
        await load(node)
        await load(node, "other")
        innocent = node.submit("other", request("innocent", max_tokens=10**6))
        await anext(innocent)
        with pytest.raises(Recovering):
            await answer(node.submit("m", request("fatal", token)))
        with pytest.raises(Recovering):
            await answer(innocent)
        assert node.model("m").state is ModelState.RECOVERING
        await asyncio.gather(load(node), load(node, "other"))
        assert await answer(node.submit("m", request())) == [1, 2, 3, 4, 5]


async def test_a_fault_that_always_comes_back_ends_in_failed(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        write_model(tmp_path / "m", load="fault")
        os.kill(worker_of(node), signal.SIGKILL)
        await until(lambda: node.model("m").state is ModelState.RECOVERING)
        await until(lambda: node.model("m").state is ModelState.FAILED)
        assert "given up after" in node.model("m").reason
        write_model(tmp_path / "m")
        assert (await load(node)).state is ModelState.READY


async def test_errors_of_one_request_are_its_own(tmp_path):
    async with running_node(
        tmp_path,
        models(tmp_path, m={}),
    ) as node:
        await load(node)
        other = node.submit("m", request("other", max_tokens=300))
        first = await anext(other)
        with pytest.raises(InvalidValue, match="top_k"):
            await answer(node.submit("m", request("refused", faulty_engine.REFUSED)))
        with pytest.raises(Overloaded, match="out of memory"):
            await answer(node.submit("m", request("huge", faulty_engine.OUT_OF_MEMORY)))
        assert sum(len(output.tokens) for output in first) + len(await answer(other)) == 300
        with pytest.raises(PromptTooLongForMemory):
            await answer(node.submit("m", request("alone", faulty_engine.OUT_OF_MEMORY)))
        with pytest.raises(GenerationFailed, match="must match"):
            await answer(node.submit("m", request("buggy", faulty_engine.BUG)))
        assert node.model("m").state is ModelState.READY


async def test_prompts_that_are_too_long_are_refused_with_both_counts(tmp_path):
    config = {**models(tmp_path, m={}), "limits": {"max_prompt_tokens": 100}}
    async with running_node(tmp_path, config) as node:
        await load(node)
        with pytest.raises(ContextLengthExceeded, match="prompt is too long: 5000 tokens > 4095 maximum"):
            node.submit("m", EngineRequest(id="x", prompt=(1,) * 5000, max_tokens=1))
        with pytest.raises(PromptTooLongForMemory, match="101 tokens > 100"):
            node.submit("m", EngineRequest(id="x", prompt=(1,) * 101, max_tokens=1))


async def test_cancelled_requests_free_their_seat_in_every_phase(tmp_path):
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
        assert await answer(node.submit("m", request("next"))) == [1, 2, 3, 4, 5]


async def test_a_full_queue_is_overloaded_with_a_time_to_come_back(tmp_path):
    config = {**models(tmp_path, m={}), "limits": {"max_num_seqs": 1, "max_queue": 1}}
    async with running_node(tmp_path, config) as node:
        await load(node)
        first = node.submit("m", request("first", max_tokens=10**6))
        second = node.submit("m", request("second"))
        with pytest.raises(Overloaded) as refused:
            node.submit("m", request("third"))
        assert refused.value.retry_after_s >= 1
        first.cancel()
        assert await answer(second) == [1, 2, 3, 4, 5]


async def test_reads_are_quick_while_engines_are_saturated_and_loading(tmp_path):
    config = models(tmp_path, m={"step_s": 0.0}, slow={"pieces": 100, "piece_s": 0.01})
    async with running_node(tmp_path, config) as node:
        await load(node)
        started_s = time.monotonic()
        streams = [asyncio.create_task(answer(node.submit("m", request(f"s{n}", max_tokens=500)))) for n in range(64)]
        await node.load(LoadRequest(model_id="slow"), wait=False)
        read_s = []
        while not all(stream.done() for stream in streams):
            began_s = time.monotonic()
            await asyncio.sleep(0)
            node.health()
            node.models()
            read_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.005)
        # A read that waited for the engine would take as long as the streams. On a busy machine one in twenty is slow.
        assert sorted(read_s)[len(read_s) * 19 // 20] < (time.monotonic() - started_s) / 10
        assert {len(stream.result()) for stream in streams} == {500}


async def test_cycles_of_two_models_leave_the_memory_where_it_was(tmp_path):
    behaviour = {"bytes": 80 << 20}
    async with running_node(tmp_path, models(tmp_path, a=behaviour, b=behaviour)) as node:
        sizes = []
        for _ in range(6):
            for model_id in ("a", "b"):
                await load(node, model_id)
                await answer(node.submit(model_id, request()))
                await node.unload(UnloadRequest(model_id=model_id))
            sizes.append(anonymous_bytes(worker_of(node)))
        assert sizes[-1] - sizes[1] < 16 << 20


async def test_default_models_load_one_after_another_and_one_failure_does_not_stop_the_next(tmp_path):
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


async def test_a_boot_without_network_catches_up_later(tmp_path):
    path, attempts = write_model(tmp_path / "m"), []

    def fetch(source, cache, quant, progress, cancelled):
        attempts.append(source)
        if len(attempts) < 3:
            raise HubUnreachable("the hub does not answer")
        return path

    defaults = [{"model_id": "org/model"}]
    async with running_node(tmp_path, {"default_models": defaults}, fetch=fetch, find_local=lambda *_: None) as node:
        await until(lambda: node.health().activation.state == "done")
        assert node.health().activation.completed == ("org/model",)
        assert len(attempts) == 3


async def test_a_download_shows_its_progress_and_can_be_called_off(tmp_path):
    cancelled_seen = []

    def fetch(source, cache, quant, progress, cancelled):
        for done in range(1000):
            progress(done, 1000)
            time.sleep(0.01)
            if cancelled():
                cancelled_seen.append(True)
                raise HubUnreachable("called off")
        return tmp_path

    async with running_node(tmp_path, fetch=fetch, find_local=lambda *_: None) as node:
        await node.load(LoadRequest(model_id="org/model"), wait=False)
        await until(lambda: node.model("org/model").state is ModelState.DOWNLOADING)
        progress = node.model("org/model").progress
        assert (progress.stage, progress.total_bytes) == ("download", 1000)
        await asyncio.wait_for(node.unload(UnloadRequest(model_id="org/model")), WAIT_S)
        assert cancelled_seen == [True]


async def test_text_comes_without_loading_the_weights(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        one, two = await asyncio.gather(node.text("m"), node.text("m"))
        assert one is two
        assert node.model("m").state is ModelState.COLD
        assert worker_of(node) is None
        with pytest.raises(ModelNotFound):
            await node.text("unknown")


async def test_cold_models_show_what_they_will_need_and_their_tokenizers_are_not_made(tmp_path):
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
async def test_a_tokenizer_that_cannot_be_read_fails_the_load_and_nothing_stays_loaded(tmp_path, pieces):
    """Before the model is loaded or after it."""
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
        assert not node._supervisors[0].has_models
        broken = False
        await load(node, "n")


async def test_a_load_called_off_while_the_text_is_read_leaves_nothing(tmp_path):
    class SlowText(faulty_models.PlainText):
        async def read(self):
            self.closed = asyncio.Event()
            await self.closed.wait()
            raise Recovering("let go")

        async def close(self):
            self.closed.set()

    async with running_node(tmp_path, models(tmp_path, m={}), open_text=SlowText) as node:
        loading = asyncio.create_task(load(node, "m"))
        await until(lambda: node._supervisors[0].has_models)
        await asyncio.sleep(0.2)  # by now the worker has loaded it
        await node.unload(UnloadRequest(model_id="m"))
        with pytest.raises(LoadFailed, match="unloaded while"):
            await loading
        assert not node._supervisors[0].has_models


async def test_the_process_behind_a_text_rests_while_its_model_is_not_in_memory(tmp_path):
    told = []

    class WatchedText(faulty_models.PlainText):
        async def wake(self):
            told.append("wake")

        async def rest(self):
            told.append("rest")

        async def close(self):
            told.append("close")

    async with running_node(tmp_path, models(tmp_path, m={}), open_text=WatchedText) as node:
        for count in (1, 2):
            await load(node, "m")
            await node.unload(UnloadRequest(model_id="m"))
            assert told.count("wake") == count
            assert told[-1] == "rest"
    assert told[-1] == "close"


async def test_listeners_hear_of_every_state(tmp_path):
    async with running_node(tmp_path, models(tmp_path, m={"pieces": 10, "piece_s": 0.02})) as node:
        states = []

        async def listen():
            async for event in node.subscribe():
                if event.model is not None:
                    states.append(event.model.state.value)

        listener = asyncio.create_task(listen())
        await asyncio.sleep(0)
        await load(node)
        await until(lambda: states[-1:] == ["ready"])
        await node.unload(UnloadRequest(model_id="m"))
        await until(lambda: states[-1:] == ["cold"])
        assert list(dict.fromkeys(states)) == ["loading", "ready", "unloading", "cold"]
        await node.close()
        await asyncio.wait_for(listener, WAIT_S)


async def test_shutdown_fails_the_queue_at_once_and_drains_what_runs(tmp_path):
    config = {**models(tmp_path, m={"step_s": 0.005}), "limits": {"max_num_seqs": 1}}
    async with running_node(tmp_path, config) as node:
        await load(node)
        worker = worker_of(node)
        running = asyncio.create_task(answer(node.submit("m", request("running", max_tokens=200))))
        queued = asyncio.create_task(answer(node.submit("m", request("queued"))))
        await asyncio.sleep(0.05)
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


async def test_shutdown_is_bounded_and_leaves_no_process(tmp_path):
    config = {**models(tmp_path, m={}, slow={"load": "hang"}), "drain_s": 0.2}
    async with running_node(tmp_path, config) as node:
        await load(node)
        worker = worker_of(node)
        endless = asyncio.create_task(answer(node.submit("m", request(max_tokens=10**6))))
        loading = asyncio.create_task(load(node, "slow"))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(node.close(), WAIT_S)
        for task in (endless, loading):
            with pytest.raises(ShuttingDown):
                await task
        assert not alive(worker)
        assert worker_of(node) is None
