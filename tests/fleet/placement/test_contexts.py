"""How much context a load gets, and what is evicted for it.

The model has a context of 131,072 tokens, which takes 16 GiB beyond 2 GiB of weights; 32,768 tokens take 4 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given

from cortex.fleet.memory import ledger, measurements, need_of
from cortex.fleet.placement.decision import Decision, Verdict
from cortex.fleet.placement.explain import as_json, outcome
from cortex.fleet.placement.fitting import eligible_devices
from cortex.fleet.placement.occupants import occupants_of
from cortex.fleet.placement.place import place
from cortex.fleet.topology import Fleet
from cortex.wire.node.contexts import ContextSize, ContextSizes, tolerated, wanted
from cortex.wire.node.protocol import ModelState

from .test_properties import NEWCOMER, NOW, fleets

GIB = 1024**3
FULL = 131_072
AGENTS = 32_768
Make = Callable[..., Any]


def contexts(empty: float = 66) -> ContextSizes:
    """`empty`: the GiB of an empty device."""
    points = [(1, 2.0), (FULL, 18.0)]
    return ContextSizes(
        limit_tokens=FULL,
        full_tokens=FULL,
        wanted_tokens=wanted(FULL, None),
        empty_tokens=min(FULL, int((empty - 2) / 16 * FULL)),
        full_bytes=66 * GIB,
        sizes=tuple(ContextSize(tokens=tokens, num_bytes=int(size * GIB)) for tokens, size in points),
    )


@pytest.fixture
def cold(model: Make) -> Make:
    """The model, as a node reports it that would give it at most `estimate` GiB."""

    def make(estimate: float = 66, **facts: Any) -> Any:
        facts = {"contexts": contexts(estimate), "least": 2, "state": ModelState.COLD} | facts
        return model("m", estimate=estimate, **facts)

    return make


def shown(decision: Decision) -> tuple[str, tuple[str, ...], int]:
    """What is decided, what is evicted, and how many thousands of tokens there are for it."""
    chosen = decision.assessments[0]
    return decision.action, decision.victims, round((chosen.context_tokens or 0) / 1024)


@pytest.mark.parametrize(
    ("size", "held", "expected"),
    [
        (80, {}, ("load", (), 128)),
        (20, {}, ("load", (), 128)),
        (24, {"size": 1}, ("load", (), 128)),
        (24, {"size": 12}, ("load", ("old",), 128)),
        (80, {"size": 70}, ("load", ("old",), 128)),
        (12, {}, ("load", (), 80)),
        (12, {"size": 1}, ("load", (), 72)),
        (12, {"size": 4}, ("load", ("old",), 80)),
        (12, {"size": 9}, ("load", ("old",), 80)),
        (5, {}, ("load", (), 24)),
        (5, {"size": 1}, ("load", ("old",), 24)),
    ],
    ids=str,
)
def test_idle_models_are_evicted_for_the_longest_context_that_an_empty_device_holds(
    cold: Make, model: Make, node: Make, fleet: Make, size: float, held: dict[str, Any], expected: Any
) -> None:
    others = [model("old", **held)] if held else []
    assert shown(place("m", fleet(node("n", [size], cold(min(size, 66)), *others)), NOW)) == expected


def test_node_that_gives_it_more_context_is_preferred_to_one_that_it_fills(
    cold: Make, model: Make, node: Make, fleet: Make
) -> None:
    small, large = node("small", [12], cold(12)), node("large", [26], cold(24), model("other", 4))
    decision = place("m", fleet(small, large), NOW)
    assert (decision.node, *shown(decision)) == ("large", "load", (), 128)
    similar = [node(name, [size], cold(size)) for name, size in (("b", 12.4), ("a", 12.1))]
    assert place("m", fleet(*similar), NOW).node == "a", "a little more context decides nothing"


def test_model_does_not_load_with_a_small_context_next_to_an_idle_one(
    cold: Make, model: Make, node: Make, fleet: Make
) -> None:
    """The free memory holds some 4,000 tokens."""
    snapshot = fleet(node("n", [20], cold(18), model("idle", 17.4)))
    assert shown(place("m", snapshot, NOW)) == ("load", ("idle",), 128)


@pytest.mark.parametrize("facts", [{"running": 1}, {"age_s": 1}, {"state": ModelState.LOADING}])
def test_waits_for_models_that_can_be_evicted_later(
    cold: Make, model: Make, node: Make, fleet: Make, facts: dict[str, Any]
) -> None:
    snapshot = fleet(node("n", [20], cold(18), model("old", 17.4, **facts)))
    assert shown(place("m", snapshot, NOW)) == ("wait", (), 0)


def test_what_agents_need_is_enough_while_the_rest_is_busy(cold: Make, model: Make, node: Make, fleet: Make) -> None:
    held = [model("busy", 6, running=1), model("idle", 8)]
    assert shown(place("m", fleet(node("n", [20], cold(18), *held)), NOW)) == ("load", ("idle",), 96)


@pytest.mark.parametrize("origin", ["request", "operator"])
def test_less_is_loaded_only_where_evictions_cannot_help_and_then_it_is_said(
    cold: Make, model: Make, node: Make, fleet: Make, origin: Any
) -> None:
    held = [model("kept", 15, pinned=True)]
    decision = place("m", fleet(node("n", [20], cold(18), *held)), NOW, origin=origin)
    assert shown(decision) == ("load", (), 24)
    chosen = decision.assessments[0]
    assert chosen.is_short
    assert chosen.min_context_tokens == 1
    assert "a context of 32,768 tokens is not possible: only models that cannot be evicted" in chosen.reason
    assert outcome(decision) == (
        "load m on n (device 0). It takes 5.0 GiB, with a context of only about 24,576 of 131,072 tokens."
    )
    told = as_json(decision)["nodes"][0]
    assert (told["context_tokens"], told["full_context_tokens"], told["context_is_short"]) == (24_576, FULL, True)
    assert told["takes_bytes"] == 5 * GIB


def test_rejection_does_not_repeat_its_reason_for_the_context_that_is_wanted(
    cold: Make, model: Make, node: Make, fleet: Make
) -> None:
    held = [model("kept", 19.9, pinned=True)]
    rejected = place("m", fleet(node("n", [20], cold(18), *held)), NOW).assessments[0]
    assert rejected.reason == "only models that cannot be evicted could make room (kept: pinned on n)"


def test_idle_models_are_evicted_next_to_one_that_must_stay(cold: Make, model: Make, node: Make, fleet: Make) -> None:
    """Without the idle model there are 24,000 tokens, with it 1,600."""
    held = [model("kept", 15, pinned=True), model("idle", 2.8)]
    assert shown(place("m", fleet(node("n", [20], cold(18), *held)), NOW)) == ("load", ("idle",), 24)


def test_background_request_does_not_load_less_where_another_request_would_evict(
    cold: Make, model: Make, node: Make, fleet: Make
) -> None:
    decision = place("m", fleet(node("n", [20], cold(18), model("idle", 17.4))), NOW, origin="background")
    assert decision.action == "reject"
    assert decision.assessments[0].waits_for_foreground


def test_other_programs_leave_less_and_are_not_waited_for(cold: Make, node: Make, fleet: Make) -> None:
    decision = place("m", fleet(node("n", [20], cold(18), foreign=15)), NOW)
    assert shown(decision) == ("load", (), 24)
    assert "other programs use 15.0 GiB" in decision.assessments[0].reason


def test_node_with_the_wanted_context_comes_before_one_with_less(
    cold: Make, model: Make, node: Make, fleet: Make
) -> None:
    """Whether it must evict for it or wait. Where none has it, the node that has less free comes into question."""
    small = node("small", [4], cold(4))
    evicts = node("wide", [24], cold(24), model("old", 22))
    waits = node("wide", [24], cold(24), model("old", 22, running=1))
    never = node("wide", [24], cold(24), model("old", 21, pinned=True))
    assert [place("m", fleet(small, each), NOW).node for each in (evicts, waits, never)] == ["wide", None, "small"]
    assert place("m", fleet(small, waits), NOW).action == "wait"


@pytest.mark.parametrize(
    ("named", "size", "expected"),
    [(8192, 4, ("load", ("old",), 8)), (8192, 5, ("load", (), 8)), (65_536, 11, ("load", ("old",), 64))],
)
def test_context_of_the_catalogue_is_what_models_are_evicted_for(
    cold: Make, model: Make, node: Make, fleet: Make, spec: Make, named: int, size: float, expected: Any
) -> None:
    snapshot = fleet(node("n", [size], cold(size), model("old", 1.8)), specs=[spec("m", None, context_tokens=named)])
    decision = place("m", snapshot, NOW)
    assert shown(decision) == expected
    assert decision.assessments[0].min_context_tokens == tolerated(named)


def test_context_of_the_catalogue_bounds_what_the_load_is_counted_as(
    cold: Make, node: Make, fleet: Make, spec: Make
) -> None:
    decision = place("m", fleet(node("n", [80], cold()), specs=[spec("m", None, context_tokens=8192)]), NOW)
    assert decision.takes_bytes == 6 * GIB, "four contexts of 1 GiB and the weights"


def test_context_of_the_catalogue_counts_where_the_node_names_a_shorter_one(
    cold: Make, node: Make, fleet: Make, spec: Make
) -> None:
    short = cold(estimate=6, contexts=contexts().named(8192))
    nodes = [node("has", [80], short), node("lacks", [80])]
    decision = place("m", fleet(*nodes, specs=[spec("m", None, context_tokens=AGENTS)]), NOW)
    assert [each.takes_bytes for each in decision.assessments] == [18 * GIB, 18 * GIB]


def test_load_that_found_little_room_is_no_measure_for_the_next(cold: Make, node: Make, fleet: Make) -> None:
    """It had taken 3 GiB on a full device. Where it found its room, the measured size counts."""
    cut = msgspec.structs.replace(
        cold(66).status, state=ModelState.READY, measured_bytes=3 * GIB, devices=(0,), context_tokens=8192
    )
    held = msgspec.structs.replace(cold(66), status=cut)
    snapshot = fleet(node("n", [80], held))
    assert measurements(snapshot) == {}
    whole = msgspec.structs.replace(held, status=msgspec.structs.replace(cut, measured_bytes=67 * GIB))
    assert measurements(fleet(node("n", [80], whole))) == {("m", None, None): 67 * GIB}
    snapshot = msgspec.structs.replace(fleet(node("n", [80], cold(66))), measured={("m", None, None): 3 * GIB})
    need = need_of(snapshot.catalogue.spec("m"), snapshot.nodes[0], snapshot)
    assert need is not None
    assert need.takes_bytes == 66 * GIB


def test_model_is_resident_with_the_context_that_it_has(model: Make, node: Make, fleet: Make) -> None:
    short = model("m", 3, contexts=contexts(), context_tokens=4480)
    decision = place("m", fleet(node("n", [24], short)), NOW)
    assert decision.assessments[0].context_tokens == 4480
    assert "context 4,480 of 131,072 tokens" in decision.assessments[0].reason


@given(fleets)
def test_less_than_the_wanted_context_is_loaded_only_where_evictions_cannot_make_room(fleet: Fleet) -> None:
    """No device of any node would have room for it, were all models gone that may go, now or later."""
    decision = place(NEWCOMER, fleet, NOW)
    spec = fleet.catalogue.spec(NEWCOMER)
    if decision.action != "load" or not decision.assessments[0].is_short or spec.tensor_parallel > 1:
        return
    for node in fleet.nodes:
        found = next(each for each in decision.assessments if each.node == node.name)
        need = need_of(spec, node, fleet)
        if need is None or found.verdict not in (Verdict.FITS, Verdict.FITS_AFTER_EVICTION, Verdict.BLOCKED):
            continue
        devices = ledger(node, newcomer=NEWCOMER)
        occupants = occupants_of(spec, node, devices, fleet, NOW, "request", frozenset())
        kept = {each.model_id for each in occupants if each.protection is not None and not each.protection.is_temporary}
        held = node.residencies.get(NEWCOMER)
        allowed = () if held is None else held.status.allowed_devices
        for device in eligible_devices(devices):
            if allowed and device.index not in allowed:
                continue
            freed = sum(held.num_bytes for held in device.holdings if held.model_id not in kept)
            could_take = min(device.usable_bytes(device.balance_bytes + freed), device.capacity_bytes)
            is_wide = device.total_bytes >= spec.min_device_vram_mb << 20
            has_ceiling = device.ceiling_bytes is not None or device.node_left_bytes is not None
            assert not is_wide or has_ceiling or need.is_short(could_take)
