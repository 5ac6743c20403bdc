"""What must hold for any fleet: no protected model is evicted, and every decided load fits."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.devices import DeviceState, MemoryReservation
from cortex.fleet.memory import host_left_bytes, ledger
from cortex.fleet.placement.explain import as_json, rejection, rows, text
from cortex.fleet.placement.place import place
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import Abilities, Fleet, Node, Residency
from cortex.wire.node.bench import BenchResult, StreamRate
from cortex.wire.node.contexts import ContextSize, ContextSizes
from cortex.wire.node.contexts import wanted as wanted_of
from cortex.wire.node.host_splits import HostSplit, HostSplits
from cortex.wire.node.protocol import HostHealth, HostKV, ModelLoad, ModelState, ModelStatus

NOW = 10_000.0
MIB = 1024**2
NAMES = [f"m{number}" for number in range(4)]
NEWCOMER = "new"
NODES = ["a", "b", "c"]


def bench_result(stream_rate: float) -> BenchResult:
    return BenchResult(measured_at=0.0, version="0", streams=(StreamRate(streams=1, tokens_per_s=stream_rate),))


class Drawing:
    """A random fleet from one seed. Drawing each part through the property tester would take seconds per test and
    find mostly trivial fleets; a seed reproduces a failure as well."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def mostly(self, usual: Any, *others: Any) -> Any:
        """`usual` five times out of six, so that most decisions are about memory."""
        return usual if self.random.random() < 5 / 6 else self.random.choice(others)

    def spec(self, model_id: str) -> ModelSpec:
        return ModelSpec(
            id=model_id,
            vram_mb=self.random.choice((None, self.random.randint(5, 40))),
            context_tokens=self.mostly(None, 2000, 40_000),
            tensor_parallel=self.mostly(1, 2),
            min_device_vram_mb=self.mostly(0, 20),
            pinned_on=self.mostly((), ("a",), ("b",)),
            load=self.mostly(None, "on_demand", "pinned", "manual"),
            priority=self.mostly(0, 1, 2),
        )

    def residency(self, model_id: str, num_devices: int) -> Residency:
        size = self.random.randint(5, 30) * MIB
        first = self.random.randrange(num_devices)
        status = ModelStatus(
            id=model_id,
            state=self.mostly(ModelState.READY, *ModelState),
            devices=tuple(sorted({first, self.mostly(first, (first + 1) % num_devices)})),
            measured_bytes=self.mostly(size, None),
            **self.sizes(size),
            load=ModelLoad(running=self.mostly(0, 1), waiting=self.mostly(0, 2)),
            state_age_s=self.mostly(100.0, 0.0, 10.0),
            idle_s=float(self.random.randint(0, 500)),
            bench=self.mostly(None, bench_result(50.0), bench_result(200.0)),
            kv_host=self.mostly(None, HostKV(num_bytes=MIB), HostKV(num_bytes=3 * MIB)),
            host_bytes=self.mostly(0, 5 * MIB, 10 * MIB),
        )
        return Residency(status=status, seen_at=NOW, in_flight=self.mostly(0, 1), pinned=self.mostly(False, True))

    def sizes(self, size: int) -> dict[str, Any]:
        """What a node reports of a model that takes at most `size`: all or nothing, a minimum too, or contexts."""
        least = size * self.random.randint(1, 4) // 5
        full = self.random.choice((1024, 8192, 131_072))
        points = [(256, least), (full, least + (size - least) * self.random.randint(1, 12) // 8)]
        contexts = ContextSizes(
            limit_tokens=full,
            full_tokens=full,
            wanted_tokens=wanted_of(full, None),
            empty_tokens=self.random.choice((full, full // 3)),
            full_bytes=size,
            sizes=tuple(ContextSize(tokens=tokens, num_bytes=num_bytes) for tokens, num_bytes in points),
        )
        return self.random.choice(
            (
                {"estimate_bytes": size},
                {"estimate_bytes": size, "least_bytes": least},
                {"estimate_bytes": size, "least_bytes": least, "contexts": contexts},
                {"estimate_bytes": size, "least_bytes": least, "contexts": contexts},
            )
        )

    def newcomer(self) -> Residency:
        """Its files are there."""
        size = self.random.randint(5, 60) * MIB
        moved = size * self.random.randint(1, 3) // 4
        splits = HostSplits(
            splits=(
                HostSplit(saved_bytes=moved // 8, host_bytes=moved // 7, tokens_per_s=40.0),
                HostSplit(saved_bytes=moved, host_bytes=moved + MIB, tokens_per_s=4.0),
            )
        )
        status = ModelStatus(
            id=NEWCOMER,
            state=ModelState.COLD,
            **self.sizes(size),
            host_splits=self.random.choice((None, splits)),
            allowed_devices=self.mostly((), (0,), (1,)),
        )
        return Residency(status=status, seen_at=NOW)

    def host(self, held: dict[str, Residency]) -> HostHealth:
        budget_bytes = self.random.randint(0, 60) * MIB
        weight_bytes = sum(each.status.host_bytes for each in held.values() if each.state is ModelState.READY)
        return HostHealth(
            total_bytes=100 * MIB,
            free_bytes=80 * MIB,
            budget_bytes=budget_bytes,
            weight_bytes=weight_bytes,
            locked_limit_bytes=75 * MIB,
        )

    def node(self, name: str) -> Node:
        """A node whose devices are mostly full; what does not fit any more is left out."""
        totals = [self.random.randint(20, 48) * MIB for _ in range(self.random.randint(1, 3))]
        left = list(totals)
        held: dict[str, Residency] = {}
        for model_id in NAMES:
            candidate = self.residency(model_id, len(totals))
            share = -(-(candidate.num_bytes or 0) // len(candidate.status.devices))
            if any(left[index] < share for index in candidate.status.devices):
                continue
            held[model_id] = candidate
            if candidate.state in (ModelState.READY, ModelState.UNLOADING):
                for index in candidate.status.devices:
                    left[index] -= share
        if self.random.random() < 0.5:
            held[NEWCOMER] = self.newcomer()
        reservation = MemoryReservation(
            model_id=self.random.choice(NAMES), devices=(0,), num_bytes=self.random.randint(1, 20) * MIB
        )
        return Node(
            name=name,
            devices=tuple(self.device(*facts) for facts in zip(range(3), totals, left, strict=False)),
            residencies=held,
            healthy=self.mostly(True, False),
            draining=self.mostly(False, True),
            abilities=Abilities(takes_orders=self.mostly(True, False)),
            max_devices_per_model=self.random.randint(1, 3),
            reservations=self.mostly((), (reservation,)),
            ceiling_bytes=self.mostly(None, 20 * MIB, 60 * MIB),
            host=self.random.choice((None, self.host(held))),
        )

    def device(self, index: int, total: int, left: int) -> DeviceState:
        foreign = min(self.mostly(0, 2, 8) * MIB, left)
        return DeviceState(
            index=index,
            kind="cuda",
            name="card",
            total_bytes=total,
            free_bytes=left - foreign,
            foreign_bytes=foreign,
            kept_free_bytes=self.mostly(0, 2, 5) * MIB,
            kept_free_share=self.mostly(0.0, 0.5),
            ceiling_bytes=self.mostly(None, 10 * MIB, 30 * MIB),
        )

    def fleet(self) -> Fleet:
        return Fleet(
            nodes=tuple(self.node(name) for name in NODES[: self.random.randint(1, 3)]),
            catalogue=Catalogue(models=tuple(self.spec(name) for name in [*NAMES, NEWCOMER])),
            rules=EvictionRules(strategy=self.random.choice(("lru", "priority"))),
        )


fleets = st.integers(0, 2**48).map(lambda seed: Drawing(seed).fleet())
wanted = st.sampled_from([NEWCOMER, NEWCOMER, NEWCOMER, *NAMES])
origins = st.sampled_from(["request", "background", "operator"])


@given(fleets, wanted, origins)
def test_protected_model_is_never_evicted(fleet: Fleet, name: str, origin: str) -> None:
    decision = place(name, fleet, NOW, origin=origin)  # type: ignore[arg-type]
    node = fleet.node(decision.node or "")
    if node is None:
        return
    evicted = [each for each in decision.victims if node.residencies[each].state is not ModelState.UNLOADING]
    if origin == "background":
        assert not evicted
    if not evicted:
        return
    assert node.takes_orders
    newcomer = fleet.catalogue.spec(name)
    for victim in evicted:
        held, spec = node.residencies[victim], fleet.catalogue.spec(victim)
        assert victim != name
        assert held.state is ModelState.READY
        assert not held.is_busy
        assert not held.pinned
        assert not spec.is_pinned_on(node.name)
        assert NOW - held.state_since >= fleet.rules.min_residency_s
        assert spec.priority <= newcomer.priority


@given(fleets, wanted, origins)
def test_decided_load_fits(fleet: Fleet, name: str, origin: str) -> None:
    decision = place(name, fleet, NOW, origin=origin)  # type: ignore[arg-type]
    if decision.action not in ("load", "wake") or decision.need_bytes is None:
        return
    node = fleet.node(decision.node or "")
    assert node is not None
    assert node.healthy
    assert not node.draining
    devices = {device.index: device for device in ledger(node)}
    share = -(-decision.need_bytes // len(decision.devices))
    assert fleet.catalogue.spec(name).tensor_parallel <= len(decision.devices) <= node.max_devices_per_model
    for index in decision.devices:
        given_back = sum(devices[index].held_by(victim) for victim in decision.victims)
        committed = devices[index].committed_bytes - given_back
        assert devices[index].foreign_bytes + committed + share <= devices[index].total_bytes
        assert share <= devices[index].free_bytes + given_back
    if decision.chosen is not None and (split := decision.chosen.split) is not None:
        freed = sum(node.residencies[victim].status.host_bytes for victim in decision.victims)
        assert split.host_bytes <= host_left_bytes(node) + freed
        assert share <= devices[index].usable_bytes(devices[index].balance_bytes + given_back)


@given(fleets, wanted, origins)
def test_decided_load_stays_within_the_ceilings(fleet: Fleet, name: str, origin: str) -> None:
    decision = place(name, fleet, NOW, origin=origin)  # type: ignore[arg-type]
    if decision.action not in ("load", "wake") or decision.takes_bytes is None:
        return
    node = fleet.node(decision.node or "")
    assert node is not None
    devices = ledger(node)
    held_after = {
        device.index: device.committed_bytes - sum(device.held_by(victim) for victim in decision.victims)
        for device in devices
    }
    share = decision.takes_bytes // len(decision.devices)
    for device in devices:
        if device.index in decision.devices and device.ceiling_bytes is not None:
            assert held_after[device.index] + share <= device.ceiling_bytes
    if node.ceiling_bytes is not None:
        assert sum(held_after.values()) + decision.takes_bytes <= node.ceiling_bytes
    if (max_bytes := decision.max_bytes[0]) is not None:
        assert decision.takes_bytes <= max_bytes


@given(fleets, wanted)
def test_every_node_is_assessed_and_every_decision_can_be_explained(fleet: Fleet, name: str) -> None:
    decision = place(name, fleet, NOW)
    assert {assessment.node for assessment in decision.assessments} == {node.name for node in fleet.nodes}
    hosts = sum(assessment.host_left_bytes is not None for assessment in decision.assessments)
    assert len(rows(decision)) == sum(len(node.devices) for node in fleet.nodes) + hosts
    assert text(decision)
    assert msgspec.json.decode(msgspec.json.encode(as_json(decision)))["model"] == name
    if decision.action in ("reject", "wait"):
        assert name in rejection(decision).message
    for assessment in decision.assessments:
        assert assessment.reason
        assert "()" not in assessment.reason


@given(fleets, wanted, st.randoms())
def test_order_of_nodes_does_not_matter(fleet: Fleet, name: str, random: object) -> None:
    shuffled = list(fleet.nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert place(name, fleet, NOW) == place(name, msgspec.structs.replace(fleet, nodes=tuple(shuffled)), NOW)


@pytest.mark.parametrize("seed", [30, 101, 727])
def test_order_of_nodes_that_report_different_divisions_does_not_matter(seed: int) -> None:
    fleet = Drawing(seed).fleet()
    turned = msgspec.structs.replace(fleet, nodes=fleet.nodes[::-1])
    assert place(NEWCOMER, fleet, NOW) == place(NEWCOMER, turned, NOW)


# A load into free memory comes before a wake that has to evict for it: as actions, they are equally good.
RANK = {"route": 0, "join": 1, "wake": 2, "load": 2, "wait": 3, "reject": 4}


@given(fleets, wanted)
def test_additional_empty_node_never_makes_a_decision_worse(fleet: Fleet, name: str) -> None:
    device = DeviceState(index=0, kind="cuda", name="card", total_bytes=80 * MIB, free_bytes=80 * MIB)
    extra = Node(name="extra", devices=(device,), healthy=True)
    assert RANK[place(name, fleet.with_node(extra), NOW).action] <= RANK[place(name, fleet, NOW).action]


@given(fleets, wanted)
def test_ending_requests_never_makes_a_decision_worse(fleet: Fleet, name: str) -> None:
    assert RANK[place(name, fleet.as_if_idle(), NOW).action] <= RANK[place(name, fleet, NOW).action]
