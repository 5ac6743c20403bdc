"""A node whose device is too small for a mixture: the load leaves weights to host memory, within one budget."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from faulty_models import running_node, write_model

from cortex.neuron.engine.memory.host import HostMemory
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState

from ....waiting import until
from ..node_calls import load, worker_of

MIB = 1 << 20
MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "head_dim": 64,
}
"""192 MiB of experts in float32, and a few of other weights."""
LARGE = HostMemory(4096 * MIB, 4096 * MIB)


def config(tmp_path: Path, memory_mb: int = 110, names: tuple[str, ...] = ("m",), **limits: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"config": MIXTURE, "bytes": MIB}
    return {
        "models": [{"id": name, "source": str(write_model(tmp_path / name, **options))} for name in names],
        "devices": [{"index": 0, "memory_mb": memory_mb}],
        "harness": {"torch": {"hf_cache": str(tmp_path / "hub"), "dtype": "float32"}},
        "limits": {"min_free_vram_mb": 0, **limits},
    }


async def test_load_leaves_what_the_device_lacks_to_the_host_and_reports_it(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path), read_host=lambda: LARGE) as node:
        status = await load(node)
        assert status.state is ModelState.READY
        assert status.host_splits is not None
        assert status.estimate_bytes is not None
        lacking = status.estimate_bytes - 110 * MIB
        assert lacking < status.host_bytes < status.host_splits.splits[-1].host_bytes
        host = node.health().host
        assert host is not None
        assert host.weight_bytes == status.host_bytes
        assert host.budget_bytes > host.weight_bytes
        await node.unload(UnloadRequest(model_id="m"))
        assert node.health().host.weight_bytes == 0  # type: ignore[union-attr]


async def test_model_that_fits_leaves_nothing_to_the_host(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, memory_mb=900), read_host=lambda: LARGE) as node:
        assert (await load(node)).host_bytes == 0


@pytest.mark.parametrize(("host_mb", "is_divided"), [(None, True), (8, False)])
async def test_model_that_fits_only_with_a_short_context_reports_the_one_that_host_memory_gives_it(
    tmp_path: Path, host_mb: int | None, is_divided: bool
) -> None:
    async with running_node(tmp_path, config(tmp_path, memory_mb=900), read_host=lambda: LARGE) as node:
        whole = (await load(node)).contexts
    assert whole is not None
    between_mb = (whole.sizes[0].num_bytes + whole.sizes[-1].num_bytes) // 2 >> 20
    settings = config(tmp_path, between_mb, host_mb=host_mb)
    async with running_node(tmp_path, settings, read_host=lambda: LARGE) as node:
        status = await load(node)
        assert status.contexts is not None
        assert (status.host_bytes > 0) is is_divided
        assert (status.contexts.empty_tokens == whole.wanted_tokens) is is_divided
        assert status.contexts.empty_tokens >= 256


@pytest.mark.parametrize(
    ("entry", "limits", "reason"),
    [
        ({"host_weights": "off"}, {}, "too small even when empty|memory_mb"),
        ({"host_weights": 64}, {}, r"and 64 MiB are allowed for weights"),
        (
            {},
            {"host_mb": 64},
            r"m needs \d+ MiB of host memory in addition to its device, but models may take 64 MiB more",
        ),
        ({"deterministic": True}, {}, "memory_mb"),
    ],
)
async def test_load_is_rejected_with_the_bytes_where_the_entry_or_the_host_does_not_allow_it(
    tmp_path: Path, entry: dict[str, Any], limits: dict[str, Any], reason: str
) -> None:
    settings = config(tmp_path, **limits)
    settings["models"][0] |= entry
    async with running_node(tmp_path, settings, read_host=lambda: LARGE) as node:
        with pytest.raises(InsufficientCapacity, match=reason):
            await load(node)
        assert node.health().host.weight_bytes == 0  # type: ignore[union-attr]


async def test_limit_of_the_model_itself_divides_it_too(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, memory_mb=900), read_host=lambda: LARGE) as node:
        status = await node.load(LoadRequest(model_id="m", max_bytes=110 * MIB), wait=True)
        assert status.host_bytes > 0


async def test_killed_worker_gives_its_host_bytes_back_and_the_model_is_divided_again(tmp_path: Path) -> None:
    async with running_node(tmp_path, config(tmp_path, host_mb=250), read_host=lambda: LARGE) as node:
        before = (await load(node)).host_bytes
        os.kill(worker_of(node), signal.SIGKILL)
        await until(lambda: node.model("m").state is not ModelState.READY)
        await until(lambda: node.model("m").state is ModelState.READY)
        assert node.model("m").host_bytes == before
        assert node.health().host.weight_bytes == before  # type: ignore[union-attr]


async def test_failed_load_gives_the_host_memory_back(tmp_path: Path) -> None:
    settings = config(tmp_path)
    write_model(tmp_path / "m", config=MIXTURE, load="refuse")
    async with running_node(tmp_path, settings, read_host=lambda: LARGE) as node:
        with pytest.raises(LoadFailed):
            await load(node)
        assert node.host.free_bytes("other") == node.health().host.budget_bytes  # type: ignore[union-attr]


async def test_host_that_runs_short_is_reported_and_the_model_stays(tmp_path: Path) -> None:
    host = [LARGE]
    async with running_node(tmp_path, config(tmp_path), read_host=lambda: host[0]) as node:
        await load(node)
        host[0] = HostMemory(4096 * MIB, 100 * MIB)
        await until(lambda: node.health().host.shortage)  # type: ignore[union-attr]
        assert node.model("m").state is ModelState.READY
        host[0] = LARGE
        await until(lambda: not node.health().host.shortage)  # type: ignore[union-attr]


DENSE = {"model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 4096, "head_dim": 64}


@pytest.mark.parametrize("host_weights", [None, "off", "auto", 4096, 8])
async def test_dense_model_is_divided_only_if_its_entry_says_so(tmp_path: Path, host_weights: str | int | None) -> None:
    settings = config(tmp_path, memory_mb=120)
    settings["models"][0]["source"] = str(write_model(tmp_path / "dense", config=DENSE, bytes=MIB))
    if host_weights is not None:
        settings["models"][0]["host_weights"] = host_weights
    async with running_node(tmp_path, settings, read_host=lambda: LARGE) as node:
        if host_weights in ("auto", 4096):
            status = await load(node)
            assert status.host_bytes > 64 * MIB
            assert status.host_splits is not None
            assert not status.host_splits.is_last_resort
            assert status.host_splits.splits[0].tokens_per_s > 0
            return
        with pytest.raises(InsufficientCapacity) as rejected:
            await load(node)
        assert ('with host_weights = "auto"' in rejected.value.message) == (host_weights is None)
        splits = node.model("m").host_splits
        assert (splits is not None and splits.is_last_resort) == (host_weights is None)
