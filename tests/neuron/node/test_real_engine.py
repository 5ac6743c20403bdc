"""A node with the real engine, on small random models."""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_models import parts
from lasting_workers import lasting_workers

from cortex.neuron.api.access import NodeAccess, NodeKeys
from cortex.neuron.config import Limits, ModelEntry, NeuronConfig
from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.store import ChosenBlocks
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.node.memory.kv_exchange import ExchangeRules
from cortex.neuron.node.node import Node
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.factory import WorkerFactory
from cortex.wire.errors import InvalidValue, Recovering
from cortex.wire.node.kv_blocks import SCOPE
from cortex.wire.node.neighbours import Neighbour, key_hash, new_ticket
from cortex.wire.node.orders import UnloadRequest
from cortex.wire.node.protocol import ModelState

from ...waiting import until
from ..api.served import served
from ..generations import Reader
from .node_calls import converse, generate, load, tokens_of, worker_bytes, worker_of, write_source

MEBIBYTE = 1 << 20


async def start(
    tmp_path: Path, workers: WorkerFactory, exchange_rules: ExchangeRules | None = None, **limits: Any
) -> Node:
    # The models differ in size, so that one cannot reuse exactly the memory of the other.
    models = (
        ModelEntry(id="a", source=write_source(tmp_path / "a", seed=1), context_tokens=512),
        ModelEntry(id="b", source=write_source(tmp_path / "b", seed=2, vocab_size=40_000), context_tokens=512),
    )
    config = NeuronConfig(models=models, limits=Limits(max_num_seqs=8, **limits), drain_s=1.0)
    others = {} if exchange_rules is None else {"exchange_rules": exchange_rules}
    real = parts(make_workers=lambda: workers, timeouts=None, policy=BackoffPolicy(), **others)
    return await Node.start(config, real)


async def test_killed_worker_recovers_and_the_model_generates_the_same(tmp_path: Path, workers: WorkerFactory) -> None:
    node = await start(tmp_path, workers)
    try:
        await load(node, "a")
        first = await generate(node, "a")
        assert len(first) == 8
        stream = Reader(node.generate("a", EngineRequest(id="long", prompt=(1, 2, 3), max_tokens=400)))
        await anext(stream)
        os.kill(worker_of(node), signal.SIGKILL)
        with pytest.raises(Recovering):
            async for _ in stream:
                pass
        assert (await load(node, "a")).state is ModelState.READY
        assert await generate(node, "a") == first
    finally:
        await node.close()


async def test_invalid_parameters_end_only_their_own_requests(tmp_path: Path, workers: WorkerFactory) -> None:
    """Sent to the node directly: the API would reject them."""
    node = await start(tmp_path, workers)
    invalid = [
        SamplingParams(temperature=math.nan),
        SamplingParams(temperature=1e39),
        SamplingParams(repetition_penalty=0.0),
        SamplingParams(logit_bias=((1, math.inf),)),
        SamplingParams(top_logprobs=-1),
    ]
    try:
        await load(node, "a")
        stream = Reader(node.generate("a", EngineRequest(id="live", prompt=(1, 2, 3), max_tokens=60)))
        num_tokens = sum(len(output.tokens) for output in await anext(stream))
        for number, params in enumerate(invalid):
            request = EngineRequest(id=f"params {number}", prompt=(4, 5), max_tokens=5, sampling=params)
            with pytest.raises(InvalidValue):
                async for _ in Reader(node.generate("a", request)):
                    pass
        huge = SamplingParams(top_k=2**63 - 1, repetition_window=2**63 - 1, repetition_penalty=1.1)
        request = EngineRequest(id="huge", prompt=(4, 5), max_tokens=5, sampling=huge)
        assert sum([len(output.tokens) async for batch in Reader(node.generate("a", request)) for output in batch]) == 5
        async for batch in stream:
            num_tokens += sum(len(output.tokens) for output in batch)
        assert num_tokens == 60
        assert node.model("a").state is ModelState.READY
    finally:
        await node.close()


async def cycle(node: Node, times: int, held_bytes: Callable[[], int]) -> list[int]:
    """Loads, runs and unloads the two models in turn. Returns the bytes held after each pair."""
    held = []
    for _ in range(times):
        for model_id in ("a", "b"):
            status = await load(node, model_id)
            assert status.measured_bytes
            await generate(node, model_id)
            await node.unload(UnloadRequest(model_id=model_id))
        held.append(held_bytes())
    return held


