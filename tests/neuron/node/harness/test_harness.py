"""A load runs with the harness that its `harness` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faulty_models import running_node, write_model

from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.harness.estimates import Footprint, NodeLimits
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.memory.allocation import ChosenDevices, DeviceAllocation
from cortex.neuron.text.model import TextInspection
from cortex.neuron.worker.model_host import ModelHost
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import Capabilities, Device, ModelState

from ...worker.hosts.fake_host import FakeHost


@pytest.mark.parametrize("harness", ["torch", "candle"])
async def test_loads_under_every_name_of_the_engine(tmp_path: Path, harness: str) -> None:
    source = str(write_model(tmp_path / "model"))
    async with running_node(tmp_path, {"model_roots": [str(tmp_path)]}) as node:
        status = await node.load(LoadRequest(model_id="m", source=source, harness=harness), wait=True)
        assert status.state is ModelState.READY


@dataclass(frozen=True)
class EchoFacts:
    path: Path
    family = "echo"
    quant = None
    context_tokens = 512
    num_layers = 1
    num_ranks = 1
    pooling = None
    backend = "echo"
    has_stages = False
    digest = ""
    stored = file_bytes = None


class EchoEstimates(NodeLimits):
    loads_in_worker = False
    need_bytes = 1 << 20

    def least_bytes(self, model: KnownModel, metadata: EchoFacts, device: Device) -> int:
        return self.need_bytes

    smallest_bytes = expected_bytes = least_bytes

    def context_bytes(self, model: KnownModel, metadata: EchoFacts, device: Device, tokens: int) -> int:
        return self.need_bytes

    def footprint(self, model: KnownModel, metadata: EchoFacts, devices: Sequence[Device]) -> Footprint:
        return Footprint(self.need_bytes, self.need_bytes)

    def stages(self, *_: Any) -> None:
        return None

    empty_stages = basis = stages


class EchoHarness:
    """Runs every model, whatever its family."""

    names = ("echo",)
    max_num_seqs = 4
    restarts = True

    def __init__(self, estimates: EchoEstimates | None = None) -> None:
        self.estimates = estimates or EchoEstimates(NeuronConfig())
        self.host_of_model = FakeHost(0)

    def check(self, model: KnownModel) -> None: ...

    def needs_files(self, model: KnownModel) -> bool:
        return True

    async def read_text(self, model: KnownModel, path: Path) -> TextInspection:
        return TextInspection(Capabilities(chat=True), SamplingDefaults())

    def upstream(self, model: KnownModel) -> None: ...

    def forget_size(self, model_id: str) -> None: ...

    async def close(self) -> None: ...

    async def read(self, model: KnownModel, path: Path) -> tuple[EchoFacts, dict[str, Footprint]]:
        return EchoFacts(path), {}

    async def host(
        self, model: KnownModel, metadata: EchoFacts, room: DeviceAllocation
    ) -> tuple[ModelHost, ChosenDevices]:
        return self.host_of_model, room.chosen

    def replica(self, model: KnownModel, metadata: EchoFacts, chosen: ChosenDevices) -> ModelHost:
        return self.host_of_model


async def test_another_harness_runs_a_family_that_the_engine_does_not_have(tmp_path: Path) -> None:
    source = str(write_model(tmp_path / "model", config={"model_type": "unheard_of"}))
    echo = EchoHarness()
    async with running_node(tmp_path, {"model_roots": [str(tmp_path)]}, harnesses=(echo,)) as node:
        assert node.discovery.harnesses == ("torch", "echo")
        with pytest.raises(LoadFailed, match="unheard_of"):
            await node.load(LoadRequest(model_id="m", source=source), wait=True)
        status = await node.load(LoadRequest(model_id="m", source=source, harness="echo"), wait=True)
        assert (status.state, status.harness, status.family) == (ModelState.READY, "echo", "echo")
        assert (status.measured_bytes, status.devices) == (20, (0,))
        await node.unload(UnloadRequest(model_id="m"))
        assert echo.host_of_model.resident is None


async def test_models_of_another_harness_are_placed_by_its_estimates(tmp_path: Path) -> None:
    class Huge(EchoEstimates):
        need_bytes = 1 << 60

    source = str(write_model(tmp_path / "model"))
    harnesses = (EchoHarness(Huge(NeuronConfig())),)
    async with running_node(tmp_path, {"model_roots": [str(tmp_path)]}, harnesses=harnesses) as node:
        with pytest.raises(InsufficientCapacity, match="m needs at least"):
            await node.load(LoadRequest(model_id="m", source=source, harness="echo"), wait=True)


async def test_unknown_harness_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    async with running_node(tmp_path) as node:
        with pytest.raises(LoadFailed, match="no harness 'vllm'; it has torch"):
            await node.load(LoadRequest(model_id="m", harness="vllm"), wait=True)
        assert node.models() == ()
