"""The history of a fleet: the bucket in which things count, when buckets end and what they forget, and what models held
of devices.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.fleet.devices import DeviceState
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.gateway.history import Bucket, DeviceMemory, History, Ring
from cortex.gateway.proxy.accounting.activity import RequestRecord
from cortex.wire.node.protocol import ModelState, ModelStatus

GIB = 1 << 30

times_s = st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=200)


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


@given(times_s, st.sampled_from([0.5, 0.95]))
def test_quantile_is_near_the_exact_one(times: list[float], part: float) -> None:
    bucket = Bucket(at=0.0)
    for each in times:
        bucket.count_first_token(each)
    exact = sorted(times)[max(0, -(-int(part * len(times) * 1000) // 1000) - 1)]
    ordered = sorted(times)
    position = ordered.index(exact)
    near = ordered[max(0, position - 1) : position + 2]
    found = bucket.quantile(part)
    assert found is not None
    assert min(near) * 0.9 <= found <= max(near) * 1.1


def test_quantile_of_nothing_is_unknown() -> None:
    assert Bucket(at=0.0).quantile(0.5) is None


def test_window_has_every_step_and_forgets_old_ones() -> None:
    ring = Ring(10, 6)
    ring.current(1000.0).loads += 1
    ring.current(1009.9).loads += 1
    ring.current(1035.0).loads += 1
    window = ring.window(1041.0)
    assert [bucket.at for bucket in window] == [990.0, 1000.0, 1010.0, 1020.0, 1030.0, 1040.0]
    assert [bucket.loads for bucket in window] == [0, 2, 0, 0, 1, 0]
    assert [bucket.loads for bucket in ring.window(1065.0)] == [0, 0, 1, 0, 0, 0]
    ring.current(1095.0)
    assert len(ring.since(0.0)) == 1  # the others are older than six steps


def test_clock_that_was_set_back_goes_on_with_the_latest_step() -> None:
    ring = Ring(10, 6)
    ring.current(1000.0)
    ring.current(900.0).loads += 1
    assert [bucket.loads for bucket in ring.since(0.0)] == [1]


@pytest.mark.parametrize(("now", "kept"), [(1000.0, 2), (1055.0, 1), (2000.0, 0)])
def test_restored_buckets_are_those_of_the_window(now: float, kept: int) -> None:
    ring = Ring(10, 6)
    ring.restore([Bucket(at=1000.0), Bucket(at=990.0), Bucket(at=5000.0)], now)
    assert len(ring.since(0.0)) == kept


def ended(at: float) -> RequestRecord:
    return RequestRecord(
        number=1,
        id=b"1",
        ended_at=at,
        key_id=None,
        key_name="",
        model="a",
        node="beast",
        dialect="openai_chat",
        path=b"/v1/chat/completions",
        status=200,
        outcome="completed",
        error_code=None,
        error_message=None,
        reason="",
    )


def test_request_counts_in_the_step_in_which_it_ended_whatever_happens_next() -> None:
    now = 1000.0
    history = History(lambda: now)
    history.request_ended(ended(now))
    now = 1010.0
    history.happened({"kind": "load_started"})
    shown = history.as_json("hour")
    assert (shown["times"][-2:], shown["requests"][-2:], shown["loads"][-2:]) == ([1000.0, 1010.0], [1, 0], [0, 1])
