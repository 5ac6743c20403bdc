"""Every reason that placement gives, read as a sentence: it names the real cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.devices import MemoryReservation
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.placement.eviction import Protection
from cortex.fleet.placement.explain import rejection
from cortex.fleet.placement.place import place
from cortex.fleet.topology import Abilities
from cortex.wire.node.protocol import ModelLoad, ModelState

NOW = 10_000.0
GIB = 1024**3
Make = Callable[..., Any]
HELD = "only models that cannot be evicted could make room"

# One 24 GiB card with `old` (20 GiB); `m` needs 10 GiB. What is different: the node, `old`, the specs, the origin.
MEMORY_CASES: list[tuple[str, dict[str, Any], Verdict, Protection | None, str]] = [
    ("idle", {}, Verdict.FITS_AFTER_EVICTION, None, "fits after unloading old"),
    (
        "busy with one request",
        {"old": {"running": 1}},
        Verdict.BLOCKED,
        Protection.BUSY,
        "waits for old: busy with 1 request",
    ),
    (
        "busy with several requests",
        {"old": {"running": 2, "waiting": 3}},
        Verdict.BLOCKED,
        Protection.BUSY,
        "waits for old: busy with 5 requests",
    ),
    (
        "loaded a moment ago",
        {"old": {"age_s": 5}},
        Verdict.BLOCKED,
        Protection.YOUNG,
        "waits for old: loaded 5 s ago, kept for another 15 s for its other clients",
    ),
    (
        "loaded a moment ago and busy: busy is what ends last or not at all",
        {"old": {"age_s": 5, "running": 1}},
        Verdict.BLOCKED,
        Protection.BUSY,
        "waits for old: busy with 1 request",
    ),
    (
        "unloading",
        {"old": {"state": ModelState.UNLOADING, "age_s": 3}},
        Verdict.FITS_SOON,
        None,
        "fits once old is gone, which is being unloaded",
    ),
    (
        "recovering",
        {"old": {"state": ModelState.RECOVERING, "age_s": 3}},
        Verdict.BLOCKED,
        Protection.CHANGING,
        "waits for old: recovering for 3 s",
    ),
    (
        "pinned by hand",
        {"old": {"pinned": True}},
        Verdict.HELD,
        Protection.PINNED,
        f"{HELD} (old: pinned on n)",
    ),
    (
        "pinned by the catalogue",
        {"specs": {"old": {"pinned_on": ("n",)}}},
        Verdict.HELD,
        Protection.PINNED,
        f"{HELD} (old: pinned on n)",
    ),
    (
        "more important",
        {"specs": {"old": {"priority": 5}}},
        Verdict.HELD,
        Protection.PRIORITY,
        f"{HELD} (old: its priority 5 is higher than 0)",
    ),
    (
        "more important, and a background request",
        {"specs": {"old": {"priority": 5}}, "origin": "background"},
        Verdict.HELD,
        Protection.PRIORITY,
        f"{HELD} (old: its priority 5 is higher than 0)",
    ),
    (
        "a background request",
        {"origin": "background"},
        Verdict.HELD,
        Protection.BACKGROUND,
        f"{HELD} (old: background requests evict nothing)",
    ),
    (
        "a background request, and the model is busy and young",
        {"origin": "background", "old": {"running": 1, "age_s": 1}},
        Verdict.HELD,
        Protection.BACKGROUND,
        f"{HELD} (old: background requests evict nothing)",
    ),
]


@pytest.mark.parametrize(
    ("facts", "verdict", "protection", "reason"),
    [case[1:] for case in MEMORY_CASES],
    ids=[case[0] for case in MEMORY_CASES],
)
def test_reason_names_what_keeps_the_occupant(
    model: Make,
    node: Make,
    fleet: Make,
    spec: Make,
    facts: dict[str, Any],
    verdict: Verdict,
    protection: Protection | None,
    reason: str,
) -> None:
    specs = [spec("m", 10), spec("old", None, **facts.get("specs", {}).get("old", {}))]
    snapshot = fleet(node("n", [24], model("old", 20, **facts.get("old", {}))), specs=specs)
    (assessment,) = place("m", snapshot, NOW, origin=facts.get("origin", "request")).assessments
    assert (assessment.verdict, assessment.reason) == (verdict, reason)
    assert assessment.occupants[0].protection is protection


NODE_CASES: list[tuple[dict[str, Any], dict[str, Any], Verdict, str]] = [
    ({"healthy": False}, {}, Verdict.UNHEALTHY, "no poll has succeeded yet"),
    ({"healthy": False, "problem": "connection refused"}, {}, Verdict.UNHEALTHY, "connection refused"),
    (
        {"healthy": False, "sleep": "asleep", "problem": "asleep: a request that needs it wakes it"},
        {},
        Verdict.STANDBY,
        "asleep: a request that needs it wakes it",
    ),
    ({"healthy": False, "sleep": "lost", "problem": "did not come back"}, {}, Verdict.UNHEALTHY, "did not come back"),
    ({"draining": True}, {}, Verdict.DRAINING, "shutting down"),
    ({"draining": True, "drained": True}, {}, Verdict.DRAINING, "drained by the operator: run `cortex undrain n`"),
    (
        {"abilities": Abilities(takes_orders=False)},
        {},
        Verdict.NOT_LISTED,
        "does not serve this model, and does not load models on request",
    ),
    ({}, {"load": "manual"}, Verdict.MANUAL, "loaded only by the operator: run `cortex load`"),
    ({}, {"only_on": ("a", "b")}, Verdict.EXCLUDED, "loaded only on a, b (`only_on` in models.toml)"),
    ({}, {"harness": "other"}, Verdict.WRONG_HARNESS, "has no harness `other`, only torch"),
    ({}, {"tensor_parallel": 2}, Verdict.CANNOT_SPAN, "cannot span 2 devices (tensor_parallel), at most 1 per model"),
    ({"max_devices_per_model": 2}, {"tensor_parallel": 2}, Verdict.TOO_FEW_DEVICES, "needs 2 devices, has 1"),
    (
        {},
        {"min_device_vram_mb": 40 * 1024},
        Verdict.TOO_FEW_DEVICES,
        "needs 1 device of at least 40.0 GiB, has 0",
    ),
    ({"kept": 16}, {}, Verdict.TOO_SMALL, "needs 10.0 GiB per device, the largest has 8.0 GiB"),
    ({"foreign": 20}, {}, Verdict.CROWDED, "other programs use 20.0 GiB of its memory"),
]


DRAINED = {"draining": True, "drained": True}
INABILITIES = {
    Verdict.NOT_LISTED,
    Verdict.MANUAL,
    Verdict.EXCLUDED,
    Verdict.WRONG_HARNESS,
    Verdict.CANNOT_SPAN,
    Verdict.TOO_FEW_DEVICES,
    Verdict.TOO_SMALL,
}
WHILE_DRAINING = [
    (facts | drain, options, verdict, reason)
    for facts, options, verdict, reason in NODE_CASES
    if verdict in INABILITIES
    for drain in ({"draining": True}, DRAINED, DRAINED | {"healthy": False})
]
"""What keeps a node from a model while it drains, too."""


@pytest.mark.parametrize(("facts", "options", "verdict", "reason"), [*NODE_CASES, *WHILE_DRAINING])
def test_reason_names_what_is_wrong_with_the_node(
    node: Make,
    fleet: Make,
    spec: Make,
    facts: dict[str, Any],
    options: dict[str, Any],
    verdict: Verdict,
    reason: str,
) -> None:
    (assessment,) = place("m", fleet(node("n", [24], **facts), specs=[spec("m", 10, **options)]), NOW).assessments
    assert (assessment.verdict, assessment.reason) == (verdict, reason)


def test_only_the_models_that_are_in_the_way_are_named(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    small, large = model("small", 2, pinned=True), model("large", 20, devices=(1,), pinned=True)
    snapshot = fleet(node("n", [24, 24], model("old", 20, pinned=True), small, large), specs=[spec("m", 20)])
    (assessment,) = place("m", snapshot, NOW).assessments
    assert assessment.reason == f"{HELD} (old: pinned on n)"


def test_memory_that_nobody_accounts_for_is_said_to_be_so(node: Make, fleet: Make, spec: Make) -> None:
    """A device may report memory as used for a moment after a model was unloaded."""
    cold = node("n", [24])
    lagging = msgspec.structs.replace(cold.devices[0], free_bytes=GIB)
    snapshot = fleet(msgspec.structs.replace(cold, devices=(lagging,)), specs=[spec("m", 10)])
    decision = place("m", snapshot, NOW)
    assert decision.action == "wait"
    assert decision.assessments[0].reason == (
        "the device reports less free memory than its models and other programs leave"
    )


def test_load_that_was_ordered_is_waited_for(node: Make, fleet: Make, spec: Make) -> None:
    ordered = MemoryReservation(model_id="next", devices=(0,), num_bytes=20 * GIB)
    (assessment,) = place("m", fleet(node("n", [24], reservations=(ordered,)), specs=[spec("m", 10)]), NOW).assessments
    assert (assessment.verdict, assessment.reason) == (Verdict.BLOCKED, "waits for next: load ordered")


def test_cache_use_does_not_count_as_a_request(model: Make, node: Make, fleet: Make) -> None:
    (assessment,) = place("m", fleet(node("n", [24], model("m", kv=0.9, running=1))), NOW).assessments
    assert assessment.reason == "ready, requests in progress: 1"


def test_requests_that_wait_for_a_slot_of_a_ready_model_are_counted_by_class(
    model: Make, node: Make, fleet: Make
) -> None:
    held, load = model("m"), ModelLoad(running=2, waiting=4, waiting_by_class={"flex": 1, "default": 3})
    held = msgspec.structs.replace(held, status=msgspec.structs.replace(held.status, load=load))
    (assessment,) = place("m", fleet(node("n", [24], held)), NOW).assessments
    assert assessment.reason == "ready, requests in progress: 6, waiting for a slot: 4 (1 flex, 3 default)"


def test_replicas_of_a_ready_model_are_named(model: Make, node: Make, fleet: Make) -> None:
    held = model("m")
    held = msgspec.structs.replace(held, status=msgspec.structs.replace(held.status, replica_devices=((0,), (1,))))
    (assessment,) = place("m", fleet(node("n", [24], held)), NOW).assessments
    assert assessment.reason == "ready, requests in progress: 0, 2 replicas on devices 0, 1"


def test_background_request_for_a_model_that_is_too_large_does_not_wait(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    snapshot = fleet(node("n", [24], model("old", 20)), specs=[spec("m", 40)])
    error = rejection(place("m", snapshot, NOW, origin="background"))
    assert (error.code, error.status) == ("insufficient_capacity", 507)


def test_rejection_on_the_node_that_was_named_says_nothing_about_the_others(
    node: Make, fleet: Make, spec: Make
) -> None:
    snapshot = fleet(node("small", [8]), node("beast", [80]), specs=[spec("m", 20)])
    message = rejection(place("m", snapshot, NOW, origin="operator", only_on="small")).message
    assert message.startswith("m does not fit on small: needs ")
    assert "beast" not in message
    full = rejection(place("m", fleet(node("a", [8]), node("b", [8]), specs=[spec("m", 20)]), NOW)).message
    assert full.startswith("m fits nowhere in the fleet. ")


def test_every_verdict_but_those_of_a_model_in_memory_has_a_case_here() -> None:
    failed = {Verdict.FAILED, Verdict.UNSUPPORTED}  # test_explain.py
    elsewhere = {Verdict.RESIDENT, Verdict.STARTING, Verdict.ASLEEP, Verdict.FITS, *failed}
    covered = {case[2] for case in MEMORY_CASES} | {case[2] for case in NODE_CASES}
    assert covered | elsewhere == set(Verdict)
    elsewhere_kept = {Protection.UNMANAGED, Protection.PART}  # foreign servers; test_spanning.py
    assert {case[3] for case in MEMORY_CASES} | elsewhere_kept == {None, *Protection}
