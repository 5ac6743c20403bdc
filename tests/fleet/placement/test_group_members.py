"""Members of groups: memory charged where they are, and evictions of all members at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.memory import ledger
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.placement.explain import outcome
from cortex.fleet.placement.place import place
from cortex.fleet.topology import ModelOnNode
from cortex.wire.node.protocol import ModelState

from ..conftest import GIB, NOW
from .group_models import able, group, leading, with_member

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
