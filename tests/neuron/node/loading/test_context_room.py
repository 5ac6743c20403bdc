"""Contexts on a node that decides by itself: what is unloaded for them, and models that grow when there is room."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from faulty_models import parts

from cortex.neuron.config import DefaultModel, HarnessSettings, Limits, ModelEntry, NeuronConfig, TorchHarness
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.node.loading.context_allocator import ContextRules, growth, victims
from cortex.neuron.node.memory.ceilings import ModelHolding
from cortex.neuron.node.models import IdleModel
from cortex.neuron.node.node import Node
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.factory import WorkerFactory
from cortex.wire.errors import InsufficientCapacity
from cortex.wire.node.contexts import ContextSize, ContextSizes
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState, ModelStatus

from ....waiting import until
from ..node_calls import generate, load, tokens_of, write_source

FULL, SHORTER = 131_072, 73_728
EAGER = ContextRules(min_idle_s=0.0, check_s=0.05, num_checks=2)
IN_FLOAT32 = HarnessSettings(torch=TorchHarness(dtype="float32"))
"""On every CPU, so that sizes are the same."""
CONTEXTS = ContextSizes(
    limit_tokens=FULL,
    full_tokens=FULL,
    wanted_tokens=32_768,
    empty_tokens=FULL,
    full_bytes=1 << 30,
    sizes=(ContextSize(tokens=FULL, num_bytes=1 << 30),),
)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (4480, [131_072, 65_536, 32_768, 16_384]),
        (20_000, [131_072, 65_536, 32_768]),
        (32_768, [131_072]),
        (31_000, [131_072]),
        (100_000, [131_072]),
        (125_000, []),
        (131_072, []),
    ],
)
def test_model_grows_to_its_full_context_or_to_much_more_than_too_little(tokens: int, expected: list[int]) -> None:
    assert growth(CONTEXTS, tokens) == expected


@pytest.mark.parametrize(
    ("sizes", "missing", "expected"),
    [([3, 5, 2], 0, []), ([3, 5, 2], 3, [3]), ([3, 5, 2], 4, [5]), ([3, 5, 2], 9, [3, 5, 2]), ([3, 5, 2], 11, None)],
)
async def test_least_recently_used_models_are_unloaded_and_no_more_than_needed(
    sizes: list[int], missing: int, expected: list[int] | None
) -> None:
    idle = [
        cast(IdleModel, SimpleNamespace(holding=ModelHolding(str(number), (0,), (size,))))
        for number, size in enumerate(sizes)
    ]

    async def fits(leaving: Sequence[IdleModel]) -> bool:
        return sum(each.holding.num_bytes for each in leaving) >= missing

    found = await victims(idle, fits)
    assert expected == (None if found is None else [each.holding.num_bytes for each in found])


@asynccontextmanager
async def running(
    tmp_path: Path, workers: WorkerFactory, rules: ContextRules = EAGER, *, keeps: str = ""
) -> AsyncIterator[Node]:
    """A node with room for a full context of `long`, 75 MiB, or for four of `other`, 149 MiB. `keeps`: which of the two
    it loads when it starts."""
    source = write_source(tmp_path, seed=1, vocab_size=96, max_position_embeddings=FULL)
    config = NeuronConfig(
        models=(
            ModelEntry(id="long", source=source),
            ModelEntry(id="other", source=source, context_tokens=SHORTER),
        ),
        default_models=(DefaultModel(id=keeps),) if keeps else (),
        limits=Limits(max_num_seqs=4, memory_mb=160),
        harness=IN_FLOAT32,
        drain_s=1.0,
    )
    changes: dict[str, Any] = {"timeouts": None, "policy": BackoffPolicy(), "context_rules": rules}
    node = await Node.start(config, parts(make_workers=lambda: workers, **changes))
    try:
        yield node
    finally:
        await node.close()


def context(status: ModelStatus) -> int:
    return status.context_tokens or 0


async def test_idle_model_is_unloaded_for_the_context_of_another(tmp_path: Path, workers: WorkerFactory) -> None:
    async with running(tmp_path, workers) as node:
        assert context(await load(node, "other")) == SHORTER
        assert context(await load(node, "long")) == FULL
        assert node.model("other").state is ModelState.COLD
        assert await generate(node, "long")


async def test_model_that_was_just_used_stays_and_leaves_what_there_is(
    tmp_path: Path, workers: WorkerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, workers, ContextRules(min_idle_s=1000.0)) as node:
        await load(node, "other")
        status = await load(node, "long")
        assert context(status) < status.contexts.wanted_tokens  # type: ignore[union-attr]
        assert node.model("other").state is ModelState.READY
        reason = f"context limited to {context(status):,} of 131,072 tokens by memory"
        assert status.context_shortage == reason
        assert ("WARNING", f"long: {reason}") in [(each.levelname, each.getMessage()) for each in caplog.records]


async def test_load_of_a_gateway_evicts_nothing_and_gets_no_less_than_it_asks_for(
    tmp_path: Path, workers: WorkerFactory
) -> None:
    async with running(tmp_path, workers) as node:
        await load(node, "other")
        asks = LoadRequest(model_id="long", min_context_tokens=30_720)
        with pytest.raises(InsufficientCapacity, match=r"needs at least \d+ MiB for a context of 30,720 tokens"):
            await node.load(asks, wait=True)
        assert node.model("other").state is ModelState.READY
        await node.unload(UnloadRequest(model_id="other"))
        assert context(await node.load(asks, wait=True)) == FULL


async def test_context_of_an_earlier_load_is_not_that_of_the_next_one(tmp_path: Path, workers: WorkerFactory) -> None:
    async with running(tmp_path, workers) as node:
        loaded = await node.load(LoadRequest(model_id="long", context_tokens=2048), wait=True)
        assert (loaded.context_tokens, loaded.full_context_tokens) == (2048, 2048)
        await node.unload(UnloadRequest(model_id="long"))
        cold = node.model("long")
        assert (cold.full_context_tokens, cold.context_tokens) == (FULL, FULL)
        longer = await load(node, "long")
        assert (context(longer), longer.estimate_bytes) == (FULL, cold.estimate_bytes)


async def test_limit_of_a_load_is_not_that_of_the_next_one(tmp_path: Path, workers: WorkerFactory) -> None:
    async with running(tmp_path, workers) as node:
        await until(lambda: node.model("long").contexts)
        before = node.model("long").contexts
        loaded = await node.load(LoadRequest(model_id="long", max_bytes=20 << 20), wait=True)
        assert context(loaded) < FULL
        assert before is not None
        assert loaded.contexts is not None
        assert loaded.contexts.empty_tokens == before.empty_tokens == FULL
        cold = await node.unload(UnloadRequest(model_id="long"))
        assert cold.contexts == before


async def test_empty_device_bounds_what_a_load_may_ask_for(tmp_path: Path, workers: WorkerFactory) -> None:
    source = write_source(tmp_path, seed=1, vocab_size=96, max_position_embeddings=FULL)
    config = NeuronConfig(
        models=(ModelEntry(id="m", source=source),),
        limits=Limits(max_num_seqs=4, memory_mb=16),
        harness=IN_FLOAT32,
        drain_s=1.0,
    )
    node = await Node.start(config, parts(make_workers=lambda: workers, timeouts=None))
    try:
        status = await node.load(LoadRequest(model_id="m", min_context_tokens=FULL), wait=True)
        assert 16_384 < context(status) < 32_768
    finally:
        await node.close()


async def test_model_that_got_too_little_grows_when_there_is_room_and_no_request(
    tmp_path: Path, workers: WorkerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(tmp_path, workers, keeps="other") as node:
        await until(lambda: node.model("other").state is ModelState.READY)
        short = context(await node.load(LoadRequest(model_id="long", min_context_tokens=1), wait=True))
        assert short < 32_768
        request = EngineRequest(id="r", prompt=(1, 2, 3), max_tokens=300)
        stream = tokens_of(node.generate("long", request))
        await node.unload(UnloadRequest(model_id="other"))
        assert len(await stream) == 300, "a request is not disturbed"
        await until(lambda: context(node.model("long")) == FULL and node.model("long").state is ModelState.READY)
        assert await generate(node, "long")
        grown = [each for each in caplog.messages if "loaded again" in each]
        assert grown == [f"long: loaded again for a context of 131072 tokens instead of {short}"]


async def test_model_does_not_grow_while_the_room_is_taken(tmp_path: Path, workers: WorkerFactory) -> None:
    async with running(tmp_path, workers, keeps="other") as node:
        await until(lambda: node.model("other").state is ModelState.READY)
        before = await load(node, "long")
        assert before.context_shortage is not None
        room = node._context_room  # noqa: SLF001 - what it would do next, without a wait for what must not happen
        (idle,) = [each for each in node._models.idle() if each.holding.model_id == "long"]  # noqa: SLF001
        assert await room._target(idle, context(before)) is None  # noqa: SLF001
        assert context(node.model("long")) == context(before)


async def test_ordered_load_starts_afresh_after_a_reload(tmp_path: Path, workers: WorkerFactory) -> None:
    """A shorter context after it is no failure of that reload, for which growth would pause."""
    async with running(tmp_path, workers) as node:
        ordered = LoadRequest(model_id="long", min_context_tokens=1)
        for _ in range(2):
            await node.load(LoadRequest(model_id="other", min_context_tokens=1), wait=True)
            assert context(await node.load(ordered, wait=True)) < 32_768
            await node.unload(UnloadRequest(model_id="other"))
            await until(lambda: context(node.model("long")) == FULL and node.model("long").state is ModelState.READY)
            await node.unload(UnloadRequest(model_id="long"))
