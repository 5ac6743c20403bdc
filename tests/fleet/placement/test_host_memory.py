"""A model that fits no device is placed across device and host memory, after nodes where it fits entirely."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec, SwapGroup
from cortex.fleet.devices import DeviceState, MemoryReservation
from cortex.fleet.memory import host_left_bytes, may_divide
from cortex.fleet.placement.explain import as_json, text
from cortex.fleet.placement.place import place
from cortex.fleet.placement.search import search
from cortex.fleet.reports import after_poll
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.wire.node.contexts import ContextSize, ContextSizes
from cortex.wire.node.host_splits import HostSplit, HostSplits, speed_in_words
from cortex.wire.node.protocol import Device, DeviceHealth, Discovery, Health, HostHealth, ModelState, ModelStatus

GB = 1 << 30
NOW = 1000.0
SPLITS = HostSplits(
    splits=(
        HostSplit(saved_bytes=2 * GB, host_bytes=3 * GB, tokens_per_s=80.0),
        HostSplit(saved_bytes=50 * GB, host_bytes=51 * GB, tokens_per_s=10.0),
    )
)
"""Of a mixture with 60 GB of weights."""


def sizes(wanted: int = 62) -> dict[str, Any]:
    contexts = ContextSizes(
        limit_tokens=131_072,
        full_tokens=131_072,
        wanted_tokens=32_768,
        empty_tokens=32_768,
        full_bytes=80 * GB,
        sizes=(ContextSize(tokens=256, num_bytes=60 * GB), ContextSize(tokens=32_768, num_bytes=wanted * GB)),
    )
    return {"estimate_bytes": 60 * GB, "least_bytes": 60 * GB, "contexts": contexts}


def mixture(splits: HostSplits | None = SPLITS, **facts: Any) -> Residency:
    return Residency(
        status=ModelStatus(id="moe", state=ModelState.COLD, host_splits=splits, **sizes(), **facts), seen_at=NOW
    )


def other(model_id: str, size: int, host: int = 0, **facts: Any) -> Residency:
    state = facts.pop("state", ModelState.READY)
    status = ModelStatus(
        id=model_id,
        state=state,
        devices=(0,),
        measured_bytes=size * GB,
        host_bytes=host * GB,
        idle_s=500.0,
        state_age_s=900.0,
    )
    return Residency(status=status, seen_at=NOW, **facts)


def node(name: str, card: int, host: int | None, *models: Residency, **facts: Any) -> Node:
    """A node with one card and a budget of host memory, in GB."""
    used = sum(held.num_bytes or 0 for held in models if held.state is ModelState.READY)
    device = DeviceState(index=0, kind="cuda", name="card", total_bytes=card * GB, free_bytes=card * GB - used)
    memory = None
    if host is not None:
        weight_bytes = sum(held.status.host_bytes for held in models if held.state is ModelState.READY)
        memory = HostHealth(
            total_bytes=256 * GB,
            free_bytes=200 * GB,
            budget_bytes=host * GB,
            weight_bytes=weight_bytes,
            locked_limit_bytes=192 * GB,
        )
    return Node(
        name=name,
        healthy=True,
        devices=(device,),
        residencies={held.model_id: held for held in models},
        host=memory,
        **facts,
    )


def fleet(*nodes: Node, **facts: Any) -> Fleet:
    return Fleet(nodes=nodes, catalogue=Catalogue(models=(ModelSpec(id="moe", **facts),)))


@pytest.mark.parametrize(
    ("nodes", "verdict", "chosen", "host_gb"),
    [
        pytest.param([node("a", 24, 100, mixture())], "fits", "a", 38.92, id="a card and a large host"),
        pytest.param([node("a", 24, 38, mixture())], "fits", "a", 36.88, id="less context where the host has less"),
        pytest.param([node("a", 24, 30, mixture())], "too_small", None, None, id="too little of the host"),
        pytest.param([node("a", 24, None, mixture())], "too_small", None, None, id="no report of the host"),
        pytest.param([node("a", 24, 100, mixture(None))], "too_small", None, None, id="weights that cannot be divided"),
        pytest.param([node("a", 9, 100, mixture())], "too_small", None, None, id="the rest does not fit the card"),
        pytest.param([node("a", 80, 100, mixture())], "fits", "a", None, id="it fits entirely"),
        pytest.param(
            [node("a", 24, 100, mixture()), node("b", 80, 100, mixture())], "fits", "b", None, id="entirely elsewhere"
        ),
        pytest.param(
            [node("a", 24, 100, mixture()), node("b", 80, 0, mixture(), other("x", 40))],
            "fits_after_eviction",
            "b",
            None,
            id="entirely elsewhere after an eviction",
        ),
        pytest.param(
            [node("a", 61, 100, mixture())], "fits", "a", 3.0, id="a part in host memory rather than a short context"
        ),
        pytest.param(
            [node("a", 24, 100, mixture(), other("x", 20))], "fits_after_eviction", "a", 38.92, id="the whole card"
        ),
        pytest.param(
            [node("a", 24, 100, mixture(), other("x", 8, pinned=True))],
            "fits",
            "a",
            46.92 + 0.17,
            id="next to a pinned model",
        ),
        pytest.param(
            [node("a", 24, 100, mixture(), other("x", 4, host=80))],
            "fits_after_eviction",
            "a",
            38.92,
            id="a victim for its host memory",
        ),
    ],
)
def test_model_is_divided_only_where_it_fits_no_device(
    nodes: list[Node], verdict: str, chosen: str | None, host_gb: float | None
) -> None:
    for decide in (place, search):
        decision = decide("moe", fleet(*nodes), NOW)
        first = decision.assessments[0]
        assert (first.verdict, decision.node) == (verdict, chosen), first.reason
        split = None if decision.chosen is None else decision.chosen.split
        assert (split is None) == (host_gb is None)
        if split is not None and host_gb is not None:
            assert split.host_bytes / GB == pytest.approx(host_gb, abs=0.25)


@pytest.mark.parametrize(
    ("setting", "is_divided"), [(None, True), ("auto", True), ("off", False), (100_000, True), (8_000, False)]
)
def test_entry_decides_how_much_may_lie_in_host_memory(setting: Any, is_divided: bool) -> None:
    decision = place("moe", fleet(node("a", 24, 100, mixture()), host_weights=setting), NOW)
    assert (decision.node == "a") is is_divided


@pytest.mark.parametrize(
    ("card", "host", "setting", "why"),
    [
        pytest.param(
            24, 30, None, "divided, it needs 37.0 GiB of host memory, and models may take 30.0 GiB of it", id="host"
        ),
        pytest.param(
            24, 100, 8_000, "divided, it needs 37.0 GiB of host memory, and its entry allows 7.8 GiB", id="entry"
        ),
        pytest.param(
            9,
            100,
            None,
            "with 51.0 GiB in host memory, the most that its layers and its `host_weights` allow, it needs 10.0 GiB",
            id="card",
        ),
    ],
)
def test_reason_says_what_keeps_a_model_from_being_divided(card: int, host: int, setting: int | None, why: str) -> None:
    decision = place("moe", fleet(node("a", card, host, mixture()), host_weights=setting), NOW)
    assert decision.action == "reject"
    assert why in text(decision)


@pytest.mark.parametrize(("setting", "is_divided"), [(None, False), ("auto", True), ("off", False), (100_000, True)])
def test_dense_model_is_divided_only_if_its_entry_says_so(setting: Any, is_divided: bool) -> None:
    dense = mixture(msgspec.structs.replace(SPLITS, is_last_resort=True))
    decision = place("moe", fleet(node("a", 24, 100, dense), host_weights=setting), NOW)
    assert (decision.node == "a") is is_divided
    hint = 'with `host_weights = "auto"` up to 51.0 GiB of it may be in host memory, about 10 tokens/s expected'
    assert (hint in text(decision)) is (setting is None)


@pytest.mark.parametrize(
    ("card", "host", "fits"), [(24, 100, True), (24, 40, True), (24, 30, False), (24, None, False)]
)
def test_files_that_no_node_has_read_may_fit_with_host_memory(card: int, host: int | None, fits: bool) -> None:
    assert may_divide(node("a", card, host, other("x", 4, host=20)), 60 * GB) is fits


def test_node_without_the_files_is_judged_by_the_report_of_another() -> None:
    small = node("files", 8, 0, mixture())
    decision = place("moe", fleet(small, node("empty", 24, 100)), NOW)
    assert decision.node == "empty"
    assert decision.chosen is not None
    assert decision.chosen.split is not None


def test_loads_do_not_get_the_same_host_memory() -> None:
    reservation = MemoryReservation(model_id="x", devices=(0,), num_bytes=GB, host_bytes=70 * GB)
    busy = node("a", 24, 100, mixture(), reservations=(reservation,))
    assert host_left_bytes(busy) == 30 * GB
    assert place("moe", fleet(busy), NOW).action == "reject"
    locked = msgspec.structs.replace(busy.host, locked_limit_bytes=80 * GB) if busy.host else None
    assert host_left_bytes(msgspec.structs.replace(busy, host=locked)) == 10 * GB, "page-locked memory is bounded"


def test_host_memory_of_a_model_that_must_leave_anyway_counts_as_free() -> None:
    groups = {"big": SwapGroup(members=("moe", "x"))}
    fleet = Fleet(nodes=(node("n", 24, 64, mixture(), other("x", 20, 50)),), catalogue=Catalogue(swap_groups=groups))
    decision = place("moe", fleet, NOW)
    assert (decision.action, [each.model for each in decision.evictions]) == ("load", ["x"])


def test_decision_says_bytes_and_speed_before_the_load() -> None:
    decision = place("moe", fleet(node("a", 24, 100, mixture())), NOW)
    assert decision.chosen is not None
    assert decision.chosen.reservation("moe").host_bytes == decision.chosen.split.host_bytes  # type: ignore[union-attr]
    shown = text(decision)
    assert "host memory" in shown
    assert "100.0 GiB" in shown
    assert "39.0 GiB of its weights in host memory, about 13 tokens/s expected from typical rates of memory" in shown
    assert "It takes 24.0 GiB of the device and 39.0 GiB of host memory" in shown
    assert "with a context of about 32,768 of 131,072 tokens" in shown
    host = as_json(decision)["nodes"][0]["host"]
    assert host["have_bytes"] == 100 * GB
    assert host["need_bytes"] == decision.chosen.split.host_bytes  # type: ignore[union-attr]
    assert 10 < host["tokens_per_s"] < 80


def test_model_asleep_wakes_with_what_it_had_on_the_device() -> None:
    status = ModelStatus(
        id="moe",
        state=ModelState.ASLEEP,
        devices=(0,),
        measured_bytes=22 * GB,
        host_bytes=60 * GB,
        host_splits=SPLITS,
        context_tokens=32_768,
        **sizes(),
    )
    decision = place("moe", fleet(node("a", 24, 100, Residency(status=status, seen_at=NOW))), NOW)
    assert decision.action == "wake"
    assert decision.need_bytes == 22 * GB


def test_poll_brings_the_host_and_its_weights_are_no_foreign_memory_of_a_cpu() -> None:
    status = ModelStatus(id="moe", state=ModelState.READY, devices=(0,), measured_bytes=4 * GB, host_bytes=10 * GB)
    device = Device(index=0, kind="cpu", name="cpu", total_bytes=64 * GB)
    host = HostHealth(total_bytes=64 * GB, free_bytes=48 * GB, budget_bytes=52 * GB, weight_bytes=10 * GB)
    health = Health(
        status="ok",
        uptime_s=1.0,
        devices=(DeviceHealth(index=0, total_bytes=64 * GB, free_bytes=48 * GB),),
        models=(status,),
        host=host,
    )
    found = after_poll(Node(name="a"), Discovery(host="h", os="o", version="1", devices=(device,)), health, NOW)
    assert found.host is not None
    assert found.host.weight_bytes == 10 * GB
    assert found.devices[0].foreign_bytes == 2 * GB


@pytest.mark.parametrize(
    ("saved", "host", "rate"), [(1, 3, 80.0), (2, 3, 80.0), (26, 27, 17.8), (50, 51, 10.0), (51, None, None)]
)
def test_division_between_two_reported_ones_is_interpolated(saved: int, host: int | None, rate: float | None) -> None:
    split = SPLITS.saving(saved * GB)
    assert (None if split is None else split.host_bytes // GB) == host
    assert (None if split is None else round(split.tokens_per_s, 1)) == rate


def test_speed_says_whether_rates_were_measured() -> None:
    assert speed_in_words(14.4, is_measured=True) == "about 14 tokens/s expected"
    assert speed_in_words(0.0, is_measured=True) == "speed not known"
