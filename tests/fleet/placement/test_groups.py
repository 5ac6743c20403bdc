"""Models that several nodes run together: placement on all of them, explanations, memory charged where members are, and
evictions of all members at once.
"""

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
from cortex.fleet.topology import ModelOnNode
from cortex.wire.errors import Overloaded
from cortex.wire.node.protocol import ModelState

from ..conftest import GIB, NOW
from .group_models import NODES, able, group, leading, with_member

Make = Callable[..., Any]


@pytest.fixture
def fleet(fleet: Make) -> Make:
    """Fleets whose nodes run groups."""
    return lambda *nodes, **options: able(fleet(*nodes, **options))


def test_member_is_charged_where_it_is_and_kept_if_its_leader_is_unknown(node: Make, fleet: Make, spec: Make) -> None:
    benjy = with_member(node("benjy", [24]), 15)
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
        ({"state": ModelState.UNLOADING}, {}, Verdict.FITS_SOON, "fits once big is gone, which is being unloaded"),
        ({"state": ModelState.COLD}, {}, Verdict.BLOCKED, "which is being freed; beast has unloaded it"),
        ({}, {"healthy": False}, Verdict.BLOCKED, "beast, which serves it, is down"),
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
    benjy = with_member(node("benjy", [24]), 15)
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
    benjy = with_member(benjy, part)
    decision = place("m", fleet(beast, benjy, specs=[spec("m", 22)]), NOW, only_on="benjy")
    assert decision.assessments[0].evictions[0].model == victim


def test_evicts_a_model_on_the_same_nodes_once_for_both_parts(model: Make, node: Make, fleet: Make) -> None:
    """On the second node an older model is large enough too; the one that leaves anyway makes room there."""
    beast = node("beast", [24], leading(model("big", 15, idle_s=100)))
    benjy = with_member(node("benjy", [40], model("old", 20, idle_s=1000)), 15)
    other = group(30, "other")
    decision = place("other", fleet(beast, benjy, specs=[group(30), other]), NOW)
    assert decision.evictions == (ModelOnNode("beast", "big"),)
    assert outcome(decision) == "load other on beast (device 0) and benjy after unloading big."


def test_evicts_nothing_on_its_lead_that_the_eviction_of_a_part_makes_unnecessary(
    model: Make, node: Make, fleet: Make
) -> None:
    """On the lead a smaller model would do; the one that must leave the second node makes room there, too."""
    beast = node("beast", [24, 24], leading(model("big", 15)), model("small", 12, devices=(1,)))
    benjy = with_member(node("benjy", [24]), 15)
    other = group(30, "other")
    decision = place("other", fleet(beast, benjy, specs=[group(30), other]), NOW)
    assert decision.evictions == (ModelOnNode("beast", "big"),)


def test_sleeping_model_holds_no_devices_and_wakes_on_those_it_had(model: Make, node: Make, fleet: Make) -> None:
    beast = node("beast", [24], leading(model("big", 15, state=ModelState.ASLEEP)))
    benjy = node("benjy", [24, 24], model("b", 20, devices=(1,)))
    benjy = with_member(benjy, 1, state=ModelState.ASLEEP, devices=(1,), host_bytes=GIB)
    assert ledger(benjy)[0].holdings == ()
    other = group(30, "other")
    snapshot = fleet(beast, benjy, specs=[group(30), other])
    assert place("other", snapshot, NOW).evictions == ()
    decision = place("big", snapshot, NOW)
    assert (decision.action, decision.node, decision.parts[0].devices) == ("wake", "beast", (1,))
    assert decision.evictions == (ModelOnNode("benjy", "b"),)


@pytest.fixture
def test_needs_its_part_on_every_node_and_is_served_by_the_first(node: Make, fleet: Make) -> None:
    snapshot = fleet(node("benjy", [24]), node("other", [80]), node("beast", [24]), specs=[group(30)])
    decision = place("big", snapshot, NOW)
    assert (decision.action, decision.node, decision.devices, decision.takes_bytes) == ("load", "beast", (0,), 15 * GIB)
    assert [(part.node, part.verdict, part.takes_bytes) for part in decision.parts] == [
        ("benjy", Verdict.FITS, 15 * GIB)
    ]
    assert outcome(decision) == "load big on beast (device 0) and benjy."
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
        (
            {"draining": True, "drained": True},
            Verdict.DRAINING,
            "benjy: drained by the operator: run `cortex undrain benjy`",
        ),
        ({"name": "renamed"}, Verdict.UNHEALTHY, "benjy: the fleet has no such node; add it under [[neurons]]"),
        ({"harnesses": ("torch",)}, Verdict.WRONG_HARNESS, "benjy: has no harness `vllm`"),
        (
            {"harnesses": ("vllm",), "group_harnesses": ()},
            Verdict.WRONG_HARNESS,
            "benjy: cannot run `vllm` together with other nodes: set `cluster_address` in its neuron.toml, and `group` "
            "of the harness unless it is ready-made",
        ),
    ],
)
def test_is_not_loaded_while_one_of_its_nodes_cannot_take_part(
    node: Make, fleet: Make, change: dict[str, Any], verdict: Verdict, reason: str
) -> None:
    snapshot = fleet(node("beast", [24]), node("benjy", [24]), specs=[group(30)])
    nodes = (snapshot.nodes[0], msgspec.structs.replace(snapshot.nodes[1], **change))
    decision = place("big", msgspec.structs.replace(snapshot, nodes=nodes), NOW)
    (lead,) = [each for each in decision.assessments if each.node == "beast"]
    assert (decision.action, lead.verdict, lead.reason, lead.devices) == ("reject", verdict, reason, ())


