"""Properties of evictions for groups and by them: enough, no more than enough, and nothing that is kept."""

from __future__ import annotations

import random
from collections.abc import Collection

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.devices import DeviceState
from cortex.fleet.placement.place import place
from cortex.fleet.topology import Fleet, ModelOnNode, Node, Residency
from cortex.wire.node.protocol import ModelLoad, ModelState, ModelStatus

NOW = 10_000.0
MIB = 1024**2
NEWCOMER = "newcomer"


class Drawing:
    """A fleet of two or three nodes with models on one device of each of their nodes, as many as fit."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = ("a", "b", "c")[: self.random.randint(2, 3)]
        self.nodes = {name: self.node(name) for name in self.names}
        self.specs: list[ModelSpec] = []

    def node(self, name: str) -> Node:
        sizes = [self.random.choice((24, 40)) * MIB for _ in range(self.random.randint(1, 2))]
        devices = tuple(
            DeviceState(index=index, kind="cuda", name="card", total_bytes=size, free_bytes=size)
            for index, size in enumerate(sizes)
        )
        return Node(
            name=name,
            devices=devices,
            healthy=True,
            max_devices_per_model=len(sizes),
            harnesses=("torch", "vllm"),
            group_harnesses=("vllm",),
        )

    def nodes_of_model(self) -> tuple[str, ...]:
        """Nodes that share a model; none where it is on one node."""
        return self.names[: self.random.choice((0, 2, len(self.names)))]

    def add(self, model_id: str) -> None:
        size = self.random.choice((4, 8, 12, 15, 20)) * MIB
        nodes = self.nodes_of_model()
        places = {
            name: self.random.choice(self.nodes[name].devices) for name in nodes or (self.random.choice(self.names),)
        }
        if any(device.free_bytes < size for device in places.values()):
            return
        lead, *_ = places
        self.specs.append(ModelSpec(id=model_id, harness="vllm", nodes=nodes, vram_mb=size * len(places) // MIB))
        for name, device in places.items():
            node = self.nodes[name]
            free = msgspec.structs.replace(device, free_bytes=device.free_bytes - size)
            devices = tuple(free if each.index == device.index else each for each in node.devices)
            held = self.residency(model_id, nodes, device.index, size)
            here = {"residencies": {**node.residencies, model_id: held}}
            there = {"members": (*node.members, msgspec.structs.replace(held.status, rank=1))}
            self.nodes[name] = msgspec.structs.replace(node, devices=devices, **(here if name == lead else there))

    def residency(self, model_id: str, nodes: tuple[str, ...], device: int, size: int) -> Residency:
        status = ModelStatus(
            id=model_id,
            state=ModelState.READY,
            devices=(device,),
            measured_bytes=size,
            nodes=nodes,
            harness="vllm",
            estimate_bytes=size,
            load=ModelLoad(running=self.random.choice((0, 0, 0, 0, 1))),
            state_age_s=self.random.choice((5.0, 1000.0, 1000.0, 1000.0)),
            idle_s=float(self.random.randint(0, 500)),
        )
        return Residency(status=status, seen_at=NOW, pinned=self.random.random() < 0.1)

    def fleet(self) -> Fleet:
        for number in range(self.random.randint(0, 8)):
            self.add(f"model {number}")
        nodes, size = self.nodes_of_model(), self.random.choice((4, 10, 15, 22))
        newcomer = ModelSpec(id=NEWCOMER, harness="vllm", nodes=nodes, vram_mb=size * max(1, len(nodes)))
        return Fleet(nodes=tuple(self.nodes.values()), catalogue=Catalogue(models=(*self.specs, newcomer)))


def after(fleet: Fleet, evictions: Collection[ModelOnNode]) -> Fleet:
    """The fleet without these models and their members."""
    gone = {eviction.model for eviction in evictions}
    nodes = []
    for node in fleet.nodes:
        held = {model: each for model, each in node.residencies.items() if model not in gone}
        members = tuple(member for member in node.members if member.id not in gone)
        freed = [each.status for model, each in node.residencies.items() if model in gone]
        freed += [member for member in node.members if member.id in gone]
        sizes = [(status.devices[0], status.measured_bytes or 0) for status in freed]
        devices = tuple(
            msgspec.structs.replace(
                device, free_bytes=device.free_bytes + sum(size for index, size in sizes if index == device.index)
            )
            for device in node.devices
        )
        nodes.append(msgspec.structs.replace(node, residencies=held, members=members, devices=devices))
    return msgspec.structs.replace(fleet, nodes=tuple(nodes))


def fits(node: str | None, fleet: Fleet) -> bool:
    decision = place(NEWCOMER, fleet, NOW, only_on=node)
    return decision.action == "load" and not decision.evictions


@given(st.integers(0, 2**48))
def test_evicts_enough_on_all_nodes_and_no_model_more(seed: int) -> None:
    fleet = Drawing(seed).fleet()
    decision = place(NEWCOMER, fleet, NOW)
    if decision.action != "load":
        return
    assert fits(decision.node, after(fleet, decision.evictions))
    for name, model in decision.evictions:
        held = next(node.residencies[model] for node in fleet.nodes if node.name == name)
        assert not held.is_busy
        assert not held.pinned
        assert held.status.state_age_s >= fleet.rules.min_residency_s
        assert not fits(decision.node, after(fleet, [each for each in decision.evictions if each.model != model]))
