"""A node whose workers are lost."""

import asyncio
import os
import signal
from pathlib import Path

import faulty_engine
import faulty_models
import pytest
from faulty_models import models, running_node, write_model

from cortex.neuron.text.model import TextModel
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.wire.errors import (
    Recovering,
)
from cortex.wire.node.protocol import ModelState

from ...waiting import WAIT_S, until
from ..generations import Reader
from .node_calls import has_worker, load, request, tokens_of, worker_of


async def test_recovers_each_time_its_worker_is_killed_mid_stream(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        for _ in range(6):
            stream = Reader(node.generate("m", request("long", max_tokens=10**6)))
            await anext(stream)
            os.kill(worker_of(node), signal.SIGKILL)
            with pytest.raises(Recovering):
                await tokens_of(stream)
            with pytest.raises(Recovering):
                node.generate("m", request())
            await load(node)
            assert await tokens_of(node.generate("m", request("short"))) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("token", [faulty_engine.DEVICE_FAULT, faulty_engine.HANG, faulty_engine.SEGFAULT])
async def test_device_fault_ends_streams_with_a_retryable_error_and_the_models_recover(
    tmp_path: Path, token: int
) -> None:
    async with running_node(tmp_path, models(tmp_path, m={}, other={})) as node:
        await load(node)
        await load(node, "other")
        innocent = Reader(node.generate("other", request("innocent", max_tokens=10**6)))
        await anext(innocent)
        fatal = node.generate("m", request("fatal", token))
        [supervisor] = node.devices.supervisors.values()
        if token == faulty_engine.HANG:
            supervisor.timeouts = WorkerTimeouts(step_s=0.5)
        with pytest.raises(Recovering):
            await tokens_of(fatal)
        supervisor.timeouts = WorkerTimeouts()
        with pytest.raises(Recovering):
            await tokens_of(innocent)
        assert node.model("m").state is ModelState.RECOVERING
        await asyncio.gather(load(node), load(node, "other"))
        assert await tokens_of(node.generate("m", request())) == [1, 2, 3, 4, 5]


async def test_model_fails_after_repeated_faults(tmp_path: Path) -> None:
    async with running_node(tmp_path, models(tmp_path, m={})) as node:
        await load(node)
        write_model(tmp_path / "m", load="fault")
        os.kill(worker_of(node), signal.SIGKILL)
        await until(lambda: node.model("m").state is ModelState.RECOVERING)
        await until(lambda: node.model("m").state is ModelState.FAILED)
        assert "gave up after" in (node.model("m").reason or "")
        write_model(tmp_path / "m")
        assert (await load(node)).state is ModelState.READY


async def test_recovers_when_the_worker_is_lost_after_the_weights_and_before_the_tokenizer(tmp_path: Path) -> None:
    tokenizer_ready = asyncio.Event()

    class SlowText(faulty_models.PlainText):
        async def read(self) -> TextModel:
            await tokenizer_ready.wait()
            return await super().read()

    async with running_node(tmp_path, models(tmp_path, m={}), open_text=SlowText) as node:
        loading = asyncio.create_task(load(node, "m"))
        await until(lambda: (p := node.model("m").progress) is not None and p.stage == "read")
        await node.devices.supervisors[0].memory()  # by now the worker has loaded it
        os.kill(worker_of(node), signal.SIGKILL)
        await until(lambda: not has_worker(node))
        tokenizer_ready.set()
        assert (await asyncio.wait_for(loading, WAIT_S)).state is ModelState.READY
        assert await asyncio.wait_for(tokens_of(node.generate("m", request())), WAIT_S) == [1, 2, 3, 4, 5]