def test_members_are_chosen_from_the_nodes_of_only_on(node: Make, fleet: Make) -> None:
    nodes = (node("a", [80]), node("b", [24]), node("c", [24]))
    decision = place("big", fleet(*nodes, specs=[group(nodes=2, only_on=("b", "c"))]), NOW)
    assert (decision.action, {decision.node, *(part.node for part in decision.parts)}) == ("load", {"b", "c"})
    decision = place("big", fleet(*nodes, specs=[group(nodes=2, only_on=("b",))]), NOW)
    assert decision.action == "reject"


def test_is_not_loaded_where_its_part_exceeds_the_smallest_node(node: Make, fleet: Make) -> None:
    decision = place("big", fleet(node("beast", [80]), node("benjy", [12]), specs=[group(30)]), NOW)
    assert decision.assessments[0].verdict is Verdict.TOO_SMALL
    assert decision.assessments[0].reason.startswith("benjy: needs 15.0 GiB per device, the largest has 12.0 GiB")


def test_rejection_has_the_numbers_and_the_code_of_the_node_that_decides(model: Make, node: Make, fleet: Make) -> None:
    snapshot = fleet(node("beast", [24]), node("benjy", [24], model("b", 20)), specs=[group(30)])
    error = rejection(place("big", snapshot, NOW, origin="background"))
    assert isinstance(error, Overloaded), "another request may evict b"
    assert "benjy: only models that cannot be evicted" in error.message
    assert "(need 15.0 GiB, have 4.0 GiB)" in error.message


def test_evicts_on_every_node(model: Make, node: Make, fleet: Make) -> None:
    beast, benjy = node("beast", [24], model("a", 20)), node("benjy", [24], model("b", 20))
    decision = place("big", fleet(beast, benjy, specs=[group(30)]), NOW)
    assert decision.action == "load"
    assert decision.evictions == (ModelOnNode("beast", "a"), ModelOnNode("benjy", "b"))
    assert outcome(decision) == "load big on beast (device 0) and benjy after unloading a, b on benjy."
    assert as_json(decision)["victims"] == ["a", "b"]
    assert as_json(decision)["nodes"][0]["parts"][0]["victims"] == ["b"]


@pytest.mark.parametrize("ceilings", [(None, 16), (20, 16), (16, 20), (16, None)])
def test_ceiling_of_each_node_limits_its_part(node: Make, fleet: Make, ceilings: tuple[int | None, int | None]) -> None:
    expected = tuple(None if ceiling is None else ceiling * GIB for ceiling in ceilings)
    nodes = [
        msgspec.structs.replace(node(name, [24]), ceiling_bytes=ceiling)
        for name, ceiling in zip(NODES, expected, strict=True)
    ]
    assert place("big", fleet(*nodes, specs=[group(30)]), NOW).max_bytes == expected


def test_sleeping_part_whose_device_is_held_is_loaded_on_another(model: Make, node: Make, fleet: Make) -> None:
    beast = node("beast", [24], leading(model("big", 15, state=ModelState.ASLEEP)))
    benjy = with_member(node("benjy", [24, 24], model("b", 20, pinned=True)), 0, state=ModelState.ASLEEP)
    decision = place("big", fleet(beast, benjy, specs=[group(30)]), NOW)
    assert (decision.action, decision.parts[0].devices, decision.evictions) == ("load", (1,), ())


def test_takes_equally_many_devices_on_each_node(node: Make, fleet: Make) -> None:
    nodes = [msgspec.structs.replace(node(name, [24, 24]), max_devices_per_model=2) for name in NODES]
    decision = place("big", fleet(*nodes, specs=[group(80, tensor_parallel=4)]), NOW)
    assert (decision.devices, decision.parts[0].devices) == ((0, 1), (0, 1))
    three = [msgspec.structs.replace(node(name, [24] * 3), max_devices_per_model=3) for name in NODES]
    assert place("big", fleet(*three, specs=[group(80, tensor_parallel=6)]), NOW).devices == (0, 1, 2)
    assert place("big", fleet(*nodes, specs=[group(80, tensor_parallel=2)]), NOW).action == "reject"


