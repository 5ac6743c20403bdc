"""Which node and devices a model gets, and why the others do not get it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.catalogue import SwapGroup
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.placement.explain import rejection
from cortex.fleet.placement.place import place, place_new, unmet_pins
from cortex.fleet.rules import PlacementRules
from cortex.fleet.topology import Abilities
from cortex.wire.node.protocol import ModelState

GIB = 1024**3
NOW = 10_000.0
Make = Callable[..., Any]


def verdicts(decision: Any) -> dict[str, Verdict]:
    return {assessment.node: assessment.verdict for assessment in decision.assessments}


def test_prefers_least_loaded_resident_replica(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(
        node("busy", [24], model("m", running=3)),
        node("calm", [24], model("m", running=1)),
        node("empty", [80]),
        specs=[spec("m")],
    )
    decision = place("m", snapshot, NOW)
    assert (decision.action, decision.node, decision.victims) == ("route", "calm", ())
    assert verdicts(decision) == {"calm": "resident", "busy": "resident", "empty": "fits"}


def test_verdicts_rank_from_resident_to_too_small(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    nodes = [
        node("resident", [24], model("m", running=9)),
        node("starting", [24], model("m", state=ModelState.LOADING)),
        node("asleep", [24], model("m", state=ModelState.ASLEEP)),
        node("fits", [24]),
        node("evicts", [12], model("old", 10)),
        node("blocked", [12], model("old", 10, running=1)),
        node("small", [4]),
    ]
    actions = []
    while nodes:
        decision = place("m", fleet(*reversed(nodes), specs=[spec("m")]), NOW)
        assert decision.assessments[0].node == nodes[0].name
        actions.append(decision.action)
        nodes.pop(0)
    assert actions == ["route", "join", "wake", "load", "load", "wait", "reject"]


def test_sleeping_model_wakes_on_its_device(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    asleep = model("m", 8, state=ModelState.ASLEEP, devices=(1,))
    snapshot = fleet(node("n", [12, 24], asleep), specs=[spec("m")])
    decision = place("m", snapshot, NOW)
    assert (decision.action, decision.devices) == ("wake", (1,))
    assert decision.assessments[0].reason.startswith("asleep on this node; needs 8.0 GiB")


def test_prefers_evicting_on_the_node_where_the_model_is_asleep(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    asleep = model("m", 8, state=ModelState.ASLEEP)
    nodes = node("a", [12], model("x", 10)), node("b", [12], model("y", 10), asleep)
    decision = place("m", fleet(*nodes, specs=[spec("m", 8)]), NOW)
    assert (decision.action, decision.node, decision.victims) == ("wake", "b", ("y",))


def test_sleeping_model_loads_elsewhere_when_its_device_is_held(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    asleep = model("m", 8, state=ModelState.ASLEEP, devices=(0,))
    here = node("n", [12, 12], model("x", 10, devices=(0,), pinned=True), asleep)
    decision = place("m", fleet(here, specs=[spec("m", 8)]), NOW)
    assert (decision.action, decision.devices) == ("load", (1,))


def test_pinned_node_comes_first_among_equals(node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("a", [12]), node("z", [80]), specs=[spec("m", pinned_on=("z",))])
    assert place("m", snapshot, NOW).node == "z"


def test_tightest_fit_keeps_large_devices_free(node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("large", [80]), node("tight", [12, 10, 24]), specs=[spec("m", 9)])
    decision = place("m", snapshot, NOW)
    assert (decision.node, decision.devices) == ("tight", (1,))


def test_spread_uses_the_device_with_most_free_memory(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    nodes = [node("full", [24], model("old", 4)), node("empty", [20, 24])]
    packed = fleet(*nodes, specs=[spec("m", 9)])
    spread = msgspec.structs.replace(packed, placement=PlacementRules(strategy="spread"))
    assert [(place("m", each, NOW).node, place("m", each, NOW).devices) for each in (packed, spread)] == [
        ("empty", (0,)),
        ("empty", (1,)),
    ]
    halved = msgspec.structs.replace(spread, nodes=(nodes[0], node("small", [12])))
    assert place("m", halved, NOW).node == "full", "20 GiB are free there, 12 on the other"


def test_model_is_loaded_only_where_the_catalogue_allows_it(node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("a", [24]), node("b", [80]), specs=[spec("m", only_on=("b",))])
    decision = place("m", snapshot, NOW, origin="operator")
    assert (decision.node, verdicts(decision)) == ("b", {"b": "fits", "a": "excluded"})
    nowhere = place("m", fleet(node("a", [24]), specs=[spec("m", only_on=("b",))]), NOW)
    assert "a cannot serve m now: loaded only on b" in rejection(nowhere).message
    with pytest.raises(ValueError, match="pinned on a, which `only_on` excludes"):
        spec("m", only_on=("b",), pinned_on=("a", "b"))


@pytest.mark.parametrize(
    ("size", "tensor_parallel", "devices", "expected"),
    [
        (20, 1, [24, 24], (0,)),
        (30, 1, [24, 24], (0, 1)),
        (30, 1, [24, 24, 24], (0, 1)),
        (60, 1, [24, 24, 24], ()),
        (60, 1, [24, 24, 24, 24], (0, 1, 2, 3)),
        (6, 2, [8, 8], (0, 1)),
        (6, 2, [24], ()),
        (30, 1, [24, 8], ()),
        (30, 1, [16, 8, 24], (0, 2)),
    ],
)
def test_spreads_over_the_fewest_devices_that_can_hold_the_model(
    node: Make,
    fleet: Make,
    spec: Make,
    size: float,
    tensor_parallel: int,
    devices: list[float],
    expected: tuple[int, ...],
) -> None:
    host = node("n", devices, max_devices_per_model=8)
    decision = place("m", fleet(host, specs=[spec("m", size, tensor_parallel=tensor_parallel)]), NOW)
    assert decision.devices == expected
    if not expected:
        assert decision.action == "reject"


def test_device_with_the_least_room_decides_the_share_of_all(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    cold = model("m", state=ModelState.COLD, devices=(), estimate=40, least=10)
    host = node("n", [24, 12], cold, max_devices_per_model=2)
    decision = place("m", fleet(host, specs=[spec("m", None, tensor_parallel=2)]), NOW)
    assert (decision.action, decision.devices) == ("load", (0, 1))
    assert "device 1 with 12.0 GiB free decides the share of each" in decision.assessments[0].reason
    assert decision.assessments[0].takes_bytes == 24 * GIB


def test_takes_as_many_devices_as_the_node_has_configured_for_the_model(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    cold = model("m", state=ModelState.COLD, devices=(), estimate=8)
    cold = msgspec.structs.replace(cold, status=msgspec.structs.replace(cold.status, num_devices=2))
    decision = place("m", fleet(node("n", [24, 24], cold, max_devices_per_model=2), specs=[spec("m")]), NOW)
    assert decision.devices == (0, 1)


def test_never_spreads_a_model_over_more_devices_than_its_node_supports(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    """Without the limit, `m` would evict `old` for two devices that the node then rejects."""
    held = model("old", 20)
    decision = place("m", fleet(node("n", [24, 24], held), specs=[spec("m", 40)]), NOW)
    assert (decision.action, decision.victims) == ("reject", ())
    assert decision.assessments[0].verdict is Verdict.TOO_SMALL
    assert "the node runs a model on one device" in decision.assessments[0].reason
    wide = place("m", fleet(node("n", [24, 24], held, max_devices_per_model=2), specs=[spec("m", 40)]), NOW)
    assert (wide.action, wide.devices, wide.victims) == ("load", (0, 1), ("old",))


def test_rejects_tensor_parallel_beyond_what_any_node_supports(node: Make, fleet: Make, spec: Make) -> None:
    hosts = node("a", [24, 24]), node("b", [24, 24, 24, 24], max_devices_per_model=2)
    decision = place("m", fleet(*hosts, specs=[spec("m", 8, tensor_parallel=4)]), NOW)
    assert decision.action == "reject"
    assert verdicts(decision) == {"a": "cannot_span", "b": "cannot_span"}
    error = rejection(decision)
    assert error.code == "insufficient_capacity"
    assert "no node can run m over the devices that it asks for" in error.message
    assert "a: cannot span 4 devices (tensor_parallel), at most 1 per model" in error.message


def test_a_node_that_can_span_enough_devices_is_preferred(node: Make, fleet: Make, spec: Make) -> None:
    hosts = node("narrow", [24, 24]), node("wide", [24, 24], max_devices_per_model=2)
    decision = place("m", fleet(*hosts, specs=[spec("m", 8, tensor_parallel=2)]), NOW)
    assert (decision.node, decision.devices) == ("wide", (0, 1))


def test_ignores_devices_below_min_device_vram(node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [8, 24]), specs=[spec("m", 4, min_device_vram_mb=10_000)])
    assert place("m", snapshot, NOW).devices == (1,)


def test_evicts_on_the_node_with_fewest_bytes_to_free(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(
        node("a", [24], model("large", 20, idle_s=9999)),
        node("b", [24], model("small", 17, idle_s=50)),
        specs=[spec("m", 10)],
    )
    decision = place("m", snapshot, NOW)
    assert (decision.node, decision.victims) == ("b", ("small",))


def test_victims_free_memory_on_the_chosen_devices(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    wide = model("wide", 20, devices=(0, 1), idle_s=10)
    snapshot = fleet(node("n", [24, 24], wide, model("one", 12, devices=(1,), idle_s=500)), specs=[spec("m", 22)])
    decision = place("m", snapshot, NOW)
    assert (decision.action, decision.devices, decision.victims) == ("load", (0,), ("wide",))


@pytest.mark.parametrize(
    ("occupant", "facts", "verdict", "reason"),
    [
        ({"running": 2}, {}, "blocked", "waits for old: busy with 2 requests"),
        ({"in_flight": 1}, {}, "blocked", "waits for old: busy with 1 request"),
        ({"age_s": 5}, {}, "blocked", "waits for old: loaded 5 s ago, kept for another 15 s for its other clients"),
        ({"state": ModelState.RECOVERING, "age_s": 3}, {}, "blocked", "waits for old: recovering for 3 s"),
        (
            {"state": ModelState.UNLOADING, "age_s": 1},
            {},
            "fits_soon",
            "fits once old is gone, which is being unloaded",
        ),
        ({"pinned": True}, {}, "held", "only models that cannot be evicted could make room (old: pinned on n)"),
        (
            {},
            {"priority": 5},
            "held",
            "only models that cannot be evicted could make room (old: its priority 5 is higher than 0)",
        ),
        ({}, {"pinned_on": ("n",)}, "held", "only models that cannot be evicted could make room (old: pinned on n)"),
        ({}, {"pinned_on": ("other",)}, "fits_after_eviction", "fits after unloading old"),
        ({}, {"priority": 0}, "fits_after_eviction", "fits after unloading old"),
    ],
)
def test_occupant_gets_verdict_and_reason(
    model: Make, node: Make, fleet: Make, spec: Make, occupant: Any, facts: Any, verdict: str, reason: str
) -> None:
    snapshot = fleet(node("n", [24], model("old", 20, **occupant)), specs=[spec("m", 10), spec("old", 20, **facts)])
    found = place("m", snapshot, NOW).assessments[0]
    assert (found.verdict, found.reason) == (verdict, reason)


def test_background_request_evicts_nothing(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [24], model("main", 20)), specs=[spec("chores", 10)])
    assert place("chores", snapshot, NOW).victims == ("main",)
    decision = place("chores", snapshot, NOW, origin="background")
    assert (decision.action, verdicts(decision)) == ("reject", {"n": "held"})


@pytest.mark.parametrize(
    ("facts", "model_facts", "verdict"),
    [
        ({"healthy": False, "problem": "refused"}, {}, "unhealthy"),
        ({"draining": True}, {}, "draining"),
        ({"abilities": Abilities(takes_orders=False)}, {}, "not_listed"),
        ({"harnesses": ("llama.cpp",)}, {"harness": "torch"}, "wrong_harness"),
        ({"harnesses": ()}, {}, "wrong_harness"),
        ({}, {"load": "manual"}, "manual"),
        ({}, {"only_on": ("other",)}, "excluded"),
        ({"max_devices_per_model": 2}, {"tensor_parallel": 2}, "too_few_devices"),
        ({}, {"size": 25}, "too_small"),
        ({"foreign": 18}, {}, "crowded"),
    ],
)
def test_unusable_node_gets_its_verdict(
    node: Make, fleet: Make, spec: Make, facts: Any, model_facts: Any, verdict: str
) -> None:
    snapshot = fleet(node("n", [24], **facts), specs=[spec("m", **model_facts)])
    assert verdicts(place("m", snapshot, NOW)) == {"n": verdict}


def test_operator_loads_manual_model(node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [24]), specs=[spec("m", load="manual")])
    assert place("m", snapshot, NOW, origin="operator").action == "load"


def test_model_outside_the_catalogue_runs_where_it_is_listed(model: Make, node: Make, fleet: Make) -> None:
    snapshot = fleet(node("a", [24]), node("b", [24], model("m", state=ModelState.COLD, estimate=8)))
    decision = place("m", snapshot, NOW)
    assert (decision.node, decision.need_bytes) == ("b", 8 * GIB)
    assert verdicts(decision)["a"] == "not_listed"


def test_recently_failed_node_is_skipped(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    failed = model("m", state=ModelState.FAILED, age_s=5, reason="no such file")
    snapshot = fleet(node("a", [24], failed), node("b", [80]), specs=[spec("m")])
    decision = place("m", snapshot, NOW)
    assert decision.node == "b"
    assert decision.assessments[1].reason == "no such file"
    assert place("m", snapshot, NOW + 60).node == "a"


def test_a_decision_for_one_node_considers_no_other(node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("a", [24]), node("b", [80]), node("small", [4]), specs=[spec("m")])
    assert place("m", snapshot, NOW).node == "a"
    assert place("m", snapshot, NOW, only_on="b").node == "b"
    assert verdicts(place("m", snapshot, NOW, only_on="small")) == {"small": "too_small"}


def test_empty_fleet_rejects(fleet: Make) -> None:
    decision = place("m", fleet(), NOW)
    assert (decision.action, decision.node, decision.assessments) == ("reject", None, ())


def test_unmet_pins_lists_pinned_models_that_are_not_loaded(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(
        node("a", [24], model("here")),
        node("b", [24], model("loading", state=ModelState.LOADING)),
        node("down", [24], healthy=False),
        specs=[
            spec("here", pinned_on=("a", "b", "down", "nowhere")),
            spec("loading", load="pinned"),
            spec("anywhere", load="pinned"),
            spec("ordinary"),
        ],
    )
    assert unmet_pins(snapshot) == (("b", "here"), (None, "anywhere"))


def test_model_that_no_node_has_is_placed_by_its_size(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    pinned, alias = spec("keep", pinned_on=("pinned",)), {"new": "old"}
    snapshot = fleet(
        node("free", [24]),
        node("evicts", [24], model("old", 20)),
        node("pinned", [24], model("keep", 20)),
        node("small", [8]),
        specs=[pinned],
    )
    snapshot = msgspec.structs.replace(
        snapshot, catalogue=msgspec.structs.replace(snapshot.catalogue, aliases=dict(alias))
    )
    decision = place_new("new", 12 * GIB, snapshot, NOW)
    assert verdicts(decision) == {
        "free": "fits",
        "evicts": "fits_after_eviction",
        "pinned": "held",
        "small": "too_small",
    }
    assert (decision.node, decision.victims) == ("free", ())


def test_new_model_is_placed_by_the_rules_of_groups(model: Make, node: Make, fleet: Make) -> None:
    snapshot = fleet(node("kept", [24], model("always", 20)), node("alone", [24], model("small", 2)))
    groups = {"base": SwapGroup(members=("always",), swap=False, persistent=True)}
    persistent = msgspec.structs.replace(snapshot.catalogue, swap_groups=groups)
    decision = place_new("new", 12 * GIB, msgspec.structs.replace(snapshot, catalogue=persistent), NOW)
    assert verdicts(decision) == {"kept": "held", "alone": "fits"}
    apart = msgspec.structs.replace(snapshot.catalogue, together=(("always", "small"),))
    decision = place_new("new", 12 * GIB, msgspec.structs.replace(snapshot, catalogue=apart), NOW)
    assert verdicts(decision) == {"kept": "fits_after_eviction", "alone": "fits_after_eviction"}


def test_free_evictions_are_no_reason_for_more_of_them(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    cheap = [spec(name, 12, evict_cost=0) for name in "abc"]
    here = node("n", [24, 24], model("a", 12, devices=(0,)), model("b", 12, devices=(0,)), model("c", 20, devices=(1,)))
    decision = place("new", fleet(here, specs=[*cheap, spec("new", 22)]), NOW)
    assert decision.victims == ("c",)
