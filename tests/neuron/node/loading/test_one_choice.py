"""A load takes the devices that placement has chosen, or none: the gateway decides, and the node only checks."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.devices import DeviceState
from cortex.fleet.placement.place import place
from cortex.fleet.rules import PlacementRules
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.neuron.config import ModelEntry, NeuronConfig
from cortex.neuron.engine.memory.reserve import MemoryReserve
from cortex.neuron.node.library import Library
from cortex.neuron.node.loading.device_choice import DeviceChoice, check_devices
from cortex.neuron.node.status import describe_model
from cortex.neuron.worker.discovery import DeviceReading
from cortex.wire.errors import CortexError, InsufficientCapacity
from cortex.wire.node.device_choice import UNPLACED, Strategy
from cortex.wire.node.orders import LoadRequest
from cortex.wire.node.protocol import Device

GIB = 1 << 30


@dataclass(frozen=True)
class Host:
    """A node with cards, and an entry for the model `m`, as its own code and as a gateway sees it."""

    free_gib: tuple[int, ...]
    size_gib: int
    entry: ModelEntry

    @property
    def devices(self) -> list[Device]:
        return [
            Device(index=index, kind="cuda", name="card", total_bytes=64 * GIB) for index in range(len(self.free_gib))
        ]

    @property
    def library(self) -> Library:
        return Library(NeuronConfig(models=(self.entry,)), {})

    def fleet(self, strategy: Strategy, **options: Any) -> Fleet:
        model = self.library.find("m")
        status = describe_model(model, None, None, None, 0, None, None, None, allowed_devices=model.devices)
        num_bytes = self.size_gib * GIB
        status = msgspec.structs.replace(status, estimate_bytes=num_bytes, least_bytes=num_bytes)
        devices = tuple(
            DeviceState(index=index, kind="cuda", name="card", total_bytes=64 * GIB, free_bytes=free * GIB)
            for index, free in enumerate(self.free_gib)
        )
        held = {"m": Residency(status=status, seen_at=0.0)}
        node = Node(name="n", healthy=True, devices=devices, residencies=held, max_devices_per_model=len(devices))
        specs = (ModelSpec(id="m", **options),)
        return Fleet(nodes=(node,), catalogue=Catalogue(models=specs), placement=PlacementRules(strategy=strategy))

    def load(self, request: LoadRequest, free_gib: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The devices that the node takes, whose free memory may have changed meanwhile. Raises CortexError."""
        model = self.library.adopt(request)
        check_devices(model, self.devices)
        readings = {index: DeviceReading(64 * GIB, free * GIB) for index, free in enumerate(free_gib or self.free_gib)}
        share = self.size_gib * GIB // model.num_devices
        estimates: Any = SimpleNamespace(
            least_bytes=lambda *_: share, reserve=lambda _: MemoryReserve(0), share_bytes=lambda *_: None
        )
        facts: Any = SimpleNamespace(num_ranks=1)
        return DeviceChoice(model, facts, self.devices, readings, estimates).choose().indices


def hosts(seed: int) -> tuple[Host, Random]:
    random = Random(seed)
    count = random.randint(1, 5)
    free = tuple(random.randint(0, 60) for _ in range(count))
    allowed = tuple(sorted(random.sample(range(count), random.randint(0, count))))
    tensor_parallel = random.choice((1, 1, 2))
    replicas = random.choice((1, 1, 1, 2))
    entry = ModelEntry(id="m", source="/m", devices=allowed, tensor_parallel=tensor_parallel, replicas=replicas)
    return Host(free, 4 * random.randint(1, 15), entry), random


def request_of(fleet: Fleet, devices: tuple[int, ...]) -> LoadRequest:
    """As the gateway orders it."""
    return msgspec.structs.replace(
        fleet.catalogue.spec("m").load_request, devices=devices, tensor_parallel=len(devices)
    )


@given(st.integers(0, 1 << 30), st.sampled_from(["pack", "spread"]))
def test_node_loads_on_the_devices_that_placement_has_chosen(seed: int, strategy: Strategy) -> None:
    host, _ = hosts(seed)
    fleet = host.fleet(strategy)
    decision = place("m", fleet, 0.0)
    if decision.action == "load":
        devices = decision.assessments[0].devices
        assert host.load(request_of(fleet, devices)) == devices


@given(st.integers(0, 1 << 30), st.sampled_from(["pack", "spread"]))
def test_node_rejects_a_choice_that_is_no_longer_possible_and_makes_no_other(seed: int, strategy: Strategy) -> None:
    host, random = hosts(seed)
    fleet = host.fleet(strategy)
    decision = place("m", fleet, 0.0)
    if decision.action != "load":
        return
    devices = decision.assessments[0].devices
    later = tuple(random.randint(0, 60) for _ in host.free_gib)
    try:
        taken = host.load(request_of(fleet, devices), later)
    except InsufficientCapacity:
        assert min(later[index] for index in devices) * len(devices) < host.size_gib + len(devices)
    else:
        assert taken == devices


@given(st.integers(0, 1 << 30))
def test_node_without_a_gateway_chooses_as_placement_does(seed: int) -> None:
    host, _ = hosts(seed)
    decision = place("m", host.fleet(UNPLACED), 0.0)
    count = host.library.find("m").num_devices
    try:
        devices = host.load(LoadRequest(model_id="m"))
    except CortexError:
        assert decision.action != "load" or len(decision.assessments[0].devices) > count
    else:
        assert (decision.action, decision.assessments[0].devices) == ("load", devices)
