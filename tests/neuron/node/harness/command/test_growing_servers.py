"""Servers that take more memory as they serve: counted, reported, and remembered by what is usual."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from faulty_models import running_node

from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.harness.command.estimates import (
    MAX_AGE_S,
    CommandEstimates,
    ServedFiles,
    ServerSizes,
    SizeOfModel,
    quantile,
)
from cortex.neuron.node.harness.command.host import ServerTimes
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.node import Node
from cortex.neuron.servers.entry import HarnessEntry
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import Device

from .....waiting import WAIT_S, until
from ....api.served import served
from .commands import START, config

MIB = 1 << 20
OFTEN = ServerTimes(watch_s=0.02)
MODEL = KnownModel(id="m", source="m")
FACTS = ServedFiles(Path(), "fake", "", 0, 0, 1)


def estimates(clock: Any = None, **entry: Any) -> CommandEstimates:
    sizes = ServerSizes() if clock is None else ServerSizes(clock)
    return CommandEstimates(NeuronConfig(), HarnessEntry(name="fake", cmd=START, **entry), sizes)


def held_mb(node: Node) -> float:
    return (node.model("m").measured_bytes or 0) / MIB


async def grow(node: Node, size_mb: int) -> None:
    async with (
        served(node) as (host, port),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session,
        session.post(
            f"http://{host}:{port}/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": f"grow {size_mb}"}]},
        ) as response,
    ):
        assert response.status == 200, await response.text()
        assert json.loads(await response.text())


async def test_growth_is_counted_reported_and_does_not_lock_the_model_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config() | {"limits": {"memory_mb": 100}}
    async with running_node(tmp_path, settings, server_times=OFTEN) as node:
        await node.load(LoadRequest(model_id="m"), wait=True)
        assert held_mb(node) < 100
        with caplog.at_level(logging.WARNING):
            await grow(node, 200)
            await until(lambda: held_mb(node) > 150)
            await until(lambda: "limits.memory_mb is 100 MiB" in caplog.text)
        assert "m (fake): the server has grown to " in caplog.text
        await node.unload(UnloadRequest(model_id="m"))
        status = node.model("m")
        assert (status.least_bytes or 0) < 100 * MIB
        assert (status.estimate_bytes or 0) <= 100 * MIB, "no more than it may have"
        await node.load(LoadRequest(model_id="m"), wait=True)


async def test_memory_that_a_server_gives_back_is_not_counted_any_more(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(), server_times=OFTEN) as node:
        await node.load(LoadRequest(model_id="m"), wait=True)
        await grow(node, 100)
        await until(lambda: held_mb(node) > 70)
        await grow(node, 0)
        await until(lambda: held_mb(node) < 60)


async def test_sizes_are_forgotten_on_request(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(memory_mb=1)) as node:
        await node.load(LoadRequest(model_id="m"), wait=True)
        await node.unload(UnloadRequest(model_id="m"))
        assert (node.model("m").estimate_bytes or 0) > MIB
        assert node.forget_size("m").estimate_bytes == MIB
        assert node.model("m").estimate_bytes == MIB


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([], 0), ([5], 5), ([9, 1], 9), ([1, 1, 1, 9], 1), ([4, 3, 2, 1], 3), ([1] * 9 + [5] * 3, 1)],
)
def test_quantile_is_the_least_that_most_do_not_exceed(sizes: list[int], expected: int) -> None:
    assert quantile(sizes) == expected


def test_a_model_needs_what_its_servers_start_with_and_takes_what_they_hold() -> None:
    known = estimates(memory_mb=10)
    size, card = SizeOfModel(known, MODEL, FACTS), Device(index=0, kind="cuda", name="card", total_bytes=8 << 30)
    for _ in range(4):
        assert size.started(60 * MIB) == 60 * MIB
        size.ran(842 * MIB)
    assert known.least_bytes(MODEL, FACTS, card) == 60 * MIB
    assert known.expected_bytes(MODEL, FACTS, card) == 842 * MIB
    small = Device(index=0, kind="cuda", name="card", total_bytes=1500 * MIB)
    usable = known.reserve(small).usable_bytes(small.total_bytes)
    assert known.expected_bytes(MODEL, FACTS, small) == usable < 842 * MIB, "what the device can give"


def test_one_unusual_run_does_not_decide_and_none_counts_for_ever() -> None:
    now = 0.0
    known = estimates(clock=lambda: now, memory_mb=10)
    size = SizeOfModel(known, MODEL, FACTS)
    size.ran(842 * MIB)
    assert known.whole_bytes(MODEL, FACTS) == 842 * MIB
    for _ in range(3):
        size.ran(60 * MIB)
    assert known.whole_bytes(MODEL, FACTS) == 60 * MIB
    now = MAX_AGE_S + 1
    assert known.whole_bytes(MODEL, FACTS) == 10 * MIB
