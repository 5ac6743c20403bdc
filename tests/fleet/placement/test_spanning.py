"""Models that span nodes: placement on all of them, memory charged on each, explanations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.memory import ledger, measurements
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.placement.explain import as_json, outcome, rejection
from cortex.fleet.placement.place import place
from cortex.fleet.topology import MemoryReservation, ModelOnNode, Node, Residency
from cortex.wire.errors import Overloaded
from cortex.wire.node.protocol import ModelShare, ModelState

NOW = 10_000.0
GIB = 1024**3
Make = Callable[..., Any]
NODES = ("beast", "benjy")


def spanning(size: float | None = 30, **options: Any) -> ModelSpec:
    vram_mb = None if size is None else int(size * 1024)
    return ModelSpec(id="big", vram_mb=vram_mb, nodes=NODES, **options)


def with_share(node: Node, size: float, **facts: Any) -> Node:
    share = ModelShare(
        model_id="big", lead="beast", devices=(0,), num_bytes=int(size * GIB), **({"state": "ready"} | facts)
    )
    return msgspec.structs.replace(node, shares=(share,))


def test_needs_its_part_on_every_node_and_is_served_by_the_first(node: Make, fleet: Make) -> None:
    snapshot = fleet(node("benjy", [24]), node("other", [80]), node("beast", [24]), specs=[spanning(30)])
    decision = place("big", snapshot, NOW)
    assert (decision.action, decision.node, decision.devices, decision.takes_bytes) == ("load", "beast", (0,), 15 * GIB)
    assert [(part.node, part.verdict, part.takes_bytes) for part in decision.parts] == [
        ("benjy", Verdict.FITS, 15 * GIB)
    ]
    assert outcome(decision) == "load big on beast (device 0) and a part on benjy."
    verdicts = {each.node: (each.verdict, each.reason) for each in decision.assessments[1:]}
    assert verdicts["benjy"] == (
        Verdict.EXCLUDED,
        "takes a part of it; beast serves it (`nodes` in models.toml)",
    )
    assert verdicts["other"][0] is Verdict.EXCLUDED


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        ({"healthy": False, "problem": "connection refused"}, Verdict.UNHEALTHY, "benjy: connection refused"),
        ({"draining": True, "drained": True}, Verdict.DRAINING, "benjy: drained by the operator: run `cortex undrain`"),
        ({"name": "renamed"}, Verdict.UNHEALTHY, "benjy: the fleet has no such node; add it under [[neurons]]"),
        ({"has_lifecycle": False}, Verdict.WRONG_HARNESS, "benjy: takes no parts of models"),
    ],
)
def test_is_not_loaded_while_one_of_its_nodes_cannot_take_part(
    node: Make, fleet: Make, change: dict[str, Any], verdict: Verdict, reason: str
) -> None:
    benjy = msgspec.structs.replace(node("benjy", [24]), **change)
    decision = place("big", fleet(node("beast", [24]), benjy, specs=[spanning(30)]), NOW)
    (lead,) = [each for each in decision.assessments if each.node == "beast"]
    assert (decision.action, lead.verdict, lead.reason, lead.devices) == ("reject", verdict, reason, ())


def test_is_not_loaded_where_its_part_exceeds_the_smallest_node(node: Make, fleet: Make) -> None:
    decision = place("big", fleet(node("beast", [80]), node("benjy", [12]), specs=[spanning(30)]), NOW)
    assert decision.assessments[0].verdict is Verdict.TOO_SMALL
    assert decision.assessments[0].reason.startswith("benjy: needs 15.0 GiB per device, the largest has 12.0 GiB")


def test_rejection_has_the_numbers_and_the_code_of_the_node_that_decides(model: Make, node: Make, fleet: Make) -> None:
    snapshot = fleet(node("beast", [24]), node("benjy", [24], model("b", 20)), specs=[spanning(30)])
    error = rejection(place("big", snapshot, NOW, origin="background"))
    assert isinstance(error, Overloaded), "another request may evict b"
    assert "benjy: only models that cannot be evicted" in error.message
    assert "(need 15.0 GiB, have 4.0 GiB)" in error.message


def test_evicts_on_every_node(model: Make, node: Make, fleet: Make) -> None:
    beast, benjy = node("beast", [24], model("a", 20)), node("benjy", [24], model("b", 20))
    decision = place("big", fleet(beast, benjy, specs=[spanning(30)]), NOW)
    assert decision.action == "load"
    assert decision.evictions == (ModelOnNode("beast", "a"), ModelOnNode("benjy", "b"))
    assert outcome(decision) == "load big on beast (device 0) and a part on benjy after unloading a, b on benjy."
    assert as_json(decision)["victims"] == ["a", "b"]
    assert as_json(decision)["nodes"][0]["parts"][0]["victims"] == ["b"]


@pytest.mark.parametrize("ceilings", [(None, 16), (20, 16), (16, 20), (16, None)])
def test_ceiling_of_each_node_limits_its_part(node: Make, fleet: Make, ceilings: tuple[int | None, int | None]) -> None:
    expected = tuple(None if ceiling is None else ceiling * GIB for ceiling in ceilings)
    nodes = [
        msgspec.structs.replace(node(name, [24]), ceiling_bytes=ceiling)
        for name, ceiling in zip(NODES, expected, strict=True)
    ]
    assert place("big", fleet(*nodes, specs=[spanning(30)]), NOW).max_bytes == expected


def staged(size: float | None = 30, **options: Any) -> ModelSpec:
    return spanning(size, **({"pipeline_parallel": 2} | options))


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


def test_sleeping_part_whose_device_is_held_is_loaded_on_another(model: Make, node: Make, fleet: Make) -> None:
    beast = node("beast", [24], leading(model("big", 15, state=ModelState.ASLEEP)))
    benjy = with_share(node("benjy", [24, 24], model("b", 20, pinned=True)), 0, state="asleep")
    decision = place("big", fleet(beast, benjy, specs=[spanning(30)]), NOW)
    assert (decision.action, decision.parts[0].devices, decision.evictions) == ("load", (1,), ())


def test_takes_equally_many_devices_on_each_node(node: Make, fleet: Make) -> None:
    nodes = [msgspec.structs.replace(node(name, [24, 24]), max_devices_per_model=2) for name in NODES]
    decision = place("big", fleet(*nodes, specs=[spanning(80, min_devices=4)]), NOW)
    assert (decision.devices, decision.parts[0].devices) == ((0, 1), (0, 1))
    three = [msgspec.structs.replace(node(name, [24] * 3), max_devices_per_model=3) for name in NODES]
    assert place("big", fleet(*three, specs=[spanning(80, min_devices=6)]), NOW).devices == (0, 1, 2)
    assert place("big", fleet(*nodes, specs=[spanning(80, min_devices=2)]), NOW).action == "reject"


def leading(held: Residency, **facts: Any) -> Residency:
    """The model on the node that leads it."""
    status = msgspec.structs.replace(held.status, **({"nodes": NODES, "parallel": "tensor"} | facts))
    return msgspec.structs.replace(held, status=status)


def test_share_of_a_model_is_charged_where_it_is_and_kept_if_its_lead_is_unknown(
    node: Make, fleet: Make, spec: Make
) -> None:
    benjy = with_share(node("benjy", [24]), 15)
    assert [holding.model_id for holding in ledger(benjy)[0].holdings] == ["big"]
    assert ledger(benjy)[0].available_bytes == 9 * GIB
    decision = place("m", fleet(benjy, specs=[spec("m", 20)]), NOW)
    assert decision.assessments[0].verdict is Verdict.HELD
    assert "big: a part of it; beast serves it, which is not in this fleet" in decision.assessments[0].reason


@pytest.mark.parametrize(
    ("options", "changes", "verdict", "reason"),
    [
        ({}, {}, Verdict.FITS_AFTER_EVICTION, "fits after unloading big"),
        ({"running": 1}, {}, Verdict.BLOCKED, "waits for big: a part of it; on beast: busy with 1 request"),
        ({"age_s": 5}, {}, Verdict.BLOCKED, "on beast: loaded 5 s ago"),
        ({"pinned": True}, {}, Verdict.HELD, "on beast: pinned on beast"),
        ({"state": ModelState.UNLOADING}, {}, Verdict.BLOCKED, "on beast: unloading"),
        ({"state": ModelState.COLD}, {}, Verdict.BLOCKED, "which is being freed; beast has unloaded it"),
        ({}, {"healthy": False}, Verdict.BLOCKED, "beast, which serves it, is down"),
        ({}, {"name": "known as another"}, Verdict.FITS_AFTER_EVICTION, "fits after unloading big"),
    ],
)
def test_part_is_evicted_with_its_model_where_that_is_served(
    model: Make,
    node: Make,
    fleet: Make,
    spec: Make,
    options: dict[str, Any],
    changes: dict[str, Any],
    verdict: Verdict,
    reason: str,
) -> None:
    beast = msgspec.structs.replace(node("beast", [24], leading(model("big", 15, **options))), **changes)
    benjy = with_share(node("benjy", [24]), 15)
    decision = place("m", fleet(beast, benjy, specs=[spec("m", 20)]), NOW, only_on="benjy")
    (there,) = decision.assessments
    assert there.verdict is verdict
    assert reason in there.reason
    if verdict is Verdict.FITS_AFTER_EVICTION:
        assert decision.evictions == (ModelOnNode(beast.name, "big"),)


@pytest.mark.parametrize(("size", "victim"), [(8, "old"), (9, "big")])
def test_evicts_a_part_only_where_all_of_its_model_is_less_than_other_models(
    model: Make, node: Make, fleet: Make, spec: Make, size: float, victim: str
) -> None:
    part = 4.2
    beast = node("beast", [24], leading(model("big", part)))
    benjy = node("benjy", [24, 24], model("old", size, devices=(1,)))
    benjy = with_share(benjy, part)
    decision = place("m", fleet(beast, benjy, specs=[spec("m", 22)]), NOW, only_on="benjy")
    assert decision.assessments[0].evictions[0].model == victim


@pytest.mark.parametrize(("size", "victim"), [(20, "old"), (23, "big")])
def test_small_part_of_a_model_in_stages_counts_with_what_its_other_nodes_hold(
    model: Make, node: Make, fleet: Make, spec: Make, size: float, victim: str
) -> None:
    beast = node("beast", [24], leading(model("big", 18), parallel="pipeline", stage_layers=(42,)))
    benjy = node("benjy", [24, 24], model("old", size, devices=(1,)))
    benjy = with_share(benjy, 4, awake_bytes=4 * GIB)
    decision = place("m", fleet(beast, benjy, specs=[spec("m", 22)]), NOW, only_on="benjy")
    assert decision.assessments[0].evictions[0].model == victim


def test_evicts_a_model_on_the_same_nodes_once_for_both_parts(model: Make, node: Make, fleet: Make) -> None:
    """On the second node an older model is large enough too; the one that leaves anyway makes room there."""
    beast = node("beast", [24], leading(model("big", 15, idle_s=100)))
    benjy = with_share(node("benjy", [40], model("old", 20, idle_s=1000)), 15)
    other = ModelSpec(id="other", vram_mb=30 * 1024, nodes=NODES)
    decision = place("other", fleet(beast, benjy, specs=[spanning(30), other]), NOW)
    assert decision.evictions == (ModelOnNode("beast", "big"),)
    assert outcome(decision) == "load other on beast (device 0) and a part on benjy after unloading big."


def test_evicts_nothing_on_its_lead_that_the_eviction_of_a_part_makes_unnecessary(
    model: Make, node: Make, fleet: Make
) -> None:
    """On the lead a smaller model would do; the one that must leave the second node makes room there, too."""
    beast = node("beast", [24, 24], leading(model("big", 15)), model("small", 12, devices=(1,)))
    benjy = with_share(node("benjy", [24]), 15)
    other = ModelSpec(id="other", vram_mb=30 * 1024, nodes=NODES)
    decision = place("other", fleet(beast, benjy, specs=[spanning(30), other]), NOW)
    assert decision.evictions == (ModelOnNode("beast", "big"),)


@pytest.mark.parametrize("nodes", [(), NODES])
def test_waits_for_a_load_over_the_same_devices(model: Make, node: Make, fleet: Make, nodes: tuple[str, ...]) -> None:
    """`nodes` of the model that loads: in the catalogue, or only in the configuration of its lead."""
    reserved = (MemoryReservation(model_id="big", devices=(0,), num_bytes=GIB),)
    loading = leading(model("big", estimate=1, state=ModelState.LOADING))
    beast = node("beast", [80], loading, reservations=reserved)
    benjy = node("benjy", [80], reservations=reserved)
    specs = [ModelSpec(id="big", nodes=nodes), ModelSpec(id="other", vram_mb=1024, nodes=NODES)]
    lead = place("other", fleet(beast, benjy, specs=specs), NOW, only_on="beast").assessments[0]
    assert [each.verdict for each in (lead, *lead.parts)] == [Verdict.BLOCKED] * 2


@pytest.mark.parametrize(
    ("newcomer", "divided", "expected"),
    [
        ({"nodes": NODES}, True, Verdict.FITS_AFTER_EVICTION),
        ({"min_devices": 2}, True, Verdict.FITS_AFTER_EVICTION),
        ({}, True, Verdict.FITS),
        ({"nodes": NODES}, False, Verdict.FITS),
    ],
)
def test_device_with_a_part_of_a_model_that_spans_nodes_has_no_other_divided_one_however_much_is_free(
    model: Make, node: Make, fleet: Make, newcomer: dict[str, Any], divided: bool, expected: Verdict
) -> None:
    held = leading(model("big", 4, devices=(0, 1)))
    if not divided:
        held = leading(held, nodes=(), parallel=None)
    beast = msgspec.structs.replace(node("beast", [80, 80], held), max_devices_per_model=2)
    spec = ModelSpec(id="other", vram_mb=4 * 1024, **newcomer)
    decision = place("other", fleet(beast, node("benjy", [80]), specs=[spec]), NOW, only_on="beast")
    assert decision.assessments[0].verdict is expected


def test_model_of_unknown_size_replaces_the_one_whose_devices_it_cannot_share(
    model: Make, node: Make, fleet: Make
) -> None:
    beast = node("beast", [80], leading(model("big", 4)))
    benjy = with_share(node("benjy", [80]), 4)
    other = ModelSpec(id="other", nodes=NODES)
    decision = place("other", fleet(beast, benjy, specs=[other]), NOW)
    assert (decision.action, decision.evictions) == ("load", (ModelOnNode("beast", "big"),))


def test_sleeping_model_holds_no_devices_and_wakes_on_those_it_had(model: Make, node: Make, fleet: Make) -> None:
    beast = node("beast", [24], leading(model("big", 15, state=ModelState.ASLEEP)))
    share = ModelShare(model_id="big", lead="beast", state="asleep", devices=(1,), num_bytes=GIB, host_bytes=GIB)
    benjy = msgspec.structs.replace(node("benjy", [24, 24], model("b", 20, devices=(1,))), shares=(share,))
    assert ledger(benjy)[0].holdings == ()
    other = ModelSpec(id="other", vram_mb=30 * 1024, nodes=NODES)
    snapshot = fleet(beast, benjy, specs=[spanning(30), other])
    assert place("other", snapshot, NOW).evictions == ()
    decision = place("big", snapshot, NOW)
    assert (decision.action, decision.node, decision.parts[0].devices) == ("wake", "beast", (1,))
    assert decision.evictions == (ModelOnNode("benjy", "b"),)


@pytest.mark.parametrize(("drained", "reason"), [(True, "drained by the operator"), (False, "shutting down")])
def test_model_drains_with_a_node_that_has_a_part_of_it(
    model: Make, node: Make, fleet: Make, drained: bool, reason: str
) -> None:
    benjy = msgspec.structs.replace(with_share(node("benjy", [24]), 15), draining=True, drained=drained)
    snapshot = fleet(node("beast", [24], leading(model("big", 15))), benjy, specs=[spanning(30)])
    assert list(snapshot.replicas("big")) == []
    (lead,) = place("big", snapshot, NOW, only_on="beast").assessments
    assert lead.verdict is Verdict.DRAINING
    assert f"benjy has a part of it, and is {reason}" in lead.reason


def test_measured_size_is_that_of_the_whole_model(model: Make, node: Make, fleet: Make) -> None:
    held = model("big", 15)
    held = msgspec.structs.replace(held, status=msgspec.structs.replace(held.status, nodes=NODES))
    snapshot = fleet(node("beast", [24], held), with_share(node("benjy", [24]), 15), specs=[spanning(None)])
    measured = measurements(snapshot)
    assert list(measured.values()) == [30 * GIB]
    empty = msgspec.structs.replace(
        fleet(node("beast", [24]), node("benjy", [24]), specs=[spanning(None)]), measured=measured
    )
    assert place("big", empty, NOW).takes_bytes == 15 * GIB


def test_model_that_only_its_lead_is_configured_to_share_needs_its_part_on_every_node(
    model: Make, node: Make, fleet: Make
) -> None:
    held = leading(model("big", estimate=15, state=ModelState.COLD, devices=()))
    decision = place("big", fleet(node("beast", [24], held), node("benjy", [24], model("b", 20))), NOW)
    assert (decision.action, decision.node, decision.takes_bytes) == ("load", "beast", 15 * GIB)
    assert decision.evictions == (ModelOnNode("benjy", "b"),)
    by_layers = node("beast", [24], leading(held, parallel="pipeline"))
    decision = place("big", fleet(by_layers, node("benjy", [12])), NOW)
    assert (decision.action, decision.takes_bytes) == ("load", 20 * GIB)
    assert place("big", fleet(by_layers, node("benjy", [2])), NOW).action == "reject"
    renamed = place("big", fleet(node("beast", [24], held), node("known as another", [24], model("b", 20))), NOW)
    assert (renamed.action, renamed.node, renamed.evictions) == ("load", "beast", ())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nodes": ("beast",)}, "must name two or more nodes"),
        ({"nodes": ("beast", "beast")}, "each once"),
        ({"nodes": NODES, "min_devices": 3}, "cannot be shared equally by 2 nodes"),
        ({"nodes": NODES, "only_on": ("beast",)}, "served by beast"),
        ({"nodes": NODES, "pinned_on": ("benjy",)}, "served by beast"),
    ],
)
def test_catalogue_rejects_nodes_that_cannot_be_meant(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ModelSpec(id="big", **options)
