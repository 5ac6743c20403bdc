from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from cortex.fleet.placement.decision import Decision, Origin, Verdict
from cortex.fleet.placement.explain import DRAINING_RETRY_S, as_json, outcome, rejection, rows, text
from cortex.fleet.placement.place import place
from cortex.fleet.placement.search import Feasibility, search
from cortex.fleet.topology import Abilities
from cortex.wire.error_encoding import OPENAI
from cortex.wire.node.protocol import ModelState

NOW = 10_000.0
Make = Callable[..., Any]
DECIDERS: tuple[Callable[..., Decision], ...] = (place, search)


def test_table_shows_need_have_and_reason_for_every_device(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(
        node("beast", [24, 24], model("old", 20), model("chat", 18, devices=(1,), running=1)),
        node("attic", [12], foreign=9, healthy=False, problem="connection refused"),
        specs=[spec("m", 10)],
    )
    assert text(place("m", snapshot, NOW)) == (
        "node   device       total     have     need      verdict              why\n"
        "beast  0* card 24G  24.0 GiB  4.0 GiB  10.0 GiB  fits_after_eviction  fits after unloading old\n"
        "       1 card 24G   24.0 GiB  6.0 GiB  10.0 GiB\n"
        "attic  0 card 12G   12.0 GiB  3.0 GiB  10.0 GiB  unhealthy            connection refused\n"
        "load m on beast (device 0) after unloading old."
    )


@pytest.mark.parametrize(("state", "words"), [(ModelState.READY, "ready"), (ModelState.LOADING, "starting")])
def test_outcome_names_all_nodes_that_have_the_model(
    model: Make, node: Make, fleet: Make, state: ModelState, words: str
) -> None:
    held = [node(name, [24], model("m", 10, state=state)) for name in ("attic", "beast")]
    assert outcome(place("m", fleet(*held, node("cellar", [24])), NOW)) == f"m is {words} on attic, beast."


def test_json_has_the_numbers_and_reasons(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [24], model("old", 20, pinned=True)), specs=[spec("m", 10)])
    data = as_json(place("m", snapshot, NOW))
    assert (data["action"], data["node"]) == ("reject", None)
    assert data["nodes"][0]["devices"][0]["have_bytes"] == 4 * 1024**3
    assert data["nodes"][0]["occupants"] == [
        {"model": "old", "bytes": 20 * 1024**3, "host_bytes": 0, "may_leave": False, "reason": "pinned on n"}
    ]


@pytest.mark.parametrize(
    ("facts", "occupant", "origin", "status", "code", "words"),
    [
        (
            {},
            {"pinned": True},
            "request",
            507,
            "insufficient_capacity",
            "does not fit on n: .*need 10.0 GiB, have 4.0 GiB",
        ),
        ({}, {"running": 1}, "request", 503, "overloaded", "no room for m now.*busy with 1 request"),
        ({}, {}, "background", 503, "overloaded", "background requests evict nothing"),
        (
            {"healthy": False, "problem": "timed out"},
            {},
            "request",
            502,
            "upstream_unavailable",
            "n cannot serve m now: timed out",
        ),
        (
            {"draining": True, "drained": True},
            {},
            "request",
            503,
            "draining",
            "n cannot serve m now: drained by the operator: run `cortex undrain n`",
        ),
        ({"draining": True}, {}, "request", 503, "draining", "n cannot serve m now: shutting down"),
    ],
)
def test_rejection_maps_to_status_and_code(
    model: Make,
    node: Make,
    fleet: Make,
    spec: Make,
    facts: Any,
    occupant: Any,
    origin: Any,
    status: int,
    code: str,
    words: str,
) -> None:
    snapshot = fleet(node("n", [24], model("old", 20, **occupant), **facts), specs=[spec("m", 10)])
    error = rejection(place("m", snapshot, NOW, origin=origin))
    assert (error.status, error.code) == (status, code)
    with pytest.raises(type(error), match=words):
        raise error
    assert OPENAI.envelope(error)["error"]["nodes"][0]["node"] == "n"
    assert (error.retry_after_s == DRAINING_RETRY_S) == (code == "draining")


