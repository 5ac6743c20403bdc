"""The bytes that placement counts with: estimates, measurements, reservations and what nodes keep free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from cortex.fleet.devices import MemoryReservation
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.placement.place import place
from cortex.wire.node.protocol import ModelState

GIB = 1024**3
NOW = 10_000.0
Make = Callable[..., Any]


def test_out_of_memory_raises_the_need(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [24], model("old", 12)), specs=[spec("m", 8)])
    assert place("m", snapshot, NOW).victims == ()
    shown = snapshot.with_node(msgspec.structs.replace(snapshot.nodes[0], raised_needs={"m": 14 * GIB}))
    assert place("m", shown, NOW).victims == ("old",)


def test_measured_bytes_replace_the_estimate(node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [24]), specs=[spec("m", 8)])
    snapshot = msgspec.structs.replace(snapshot, measured={("m", None, None): 30 * GIB})
    assert place("m", snapshot, NOW).action == "reject"


def test_model_of_unknown_size_goes_where_most_is_free(node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("a", [12]), node("b", [24]), specs=[spec("m", None)])
    decision = place("m", snapshot, NOW)
    assert (decision.action, decision.node, decision.need_bytes) == ("load", "b", None)


def test_reserved_memory_is_not_reserved_twice(node: Make, fleet: Make, spec: Make) -> None:
    reservation = MemoryReservation(model_id="other", devices=(0,), num_bytes=20 * GIB)
    snapshot = fleet(node("n", [24], reservations=(reservation,)), specs=[spec("m", 8), spec("other", 20)])
    assert place("m", snapshot, NOW).action == "wait"
    assert place("other", snapshot, NOW).action == "join"


def test_load_of_an_unloading_model_waits_for_its_memory(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [24], model("m", 20, state=ModelState.UNLOADING)), specs=[spec("m", 20, load="pinned")])
    assert place("m", snapshot, NOW).action == "wait"


def test_load_of_an_unloading_model_evicts_nothing_for_it(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    """Its own memory comes back when the unload ends."""
    held = model("m", 6, state=ModelState.UNLOADING), model("other", 14)
    decision = place("m", fleet(node("n", [24], *held), specs=[spec("m", 6)]), NOW)
    assert (decision.action, decision.victims) == ("wait", ())
    assert decision.assessments[0].reason == "unloading for 16 min 40 s"


def test_kept_free_bytes_are_not_available(node: Make, fleet: Make, spec: Make) -> None:
    roomy = place("m", fleet(node("n", [24], kept=2), specs=[spec("m", 22)]), NOW)
    assert roomy.action == "load"
    row = roomy.assessments[0].rows[0]
    assert (row.available_bytes, row.kept_free_bytes) == (22 * GIB, 2 * GIB)
    tight = place("m", fleet(node("n", [24], kept=2), specs=[spec("m", 23)]), NOW)
    assert (tight.action, tight.assessments[0].verdict) == ("reject", Verdict.TOO_SMALL)
    assert "the largest has 22.0 GiB" in tight.assessments[0].reason


def test_eviction_makes_room_for_what_the_node_keeps_free(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    """2 GiB must stay free: without both victims the node would reject the load."""
    held = [model("a", 8, idle_s=900), model("b", 4, idle_s=100)]
    decision = place("m", fleet(node("n", [16], *held, kept=2), specs=[spec("m", 12)]), NOW)
    assert (decision.action, set(decision.victims)) == ("load", {"a", "b"})
    decision = place("m", fleet(node("n", [16], *held), specs=[spec("m", 12)]), NOW)
    assert decision.victims == ("a",)


def test_kept_free_share_limits_what_a_load_may_take(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    host = node("n", [32], model("old", 8), kept_share=0.5)
    fits = place("m", fleet(host, specs=[spec("m", 12)]), NOW)
    assert (fits.action, fits.victims) == ("load", ())
    evicts = place("m", fleet(host, specs=[spec("m", 14)]), NOW)
    assert (evicts.action, evicts.victims) == ("load", ("old",))
    never = place("m", fleet(host, specs=[spec("m", 17)]), NOW)
    assert never.assessments[0].verdict is Verdict.TOO_SMALL


def test_model_with_reducible_cache_takes_what_is_available(model: Make, node: Make, fleet: Make) -> None:
    """Full footprint 20 GiB, comfortable 11 (8 and a quarter of the rest), minimum 8."""
    elastic = model("m", state=ModelState.COLD, estimate=20, least=8)

    def decide(*held: Any, size: float = 24) -> tuple[str, tuple[str, ...], float, float]:
        decision = place("m", fleet(node("n", [size], elastic, *held, kept=2)), NOW)
        return decision.action, decision.victims, (decision.need_bytes or 0) / GIB, (decision.takes_bytes or 0) / GIB

    assert decide() == ("load", (), 20, 20)
    assert decide(model("small", 7)) == ("load", (), 11, 15)
    assert decide(model("large", 12)) == ("load", ("large",), 11, 20)
    assert decide(model("large", 12, pinned=True)) == ("load", (), 8, 10)
    assert decide(size=13) == ("load", (), 11, 11)
    assert decide(model("large", 15, pinned=True))[0] == "reject"


def test_measured_size_beyond_capacity_is_reduced_not_rejected(model: Make, node: Make, fleet: Make) -> None:
    """The cache filled the device, and buffers grew since: the next load gets a smaller cache."""
    filled = model("m", 15, state=ModelState.COLD, least=8)
    decision = place("m", fleet(node("n", [16], filled, kept=2)), NOW)
    assert (decision.action, decision.takes_bytes) == ("load", 14 * GIB)


def test_prefers_node_with_room_for_the_full_footprint(model: Make, node: Make, fleet: Make) -> None:
    cold = model("m", state=ModelState.COLD, estimate=20, least=8)
    snapshot = fleet(node("tight", [12], cold), node("wide", [80], cold))
    assert place("m", snapshot, NOW).node == "wide"


def test_load_under_way_is_counted_as_what_it_will_take(model: Make, node: Make, fleet: Make) -> None:
    elastic = model("m", state=ModelState.COLD, estimate=20, least=8)
    decision = place("m", fleet(node("n", [16], elastic, kept=2)), NOW)
    assert decision.takes_bytes == 14 * GIB
    reservation = MemoryReservation(model_id="m", devices=(0,), num_bytes=decision.takes_bytes)
    other = model("other", state=ModelState.COLD, estimate=4, least=2)
    later = place("other", fleet(node("n", [16], elastic, other, kept=2, reservations=(reservation,))), NOW)
    assert later.action == "wait"
