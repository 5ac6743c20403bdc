"""The default models of a node, and downloads from the hub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from faulty_models import running_node, write_model

from cortex.neuron.hub_process.resolver import FileSources
from cortex.neuron.node.loading.startup_models import StartupModels
from cortex.neuron.weights.errors import HubUnreachable
from cortex.wire.errors import LoadFailed
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState

from ....waiting import WAIT_S, until, wait_until


async def test_reports_why_a_default_model_failed_and_loads_the_others() -> None:
    async def load(model_id: str) -> None:
        if model_id == "broken":
            raise LoadFailed("the file has no header")
        if model_id == "buggy":
            raise KeyError("layers")

    startup = StartupModels(["broken", "buggy", "fine"], load, lambda: None)
    await startup.run()
    status = startup.status()
    assert (status.state, status.completed, status.failed) == ("done", ("fine",), ("broken", "buggy"))
    assert status.reasons == {"broken": "the file has no header", "buggy": "unexpected KeyError: 'layers'"}


async def test_failed_default_model_does_not_stop_the_next(tmp_path: Path) -> None:
    defaults = [
        {"id": "bad", "source": str(write_model(tmp_path / "bad", load="refuse"))},
        {"id": "good", "source": str(write_model(tmp_path / "good"))},
    ]
    async with running_node(tmp_path, {"default_models": defaults}) as node:
        assert node.health().activation.state == "running"
        await until(lambda: node.health().activation.state == "done")
        activation = node.health().activation
        assert (activation.completed, activation.failed, activation.pending) == (("good",), ("bad",), ())
        assert node.model("good").state is ModelState.READY


async def test_retries_default_models_until_the_hub_is_reachable(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m")
    attempts: list[str] = []

    def fetch(
        source: str,
        cache: Path,
        quant: str | None,
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
        sources: FileSources,
    ) -> Path:
        attempts.append(source)
        if len(attempts) < 3:
            raise HubUnreachable("the hub does not respond")
        return path

    defaults = [{"id": "org/model"}]
    async with running_node(tmp_path, {"default_models": defaults}, fetch=fetch, find_local=lambda *_: None) as node:
        await until(lambda: node.health().activation.state == "done")
        assert node.health().activation.completed == ("org/model",)
        assert len(attempts) == 3


async def test_download_reports_progress_and_can_be_cancelled(tmp_path: Path) -> None:
    cancelled_seen = []

    def fetch(
        source: str,
        cache: Path,
        quant: str | None,
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
        sources: FileSources,
    ) -> Path:
        progress(1, 1000)
        wait_until(cancelled)
        cancelled_seen.append(True)
        raise HubUnreachable("cancelled")

    async with running_node(tmp_path, fetch=fetch, find_local=lambda *_: None) as node:
        await node.load(LoadRequest(model_id="org/model"), wait=False)
        await until(lambda: node.model("org/model").state is ModelState.DOWNLOADING)
        progress = node.model("org/model").progress
        assert progress is not None
        assert (progress.stage, progress.total_bytes) == ("download", 1000)
        await asyncio.wait_for(node.unload(UnloadRequest(model_id="org/model")), WAIT_S)
        assert cancelled_seen == [True]