async def test_load_cycles_of_two_models_do_not_leak_host_memory(tmp_path: Path, workers: WorkerFactory) -> None:
    node = await start(tmp_path, workers)
    try:
        held = await cycle(node, 6, lambda: worker_bytes(node))
        assert held[-1] - held[2] < 40 * MEBIBYTE
    finally:
        await node.close()


async def sleep_and_wake(node: Node, times: int, held_bytes: Callable[[], int]) -> list[int]:
    """Puts the two models to sleep and wakes them in turn. Returns the bytes held while both sleep."""
    held = []
    await load(node, "a")
    await load(node, "b")
    expected = [await generate(node, model_id) for model_id in ("a", "b")]
    for _ in range(times):
        for model_id in ("a", "b"):
            status = await node.unload(UnloadRequest(model_id=model_id, sleep=True))
            assert status.state is ModelState.ASLEEP
            assert status.host_bytes > 0
        held.append(held_bytes())
        for model_id in ("a", "b"):
            assert (await load(node, model_id)).state is ModelState.READY
        assert [await generate(node, model_id) for model_id in ("a", "b")] == expected
    return held


async def test_sleep_cycles_keep_the_output_and_do_not_leak_host_memory(tmp_path: Path, workers: WorkerFactory) -> None:
    node = await start(tmp_path, workers, host_mb=256, sleep_mb=256, kv_host_mb=256)
    left: list[int] = []

    def held_bytes() -> int:
        left.append(node.devices.kv_host.limit_bytes)
        return worker_bytes(node)

    try:
        held = await sleep_and_wake(node, 6, held_bytes)
        assert held[-1] - held[2] < 40 * MEBIBYTE
        assert max(left) < 256 * MEBIBYTE == node.devices.kv_host.limit_bytes, "woken models leave all of it to pages"
    finally:
        await node.close()


async def test_conversation_survives_the_unload_of_its_model_until_its_memory_is_needed(
    tmp_path: Path, workers: WorkerFactory
) -> None:
    node = await start(tmp_path, workers, kv_host_mb=64)
    try:
        node.devices.kv_host.give_way(0)  # sleeping models have all of the budget
        await load(node, "a")
        node.devices.kv_host.give_way(64 * MEBIBYTE)  # they have woken
        tokens, cached = await converse(node, "a", "first")
        assert cached == 0
        worker = worker_of(node)
        await node.unload(UnloadRequest(model_id="a"))
        assert node.health().devices[0].kv_host_bytes > 0
        kept = node.model("a").kv_host
        assert kept is not None, "reported before the unload has ended"
        assert kept.num_tokens == 192
        await load(node, "a")
        assert worker_of(node) == worker, "what is kept was not taken for memory that an unload did not free"
        assert await converse(node, "a", "again") == (tokens, 192)
        await until(lambda: (found := node.model("a").kv_host) is not None and found.tokens_per_s)
        node.devices.kv_host.give_way(0)
        await until(lambda: node.health().devices[0].kv_host_bytes == 0)
        assert node.model("a").kv_host is None
    finally:
        await node.close()


