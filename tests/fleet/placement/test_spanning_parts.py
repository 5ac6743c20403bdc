"""Parts of models that span nodes: memory charged where they are, devices that they share with none, evictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.devices import MemoryReservation
from cortex.fleet.memory import ledger
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.placement.explain import outcome
from cortex.fleet.placement.place import place
from cortex.fleet.topology import ModelOnNode
from cortex.wire.node.protocol import ModelShare, ModelState

from ..conftest import GIB, NOW
from .spanning_models import NODES, leading, spanning, with_share

Make = Callable[..., Any]


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
        ({"state": ModelState.UNLOADING}, {}, Verdict.FITS_SOON, "fits once big is gone, which is being unloaded"),
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
        ({"tensor_parallel": 2}, True, Verdict.FITS_AFTER_EVICTION),
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
