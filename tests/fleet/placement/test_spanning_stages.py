"""Models whose layers are divided among nodes, by the memory of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.memory import measurements
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.placement.place import place
from cortex.fleet.topology import ModelOnNode
from cortex.wire.node.protocol import ModelState

from ..conftest import GIB, NOW
from .spanning_models import NODES, leading, spanning, staged, with_share

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("size", "beast", "benjy", "expected"),
    [
        (30, [24], [12], ((0,), (0,), 20, 10)),  # equal parts of 15 would not fit benjy
        (30, [12], [24], ((0,), (0,), 10, 20)),
        (30, [12, 24], [8, 12], ((1,), (1,), 20, 10)),
        (36, [24], [12], ((0,), (0,), 24, 12)),
        (37, [24], [12], None),
    ],
)
def test_layers_are_divided_among_nodes_by_their_memory(
    node: Make,
    fleet: Make,
    size: float,
    beast: list[float],
    benjy: list[float],
    expected: tuple[tuple[int, ...], tuple[int, ...], float, float] | None,
) -> None:
    snapshot = fleet(node("benjy", benjy), node("beast", beast), specs=[staged(size)])
    decision = place("big", snapshot, NOW)
    if expected is None:
        assert decision.assessments[0].reason == "needs 37.0 GiB on 2 nodes, which have 36.0 GiB together"
        return
    here, there, lead_size, part_size = expected
    (part,) = decision.parts
    assert (decision.action, decision.node, decision.devices, part.devices) == ("load", "beast", here, there)
    assert (decision.takes_bytes, part.takes_bytes) == (lead_size * GIB, part_size * GIB)


def test_several_devices_of_each_node_divide_its_layers_by_memory(node: Make, fleet: Make) -> None:
    nodes = [
        msgspec.structs.replace(node(name, sizes), max_devices_per_model=len(sizes))
        for name, sizes in zip(NODES, ([24, 12], [8, 8, 4]), strict=True)
    ]
    decision = place("big", fleet(*nodes, specs=[staged(26, pipeline_parallel=4)]), NOW)
    (part,) = decision.parts
    assert [row.need_bytes for row in decision.assessments[0].rows] == [12 * GIB, 6 * GIB]
    assert [row.need_bytes for row in part.rows if row.chosen] == [4 * GIB, 4 * GIB]


def test_layers_are_divided_by_what_the_ceiling_of_a_node_leaves(model: Make, node: Make, fleet: Make) -> None:
    beast, benjy = (
        msgspec.structs.replace(each, max_devices_per_model=2)
        for each in (node("beast", [40, 40]), node("benjy", [40, 40], model("old", 20)))
    )
    beast = msgspec.structs.replace(beast, ceiling_bytes=40 * GIB)
    decision = place("big", fleet(beast, benjy, specs=[staged(96, pipeline_parallel=4)]), NOW)
    assert (decision.action, decision.evictions) == ("load", ())  # 40 and 60 GiB are free


def test_explains_which_node_takes_how_much_of_the_layers_or_decides_the_share_of_each(node: Make, fleet: Make) -> None:
    nodes = [node("beast", [24]), node("benjy", [12])]
    reason = place("big", fleet(*nodes, specs=[staged(30)]), NOW).assessments[0].reason
    assert "layers by memory: 20.0 GiB on beast, 10.0 GiB on benjy; benjy with 12.0 GiB free has the fewest" in reason
    reason = place("big", fleet(*nodes, specs=[spanning(20)]), NOW).assessments[0].reason
    assert "benjy with 12.0 GiB free decides the share of each" in reason


def test_shows_no_equal_part_of_a_model_that_is_divided_by_layers(model: Make, node: Make, fleet: Make) -> None:
    nodes = [node("beast", [24]), node("benjy", [12])]
    (peer,) = place("big", fleet(*nodes, specs=[staged(30)]), NOW, only_on="benjy").assessments
    assert (peer.verdict, peer.need_bytes, peer.rows[0].need_bytes) == (Verdict.EXCLUDED, None, None)
    held = leading(model("big", 20), parallel="pipeline", stage_layers=(42,))
    (lead,) = place(
        "big", fleet(node("beast", [24], held), nodes[1], specs=[staged(30)]), NOW, only_on="beast"
    ).assessments
    assert (lead.verdict, lead.need_bytes) == (Verdict.RESIDENT, 20 * GIB)


def test_layers_go_where_memory_is_free_before_anything_is_evicted(model: Make, node: Make, fleet: Make) -> None:
    beast, benjy = node("beast", [24], model("a", 18)), node("benjy", [24])
    decision = place("big", fleet(beast, benjy, specs=[staged(25)]), NOW)
    assert (decision.evictions, decision.takes_bytes, decision.parts[0].takes_bytes) == ((), 5 * GIB, 20 * GIB)
    decision = place("big", fleet(beast, benjy, specs=[staged(40)]), NOW)
    assert decision.evictions == (ModelOnNode("beast", "a"),)
    assert (decision.takes_bytes, decision.parts[0].takes_bytes) == (20 * GIB, 20 * GIB)
    # An equal part would need more of benjy than is free.
    benjy = node("benjy", [24], model("b", 8))
    decision = place("big", fleet(beast, benjy, specs=[staged(35)]), NOW)
    assert decision.evictions == (ModelOnNode("beast", "a"),)
    assert (decision.takes_bytes, decision.parts[0].takes_bytes) == (21 * GIB, 14 * GIB)


def test_loaded_layers_are_shown_and_their_bytes_are_the_size_of_the_model(
    model: Make, node: Make, fleet: Make
) -> None:
    held = leading(model("big", 20), parallel="pipeline", stage_layers=(42,))
    benjy = with_share(node("benjy", [12]), 10, awake_bytes=10 * GIB, stage_layers=(22,))
    snapshot = fleet(node("beast", [24], held), benjy, specs=[staged(None)])
    assert "layers: 42 on device 0, 22 on device 0 of benjy" in place("big", snapshot, NOW).assessments[0].reason
    assert list(measurements(snapshot).values()) == [30 * GIB]
    loading = with_share(node("benjy", [12]), 0, state="loading")
    assert measurements(fleet(node("beast", [24], held), loading, specs=[staged(None)])) == {}


def test_sleeping_stages_wake_at_their_own_sizes_or_are_loaded_on_other_devices(
    model: Make, node: Make, fleet: Make
) -> None:
    asleep = leading(model("big", 20, state=ModelState.ASLEEP), parallel="pipeline", stage_layers=(42,))
    benjy = node("benjy", [12, 12], model("b", 8, pinned=False, devices=(0,)))
    benjy = with_share(benjy, 0, state="asleep", awake_bytes=10 * GIB)
    decision = place("big", fleet(node("beast", [24], asleep), benjy, specs=[staged(None)]), NOW)
    assert (decision.action, decision.parts[0].devices) == ("wake", (0,))
    assert (decision.takes_bytes, decision.parts[0].takes_bytes) == (20 * GIB, 10 * GIB)
    assert decision.evictions == (ModelOnNode("benjy", "b"),)
    pinned = with_share(node("benjy", [12, 12], model("b", 8, pinned=True)), 0, state="asleep", awake_bytes=10 * GIB)
    decision = place("big", fleet(node("beast", [24], asleep), pinned, specs=[staged(None)]), NOW)
    assert (decision.action, decision.parts[0].devices, decision.evictions) == ("load", (1,), ())
