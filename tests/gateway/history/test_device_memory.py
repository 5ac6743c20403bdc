"""What models held of devices: only changes are kept."""

from __future__ import annotations

import msgspec
import pytest

from cortex.fleet.devices import DeviceState
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.gateway.history.history import DeviceMemory
from cortex.wire.node.protocol import ModelState, ModelStatus

GIB = 1 << 30


def fleet(**sizes: int) -> Fleet:
    residencies = {
        name: Residency(
            status=ModelStatus(id=name, state=ModelState.READY, devices=(0,), measured_bytes=size * GIB), seen_at=0.0
        )
        for name, size in sizes.items()
    }
    device = DeviceState(index=0, kind="cuda", name="card", total_bytes=80 * GIB, free_bytes=10 * GIB)
    return Fleet(nodes=(Node(name="beast", devices=(device,), residencies=residencies, healthy=True),))


def test_only_changes_are_kept() -> None:
    memory = DeviceMemory(keep_s=1000.0)
    for moment in range(10):
        memory.sample(fleet(a=20), float(moment))
    memory.sample(fleet(a=20, b=30), 10.0)
    assert [(each.at, dict(each.models)) for each in memory.since(0.0)] == [
        (0.0, {"a": 20 * GIB}),
        (10.0, {"a": 20 * GIB, "b": 30 * GIB}),
    ]


def test_what_held_before_a_window_is_its_beginning() -> None:
    memory = DeviceMemory(keep_s=100.0)
    memory.sample(fleet(a=20), 0.0)
    memory.sample(fleet(b=20), 50.0)
    assert [each.at for each in memory.since(60.0)] == [50.0]
    memory.sample(fleet(b=20), 500.0)  # the change is older than what is kept, and still holds
    assert [each.at for each in memory.since(450.0)] == [50.0]


def test_changes_of_a_large_fleet_are_bounded() -> None:
    memory = DeviceMemory(keep_s=1e9, max_changes=5)
    for moment in range(20):
        memory.sample(fleet(a=moment + 1), float(moment))
    assert len(memory.since(0.0)) == 5


def test_a_node_that_was_not_polled_yet_changes_nothing() -> None:
    memory = DeviceMemory(keep_s=1000.0)
    memory.sample(fleet(a=20), 0.0)
    memory.sample(Fleet(nodes=(msgspec.structs.replace(fleet().nodes[0], healthy=False),)), 1.0)
    assert len(memory.since(0.0)) == 1


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_node_that_is_down_or_gone_holds_nothing_and_is_forgotten(is_gone: bool) -> None:
    memory = DeviceMemory(keep_s=1000.0)
    memory.sample(fleet(a=20), 0.0)
    down = msgspec.structs.replace(fleet(a=20).nodes[0], healthy=False, problem="no response")
    without = Fleet(nodes=() if is_gone else (down,))
    for moment in (1.0, 2.0):
        memory.sample(without, moment)
    assert [(each.at, dict(each.models)) for each in memory.since(0.0)] == [(0.0, {"a": 20 * GIB}), (1.0, {})]
    memory.sample(without, 1500.0)
    assert not memory.since(0.0)
    memory.sample(fleet(a=20), 1501.0)
    assert [each.at for each in memory.since(0.0)] == [1501.0]