def test_failed_load_keeps_the_message_of_the_node(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    failed = model("m", state=ModelState.FAILED, age_s=1, reason="config.json is missing")
    error = rejection(place("m", fleet(node("n", [24], failed), specs=[spec("m")]), NOW))
    assert (error.code, "config.json is missing" in error.message) == ("load_failed", True)


@pytest.mark.parametrize(
    ("drained", "code"),
    [
        ({"sizes": [24]}, "draining"),
        ({"sizes": [24], "healthy": False}, "draining"),
        ({"sizes": [], "healthy": False}, "draining"),  # nothing is known about it
        ({"sizes": [8]}, "load_failed"),
        ({"sizes": [24], "abilities": Abilities(takes_orders=False)}, "load_failed"),
    ],
)
def test_drained_node_is_the_error_only_where_it_could_serve_the_model(
    model: Make, node: Make, fleet: Make, spec: Make, drained: dict[str, Any], code: str
) -> None:
    failed = node("n", [24], model("m", state=ModelState.FAILED, age_s=1, reason="weights damaged"))
    other = node("o", **{"draining": True, "drained": True, **drained})
    snapshot = fleet(failed, other, specs=[spec("m", 10)])
    for decide in (place, search):
        assert rejection(decide("m", snapshot, NOW)).code == code


def test_model_without_files_at_its_path_is_loaded_where_it_has_them(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    facts = {"state": ModelState.COLD, "reason_code": "source_not_found", "reason": "no complete model at /srv/m"}
    absent = node("a", [24], model("m", source="/srv/m", **facts))
    error = rejection(place("m", fleet(absent, specs=[spec("m")]), NOW))
    assert (error.code, "no complete model at /srv/m" in error.message) == ("load_failed", True)
    there = node("b", [24], model("m", state=ModelState.COLD, source="/srv/m"))
    assert outcome(place("m", fleet(absent, there, specs=[spec("m")]), NOW)).startswith("load m on b")
    of_hub = node("a", [24], model("m", source="org/m", **facts))  # it may be there now
    assert outcome(place("m", fleet(of_hub, specs=[spec("m")]), NOW)).startswith("load m on a")


def test_model_with_damaged_files_fits_nowhere_not_even_for_the_operator(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    facts = {"state": ModelState.COLD, "reason_code": "files_damaged", "reason": "m.gguf is truncated", "source": "/m"}
    damaged = fleet(node("a", [24], model("m", **facts)), specs=[spec("m")])
    origins: tuple[Origin, ...] = ("request", "operator")
    for decide, origin in itertools.product(DECIDERS, origins):
        decision = decide("m", damaged, NOW, origin=origin)
        assert [(each.verdict, each.reason) for each in decision.assessments] == [
            (Verdict.FAILED, "m.gguf is truncated")
        ]
    assert Feasibility(damaged, NOW).nodes("m") == ()
    other_files = fleet(node("a", [24], model("m", **facts)), specs=[spec("m", source="org/m")])
    assert outcome(place("m", other_files, NOW)).startswith("load m on a")


def test_model_that_the_node_read_and_does_not_support_fits_nowhere_not_even_for_the_operator(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    facts = {"reason_code": "model_unsupported", "reason": "mamba9000 is not supported", "source": "/m"}
    read = model("m", state=ModelState.COLD, age_s=0, **facts)
    unsupported = fleet(node("a", [24], read), specs=[spec("m", 8)])
    origins: tuple[Origin, ...] = ("request", "operator")
    for decide, origin in itertools.product(DECIDERS, origins):
        decision = decide("m", unsupported, NOW, origin=origin)
        assert [(each.verdict, each.reason) for each in decision.assessments] == [
            (Verdict.UNSUPPORTED, "mamba9000 is not supported")
        ]
    assert rejection(place("m", unsupported, NOW, origin="operator")).code == "model_unsupported"
    assert Feasibility(unsupported, NOW).nodes("m") == ()
    for other in ({"source": "org/m"}, {"harness": "vllm"}):
        elsewhere = fleet(node("a", [24], read, harnesses=("torch", "vllm")), specs=[spec("m", 8, **other)])
        assert outcome(place("m", elsewhere, NOW)).startswith("load m on a")


def test_load_that_failed_as_unsupported_may_be_tried_again_by_the_operator_and_is_not_listed_as_fitting(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    facts = {"state": ModelState.FAILED, "age_s": 1, "reason": "not so", "reason_code": "model_unsupported"}
    failed = fleet(node("a", [24], model("m", **facts)), specs=[spec("m", 8)])
    assert place("m", failed, NOW, origin="operator").action == "load"
    assert Feasibility(failed, NOW).nodes("m") == ()


def test_unsupported_model_is_the_error_only_where_every_node_says_so(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    facts = {"state": ModelState.FAILED, "age_s": 1, "reason": "mamba9000 is not supported"}
    unsupported = node("a", [24], model("m", reason_code="model_unsupported", **facts))
    failed = node("b", [24], model("m", reason_code="load_failed", **facts))
    for nodes, status in (((unsupported,), 422), ((unsupported, failed), 502)):
        error = rejection(place("m", fleet(*nodes, specs=[spec("m")]), NOW))
        assert (error.status, "mamba9000 is not supported" in error.message) == (status, True)


def test_rejection_without_nodes_or_without_the_model(node: Make, fleet: Make) -> None:
    assert "add one under [[neurons]]" in rejection(place("m", fleet(), NOW)).message
    assert rejection(place("m", fleet(node("n", [24])), NOW)).code == "model_not_found"


def test_every_outcome_is_a_sentence(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    cases = {
        "m is ready on n.": node("n", [24], model("m")),
        "m is starting on n.": node("n", [24], model("m", state=ModelState.LOADING)),
        "wake m on n (device 0).": node("n", [24], model("m", state=ModelState.ASLEEP)),
        "load m on n (device 0).": node("n", [24]),
        "m waits for room on n: waits for old: busy with 1 request.": node("n", [24], model("old", 20, running=1)),
    }
    for sentence, host in cases.items():
        decision = place("m", fleet(host, specs=[spec("m")]), NOW)
        assert outcome(decision) == sentence
        assert rows(decision)