@pytest.mark.parametrize(("drained", "reason"), [(True, "drained by the operator"), (False, "shutting down")])
def test_model_drains_with_a_node_that_has_a_part_of_it(
    model: Make, node: Make, fleet: Make, drained: bool, reason: str
) -> None:
    benjy = msgspec.structs.replace(with_member(node("benjy", [24]), 15), draining=True, drained=drained)
    snapshot = fleet(node("beast", [24], leading(model("big", 15))), benjy, specs=[group(30)])
    assert list(snapshot.replicas("big")) == []
    (lead,) = place("big", snapshot, NOW, only_on="beast").assessments
    assert lead.verdict is Verdict.DRAINING
    assert f"benjy runs a part of it, and is {reason}" in lead.reason


def test_measured_size_is_that_of_the_whole_model(model: Make, node: Make, fleet: Make) -> None:
    held = model("big", 15)
    held = msgspec.structs.replace(held, status=msgspec.structs.replace(held.status, nodes=NODES))
    snapshot = fleet(node("beast", [24], held), with_member(node("benjy", [24]), 15), specs=[group(None)])
    measured = measurements(snapshot)
    assert list(measured.values()) == [30 * GIB]
    empty = msgspec.structs.replace(
        fleet(node("beast", [24]), node("benjy", [24]), specs=[group(None)]), measured=measured
    )
    assert place("big", empty, NOW).takes_bytes == 15 * GIB


def test_count_of_nodes_takes_the_best_ones_and_any_of_them_may_lead(model: Make, node: Make, fleet: Make) -> None:
    full = node("a", [24], model("busy", 20, running=1))
    idle = node("d", [24], model("idle", 20))
    snapshot = fleet(full, node("b", [24]), node("c", [24]), idle, specs=[group(nodes=2)])
    decision = place("big", snapshot, NOW)
    assert (decision.action, {decision.node, decision.parts[0].node}, decision.evictions) == ("load", {"b", "c"}, ())
    three = msgspec.structs.replace(snapshot.catalogue, models=(group(45, nodes=3),))
    decision = place("big", msgspec.structs.replace(snapshot, catalogue=three), NOW)
    assert {decision.node, *(part.node for part in decision.parts)} == {"b", "c", "d"}
    assert decision.evictions == (ModelOnNode("d", "idle"),)
    five = msgspec.structs.replace(snapshot.catalogue, models=(group(nodes=5),))
    decision = place("big", msgspec.structs.replace(snapshot, catalogue=five), NOW)
    assert (decision.action, decision.assessments[0].verdict) == ("reject", Verdict.CANNOT_SPAN)
    assert "needs 5 nodes that run the harness `vllm` together, and there are 4" in decision.assessments[0].reason


def test_node_with_a_member_neither_leads_the_model_nor_starts_another(model: Make, node: Make, fleet: Make) -> None:
    beast, benjy = node("beast", [80], leading(model("big", 15))), with_member(node("benjy", [80]), 15)
    snapshot = fleet(beast, benjy, specs=[group(nodes=2)])
    verdicts = {each.node: (each.verdict, each.reason) for each in place("big", snapshot, NOW).assessments}
    assert verdicts["beast"] == (Verdict.RESIDENT, "ready, requests in progress: 0, parts on benjy")
    assert verdicts["benjy"] == (Verdict.EXCLUDED, "runs a part of it, which beast serves")


def test_group_waits_for_members_of_an_earlier_start_to_end(node: Make, fleet: Make) -> None:
    parts = [with_member(node(name, [80]), 15) for name in ("benjy", "carol")]
    decision = place("big", fleet(node("beast", [80]), *parts, specs=[group(nodes=3)]), NOW)
    assert decision.action == "wait"
    reasons = {each.node: each.reason for each in decision.assessments}
    assert reasons["beast"] == "benjy: still has a member of its previous start, which is being ended"
    four = place("big", fleet(node("beast", [80]), *parts, specs=[group(nodes=4)]), NOW)
    assert (four.action, four.assessments[0].verdict) == ("reject", Verdict.CANNOT_SPAN)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nodes": ("beast",)}, "must name 2 to 64 nodes"),
        ({"nodes": ("beast", "beast")}, "each once"),
        ({"nodes": NODES, "tensor_parallel": 3}, "cannot be shared equally by 2 nodes"),
        ({"nodes": NODES, "only_on": ("beast",)}, "served by beast"),
        ({"nodes": NODES, "pinned_on": ("benjy",)}, "served by beast"),
        ({"nodes": NODES, "pipeline_parallel": 2}, "`nodes` and pipeline_parallel"),
        ({"nodes": 2, "tensor_parallel": 3}, "cannot be shared equally by 2 nodes"),
        ({"nodes": 2, "harness": None}, "the built-in engine runs on one node only"),
        ({"nodes": NODES, "harness": "torch"}, "the built-in engine runs on one node only"),
    ],
)
def test_catalogue_rejects_nodes_that_cannot_be_meant(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ModelSpec(id="big", **({"harness": "vllm"} | options))