async def test_conversation_is_on_disk_when_the_node_has_stopped(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kv"
    limits: dict[str, Any] = {"kv_host_mb": 64, "kv_disk_mb": 64, "kv_disk_dir": folder}
    node = await start(tmp_path, lasting_workers(), **limits)
    try:
        await load(node, "a")
        tokens, _ = await converse(node, "a", "first")
    finally:
        await node.close()
    (path,) = folder.rglob("*.kv")
    assert block_files.read_header(path).model_id == "a"
    assert len(block_files.read_header(path).digests) == 6
    node = await start(tmp_path, lasting_workers(), **limits)
    try:
        await load(node, "a")
        await until(lambda: (kept := node.model("a").kv_host) is not None and kept.num_tokens == 192)
        assert (await converse(node, "a", "again"))[0] == tokens
        assert (await node.kv.forget(ChosenBlocks("a", (bytes(8),))))[0] == 1
        await until(lambda: node.model("a").kv_host is None)
    finally:
        await node.close()
    assert not list(folder.rglob("*.kv")), "what was in memory is not written again"


async def test_node_gets_the_kv_that_another_one_has_computed(tmp_path: Path) -> None:
    rules = ExchangeRules(min_tokens=32, worth=1e9, avoid_s=0.0)  # a tiny model computes faster than any link
    key = "nk-a-key-of-the-node"
    folders = tmp_path / "kv a", tmp_path / "kv b"
    nodes = [
        await start(tmp_path, lasting_workers(), rules, kv_host_mb=64, kv_disk_mb=64, kv_disk_dir=each)
        for each in folders
    ]
    try:
        for node in nodes:
            await load(node, "a")
        tokens, _ = await converse(nodes[0], "a", "first")
        await until(lambda: nodes[1].engine_stats()["a"].prompt_token_s > 0)
        request = EngineRequest("r", tuple(number * 11 % 250 + 1 for number in range(200)), 4)
        async with served(nodes[0], access=NodeAccess(NodeKeys([key]))) as (host, port):
            url = f"http://{host}:{port}"
            foreign = Neighbour(name="a", url=url, ticket=new_ticket(key_hash("another key"), SCOPE, time.time()))
            await nodes[1].fetch_kv("a", request, foreign)
            assert not list(folders[1].rglob("*.kv")), "it needs a ticket"
            source = Neighbour(name="a", url=url, ticket=new_ticket(key_hash(key), SCOPE, time.time()))
            await nodes[1].fetch_kv("a", request, source)
        (path,) = folders[1].rglob("*.kv")
        assert len(block_files.read_header(path).digests) == 6
        await until(lambda: (kept := nodes[1].model("a").kv_host) is not None and kept.num_tokens == 192)
        assert (await converse(nodes[1], "a", "again"))[0] == tokens
    finally:
        for node in nodes:
            await node.close()


async def test_conversation_takes_its_kv_along_to_another_device_of_its_node(tmp_path: Path) -> None:
    source, folder = write_source(tmp_path / "a", seed=1), tmp_path / "kv"
    limits = Limits(max_num_seqs=32, kv_host_mb=64, kv_disk_mb=64, kv_disk_dir=folder)
    model = ModelEntry(id="a", source=source, context_tokens=2048, replicas=2)
    rules = ExchangeRules(min_tokens=32, worth=1e9)  # a tiny model computes faster than any disk
    real = parts(make_workers=lasting_workers, timeouts=None, policy=BackoffPolicy(), exchange_rules=rules)
    node = await Node.start(NeuronConfig(models=(model,), limits=limits, cpu_devices=2, drain_s=1.0), real)
    prompt = tuple(number * 11 % 250 + 1 for number in range(1500))
    greedy = SamplingParams(temperature=0.0)
    try:
        await load(node, "a")
        first = await tokens_of(node.generate("a", EngineRequest("first", prompt, 8, greedy)))
        await until(lambda: node.engine_stats()["a"].prompt_token_s > 0)
        assert not list(folder.rglob("*.kv"))
        readers = [
            Reader(node.generate("a", EngineRequest(str(number), prompt, 8, greedy))) for number in range(24)
        ]  # more than are worth waiting for where the prompt was computed
        assert [await tokens_of(reader) for reader in readers] == [first] * 24
        assert sum(len(block_files.read_header(path).digests) for path in folder.rglob("*.kv")) == 1500 // 32
    finally:
        await node.close()


@pytest.mark.gpu
async def test_sleeping_models_free_the_device(tmp_path: Path, workers: WorkerFactory) -> None:
    from cortex.neuron.worker.discovery import read_devices

    node = await start(tmp_path, workers)  # with the default budget of a node with a GPU
    try:
        devices = node.discovery.devices
        held = await sleep_and_wake(node, 20, lambda: devices[0].total_bytes - read_devices(devices)[0].free_bytes)
        assert held[-1] - held[1] < 16 * MEBIBYTE
        assert held[-1] < 4096 * MEBIBYTE, "the context and the libraries, not the models"
    finally:
        await node.close()


@pytest.mark.gpu
async def test_load_cycles_of_two_models_do_not_leak_device_memory(tmp_path: Path, workers: WorkerFactory) -> None:
    from cortex.neuron.worker.discovery import read_devices

    node = await start(tmp_path, workers)
    try:
        devices = node.discovery.devices
        held = await cycle(node, 50, lambda: devices[0].total_bytes - read_devices(devices)[0].free_bytes)
        assert held[-1] - held[1] < 16 * MEBIBYTE
    finally:
        await node.close()
