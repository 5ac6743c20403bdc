"""The operator's ceilings (`memory_mb`) for a node and for a device: placement, eviction, explanation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.devices import Ceilings
from cortex.fleet.placement.explain import as_json
from cortex.fleet.placement.place import place
from cortex.fleet.reports import after_poll
from cortex.fleet.topology import Node
from cortex.wire.node.protocol import Device, DeviceHealth, Discovery, Health, ModelState

NOW = 10_000.0
GIB = 1024**3
Make = Callable[..., Any]


def limited(node: Node, *, whole: float | None = None, **devices: float) -> Node:
    """The node with a ceiling for the `whole` of it and for devices by name (`d0`), in GiB."""
    return msgspec.structs.replace(
        node,
        ceiling_bytes=None if whole is None else int(whole * GIB),
        devices=tuple(
            msgspec.structs.replace(
                device,
                ceiling_bytes=int(devices[name] * GIB) if (name := f"d{device.index}") in devices else None,
            )
            for device in node.devices
        ),
    )


def test_device_ceiling_counts_what_models_hold_and_not_what_is_free(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    beast = limited(node("beast", [80, 24], model("a", 10)), d0=12)
    assert place("m", fleet(beast, specs=[spec("m", 8)]), NOW).devices == (1,)
    emptier = limited(node("beast", [80, 24], model("a", 4)), d0=12)
    assert place("m", fleet(emptier, specs=[spec("m", 8)]), NOW).devices == (0,)


def test_device_ceiling_is_relieved_by_eviction(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(limited(node("n", [80], model("old", 10)), d0=12), specs=[spec("m", 8)])
    decision = place("m", snapshot, NOW)
    assert (decision.action, decision.victims, decision.max_bytes) == ("load", ("old",), (12 * GIB,))


def test_ceiling_counts_weights_that_sleep_does_not_free(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    asleep = model("old", 10, state=ModelState.ASLEEP)
    asleep = msgspec.structs.replace(asleep, status=msgspec.structs.replace(asleep.status, host_bytes=6 * GIB))
    host = limited(node("n", [80], asleep), whole=12)

    def decided(kind: str) -> tuple[str, tuple[str, ...]]:
        devices = tuple(msgspec.structs.replace(device, kind=kind) for device in host.devices)
        changed = msgspec.structs.replace(host, devices=devices)
        decision = place("m", fleet(changed, specs=[spec("m", 8)]), NOW)
        return decision.action, decision.victims

    assert decided("cuda") == ("load", ())
    assert decided("cpu") == ("load", ("old",))


def test_node_ceiling_is_relieved_by_an_eviction_on_another_device(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    beast = limited(node("n", [24, 24], model("old", 10, devices=(0,), idle_s=900)), whole=16)
    decision = place("m", fleet(beast, specs=[spec("m", 8)]), NOW)
    assert (decision.action, decision.victims) == ("load", ("old",))
    assert decision.max_bytes == (16 * GIB,)


def test_node_ceiling_limits_the_sum_over_the_devices_of_a_model(node: Make, fleet: Make, spec: Make) -> None:
    pair = node("n", [24, 24], max_devices_per_model=2)
    wide = spec("m", 20, tensor_parallel=2)
    assert place("m", fleet(limited(pair, whole=20), specs=[wide]), NOW).devices == (0, 1)
    assert place("m", fleet(limited(pair, whole=19), specs=[wide]), NOW).action == "reject"


def test_reduced_cache_takes_what_the_ceiling_leaves(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    cold = model("m", state=ModelState.COLD, estimate=40, least=6)
    snapshot = fleet(limited(node("n", [80], model("a", 4, pinned=True), cold), d0=20), specs=[spec("m", None)])
    decision = place("m", snapshot, NOW)
    assert (decision.action, decision.takes_bytes, decision.max_bytes) == ("load", 16 * GIB, (16 * GIB,))


def test_layers_of_a_model_of_unknown_size_are_not_limited_to_equal_shares(node: Make, fleet: Make, spec: Make) -> None:
    """The node divides them within the ceilings of its devices."""
    beast = msgspec.structs.replace(limited(node("n", [80, 80]), d0=10), max_devices_per_model=2)
    staged = msgspec.structs.replace(spec("m", None), pipeline_parallel=2)
    decision = place("m", fleet(beast, specs=[staged]), NOW)
    assert (decision.action, decision.max_bytes) == ("load", (None,))


def test_load_without_a_ceiling_is_not_limited(node: Make, fleet: Make, spec: Make) -> None:
    assert place("m", fleet(node("n", [24]), specs=[spec("m", 8)]), NOW).max_bytes == (None,)


@pytest.mark.parametrize(
    ("ceilings", "reason"),
    [
        ({"whole": 6}, "needs 8.0 GiB, and models may take 6.0 GiB of the node (`memory_mb`)"),
        ({"d0": 6}, "needs 8.0 GiB per device, and models may take 6.0 GiB of one (`memory_mb`)"),
    ],
)
def test_ceiling_that_is_too_low_is_named(node: Make, fleet: Make, spec: Make, ceilings: Any, reason: str) -> None:
    decision = place("m", fleet(limited(node("n", [24]), **ceilings), specs=[spec("m", 8)]), NOW)
    assert (decision.action, decision.assessments[0].reason) == ("reject", reason)


def test_explanation_shows_the_ceilings(node: Make, fleet: Make, spec: Make) -> None:
    data = as_json(place("m", fleet(limited(node("n", [24]), whole=20, d0=10), specs=[spec("m", 8)]), NOW))
    (assessed,) = data["nodes"]
    assert (assessed["ceiling_bytes"], assessed["devices"][0]["ceiling_bytes"]) == (20 * GIB, 10 * GIB)
    assert assessed["devices"][0]["have_bytes"] == 10 * GIB


@pytest.mark.parametrize(
    ("own", "reported", "expected"),
    [(None, None, None), (8, None, 8), (None, 6, 6), (8, 6, 6), (4, 6, 4)],
)
def test_smaller_of_both_ceilings_counts_after_a_poll(own: int | None, reported: int | None, expected: int) -> None:
    ceilings = Ceilings(node_bytes=own, device_bytes={} if own is None else {0: own})
    node = Node(name="n", ceilings=ceilings)
    discovery = Discovery(
        host="n", os="", version="", devices=(Device(index=0, kind="cuda", name="card", total_bytes=10),)
    )
    device = DeviceHealth(index=0, total_bytes=10, free_bytes=10, ceiling_bytes=reported)
    health = Health(status="ok", uptime_s=0, devices=(device,), models=(), ceiling_bytes=reported)
    polled = after_poll(node, discovery, health, NOW)
    assert (polled.ceiling_bytes, polled.devices[0].ceiling_bytes) == (expected, expected)
