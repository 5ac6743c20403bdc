"""Placement of models whose layers are divided among devices by memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.memory import ledger
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.placement.place import place
from cortex.fleet.reports import after_poll
from cortex.fleet.topology import Node
from cortex.wire.node.protocol import Device, DeviceHealth, Discovery, Health, ModelState, ModelStatus

from ..conftest import GIB, NOW

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("size", "sizes", "expected"),
    [
        (30, [24, 12], (0, 1)),  # equal shares of 15 would not fit the second
        (30, [12, 24], (0, 1)),
        (30, [8, 12, 24], (1, 2)),
        (40, [24, 12], ()),
        (30, [48], ()),  # one device is not two
    ],
)
def test_devices_of_different_sizes_hold_a_model_together(
    node: Make, fleet: Make, spec: Make, size: float, sizes: list[float], expected: tuple[int, ...]
) -> None:
    host = node("n", sizes, max_devices_per_model=8)
    decision = place("m", fleet(host, specs=[spec("m", size, pipeline_parallel=2)]), NOW)
    assert decision.devices == expected


def test_explains_how_much_each_device_takes(node: Make, fleet: Make, spec: Make) -> None:
    host = node("n", [24, 12], max_devices_per_model=2)
    decision = place("m", fleet(host, specs=[spec("m", 18, pipeline_parallel=2)]), NOW)
    [assessment] = decision.assessments
    assert "layers by memory: 12.0 GiB on device 0; 6.0 GiB on device 1" in assessment.reason
    assert [row.need_bytes for row in assessment.rows] == [12 * GIB, 6 * GIB]


def test_node_that_knows_the_layers_has_them_in_the_reason(model: Make, node: Make, fleet: Make) -> None:
    """The node is configured for stages; the catalogue has no entry."""
    cold = model("m", state=ModelState.COLD, devices=(), estimate=30, least=20)
    status = msgspec.structs.replace(cold.status, num_devices=2, stage_layers=(42, 22))
    host = node("n", [24, 12], msgspec.structs.replace(cold, status=status), max_devices_per_model=2)
    decision = place("m", fleet(host), NOW)
    assert decision.devices == (0, 1)
    assert "42 layers, 20.0 GiB on device 0; 22 layers, 10.0 GiB on device 1" in decision.assessments[0].reason
    ready = model("m", 30, devices=(0, 1))
    status = msgspec.structs.replace(ready.status, num_devices=2, stage_layers=(42, 22))
    host = node("n", [24, 12], msgspec.structs.replace(ready, status=status), max_devices_per_model=2)
    decision = place("m", fleet(host), NOW)
    assert decision.assessments[0].verdict is Verdict.RESIDENT
    assert "layers: 42 on device 0, 22 on device 1" in decision.assessments[0].reason


def test_evicts_for_the_part_of_each_device(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    host = node("n", [24, 12], model("old", 6, devices=(1,)), max_devices_per_model=2)
    decision = place("m", fleet(host, specs=[spec("m", 33, pipeline_parallel=2)]), NOW)
    assert decision.devices == (0, 1)
    assert [victim.model for victim in decision.evictions] == ["old"]
    fitting = place("m", fleet(host, specs=[spec("m", 30, pipeline_parallel=2)]), NOW)
    assert fitting.devices == (0, 1)
    assert not fitting.evictions


def test_evicts_from_a_device_without_room_for_a_layer(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    """The memory of both devices together would do, but each has to hold a part."""
    host = node("n", [24, 12], model("old", 12, devices=(1,)), max_devices_per_model=2)
    decision = place("m", fleet(host, specs=[spec("m", 20, pipeline_parallel=2)]), NOW)
    assert (decision.devices, decision.victims) == ((0, 1), ("old",))


def test_reservation_has_the_part_of_each_device(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    """Else another model could be placed on the larger device while the load is under way."""
    host = node("n", [24, 12], max_devices_per_model=2)
    decision = place("m", fleet(host, specs=[spec("m", 30, pipeline_parallel=2)]), NOW)
    assert decision.chosen is not None
    loading = msgspec.structs.replace(host, reservations=(decision.chosen.reservation("m"),))
    assert [device.available_bytes // GIB for device in ledger(loading)] == [4, 2]
    crowded = node("n", [24, 12], model("old", 6, devices=(1,)), max_devices_per_model=2)
    decision = place("m", fleet(crowded, specs=[spec("m", 33, pipeline_parallel=2)]), NOW)
    assert decision.chosen is not None
    assert decision.victims == ("old",)
    assert [num_bytes // GIB for num_bytes in decision.chosen.reservation("m").device_bytes] == [22, 11]


def test_parts_of_a_model_are_not_taken_for_other_programs() -> None:
    devices = tuple(
        Device(index=index, kind="cuda", name="card", total_bytes=size * GIB) for index, size in enumerate((24, 12))
    )
    held = ModelStatus(
        id="m",
        state=ModelState.READY,
        devices=(0, 1),
        measured_bytes=30 * GIB,
        device_bytes=(20 * GIB, 10 * GIB),
    )
    readings = tuple(
        DeviceHealth(index=index, total_bytes=total * GIB, free_bytes=free * GIB)
        for index, total, free in ((0, 24, 3), (1, 12, 1))
    )
    discovery = Discovery(host="n", os="", version="", devices=devices)
    health = Health(status="ok", uptime_s=0, devices=readings, models=(held,))
    polled = after_poll(Node(name="n"), discovery, health, NOW)
    assert [device.foreign_bytes // GIB for device in polled.devices] == [1, 1]


def test_ledger_has_the_part_of_each_device(model: Make, node: Make) -> None:
    held = model("m", 30, devices=(0, 1))
    status = msgspec.structs.replace(held.status, device_bytes=(20 * GIB, 10 * GIB))
    devices = ledger(node("n", [24, 12], msgspec.structs.replace(held, status=status)))
    assert [device.held_by("m") // GIB for device in devices] == [20, 10]


def test_names_the_setting_that_a_node_cannot_satisfy(node: Make, fleet: Make, spec: Make) -> None:
    host = node("n", [24, 12, 24], max_devices_per_model=2)
    decision = place("m", fleet(host, specs=[spec("m", 8, pipeline_parallel=3)]), NOW)
    assert "cannot span 3 devices (pipeline_parallel), at most 2 per model" in decision.assessments[0].reason
    crowded = place("m", fleet(host, specs=[spec("m", 50, pipeline_parallel=2)]), NOW)
    assert "needs 50.0 GiB on 2 devices, which have 48.0 GiB together" in crowded.assessments[0].reason


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"tensor_parallel": 2}, "`m` has tensor_parallel and pipeline_parallel"),
        ({"nodes": ("a", "b"), "harness": "vllm"}, "has `nodes` and pipeline_parallel"),
    ],
)
def test_stages_are_not_combined_with_what_contradicts_them(other: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ModelSpec(id="m", pipeline_parallel=2, **other)
