"""Several CPU devices on one host."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from faulty_engine import PLAIN
from faulty_models import running_node, write_model

from cortex.neuron.engine.request import EngineRequest
from cortex.wire.errors import LoadFailed, Recovering
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState

from ..generations import Reader


async def test_places_models_on_any_of_several_cpu_devices(tmp_path: Path) -> None:
    models = [
        {"id": name, "source": str(write_model(tmp_path / name)), "devices": devices}
        for name, devices in (("first", [0]), ("second", [1]), ("any", []))
    ]
    async with running_node(tmp_path, {"models": models, "cpu_devices": 2}) as node:
        assert [device.index for device in node.discovery.devices] == [0, 1]
        for name, devices in (("first", (0,)), ("second", (1,))):
            assert (await node.load(LoadRequest(model_id=name), wait=True)).devices == devices
        assert (await node.load(LoadRequest(model_id="any"), wait=True)).devices in ((0,), (1,))
        process_ids = {supervisor.process_id for supervisor in node.devices.supervisors.values()}
        assert len(process_ids - {None}) == 2
        health = node.health()
        assert [device.worker for device in health.devices] == ["running", "running"]


async def test_replicas_serve_side_by_side_and_a_lost_one_comes_back(tmp_path: Path) -> None:
    models = [{"id": "m", "source": str(write_model(tmp_path / "m", step_s=0.05)), "replicas": 2}]
    async with running_node(tmp_path, {"models": models, "cpu_devices": 2}) as node:
        assert (await node.load(LoadRequest(model_id="m"), wait=True)).devices == (0, 1)
        streams = [
            Reader(node.generate("m", EngineRequest(id=str(number), prompt=(PLAIN, number), max_tokens=2000)))
            for number in range(2)
        ]
        for stream in streams:
            await anext(stream)
        first, second = (supervisor.process_id for supervisor in node.devices.supervisors.values())
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(Recovering):
            async for _ in streams[0]:
                pass
        assert await anext(streams[1])
        assert node.model("m").state is ModelState.READY
        while node.devices.supervisors[0].process_id in (first, None) or not node.devices.supervisors[0].has_models:
            assert await anext(streams[1])
        assert node.devices.supervisors[1].process_id == second
        assert (await node.unload(UnloadRequest(model_id="m", force=True))).state is ModelState.COLD


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16},
            "3 attention heads cannot be divided among 2",
        ),
        ({"intermediate_size": 127}, "an inner width of 127 cannot be divided among 2"),
    ],
)
async def test_rejects_a_division_that_the_model_does_not_allow_before_any_worker_starts(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    models = [{"id": "m", "source": str(write_model(tmp_path / "m", config=config)), "tensor_parallel": 2}]
    async with running_node(tmp_path, {"models": models, "cpu_devices": 2}) as node:
        with pytest.raises(LoadFailed, match=reason):
            await node.load(LoadRequest(model_id="m"), wait=True)
        assert [supervisor.process_id for supervisor in node.devices.supervisors.values()] == [None, None]
