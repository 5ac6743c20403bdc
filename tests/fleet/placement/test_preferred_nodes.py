"""A model goes to the one of otherwise equal nodes that keeps its conversations in host memory, or where it was
measured to be faster."""

from __future__ import annotations

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.devices import DeviceState
from cortex.fleet.placement.explain import as_json
from cortex.fleet.placement.place import place
from cortex.fleet.placement.search import search
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.wire.node.bench import BenchResult, StreamRate
from cortex.wire.node.protocol import HostKV, ModelState, ModelStatus

GB = 1 << 30
NOW = 1000.0


def node(
    name: str, kept: float, rate: float | None = 100.0, state: ModelState = ModelState.COLD, free: int = 8
) -> Node:
    """`kept`: of the KV cache, in GB. `rate`: the measured speed, if any."""
    streams = () if rate is None else (StreamRate(streams=1, tokens_per_s=rate),)
    bench = None if rate is None else BenchResult(measured_at=0.0, version="0", streams=streams)
    status = ModelStatus(
        id="m",
        state=state,
        devices=(0,) if state is ModelState.ASLEEP else (),
        estimate_bytes=GB,
        measured_bytes=GB,
        bench=bench,
        kv_host=HostKV(num_bytes=int(kept * GB), num_tokens=int(kept * 10_000)) if kept else None,
    )
    device = DeviceState(index=0, kind="cuda", name="card", total_bytes=8 * GB, free_bytes=free * GB)
    return Node(name=name, healthy=True, devices=(device,), residencies={"m": Residency(status=status, seen_at=NOW)})


def fleet(*nodes: Node) -> Fleet:
    return Fleet(nodes=nodes, catalogue=Catalogue(models=(ModelSpec(id="m"),)))


@pytest.mark.parametrize(
    ("a", "b", "chosen"),
    [
        pytest.param(node("a", 0), node("b", 0), "a", id="none keeps any"),
        pytest.param(node("a", 0), node("b", 1), "b", id="unloaded, and kept there"),
        pytest.param(node("a", 1), node("b", 2), "b", id="more is kept there"),
        pytest.param(node("a", 0), node("b", 1, 80.0), "b", id="a little slower"),
        pytest.param(node("a", 0), node("b", 1, 60.0), "a", id="much slower"),
        pytest.param(node("a", 0, state=ModelState.ASLEEP), node("b", 1), "a", id="it wakes elsewhere"),
        pytest.param(
            node("a", 0, state=ModelState.ASLEEP),
            node("b", 1, state=ModelState.ASLEEP),
            "b",
            id="asleep on both",
        ),
        pytest.param(node("a", 0), node("b", 1, free=0), "a", id="no room there"),
        pytest.param(node("a", 0), node("b", 0.1), "a", id="too little to matter"),
        pytest.param(node("a", 0, free=2), node("b", 1, free=8), "b", id="strategy of packing"),
    ],
)
def test_model_is_loaded_where_its_conversations_are(a: Node, b: Node, chosen: str) -> None:
    assert place("m", fleet(a, b), NOW).node == chosen
    assert search("m", fleet(a, b), NOW).node == chosen


def test_node_that_does_not_list_the_model_lacks_its_conversations() -> None:
    empty = msgspec.structs.replace(node("a", 0), residencies={})
    made = fleet(empty, node("b", 1))
    assert place("m", made, NOW).node == search("m", made, NOW).node == "b"


def test_node_that_is_down_is_not_compared_with() -> None:
    down = msgspec.structs.replace(node("c", 100), healthy=False)
    made = fleet(node("a", 0), node("b", 1, 80.0), down)
    assert place("m", made, NOW).node == search("m", made, NOW).node == "b"


def test_explanation_has_what_is_kept() -> None:
    explained = as_json(place("m", fleet(node("a", 0), node("b", 1)), NOW))
    kept = {each["node"]: each["kv_host"] for each in explained["nodes"]}
    assert kept == {"a": None, "b": {"num_bytes": GB, "num_tokens": 10_000, "tokens_per_s": None}}


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({"a": None, "b": None}, "a"),
        ({"a": 50.0, "b": 100.0}, "b"),
        ({"a": 100.0, "b": 50.0}, "a"),
        ({"a": 50.0, "b": None}, "a"),  # one that was not measured counts as fast as the fastest
        ({"a": 50.0, "b": None, "c": 100.0}, "b"),
        ({"a": 0.0, "b": 50.0}, "a"),
    ],
)
def test_places_a_model_where_it_is_not_slower(rates: dict[str, float | None], chosen: str) -> None:
    made = fleet(*(node(name, 0, rate) for name, rate in rates.items()))
    assert place("m", made, NOW).node == chosen
    assert search("m", made, NOW).node == chosen


def test_explanation_has_the_measurement() -> None:
    made = fleet(node("a", 0, 50.0), node("b", 0, None))
    nodes = {each["node"]: each["bench"] for each in as_json(place("m", made, NOW))["nodes"]}
    assert nodes["a"]["streams"][0]["tokens_per_s"] == 50.0
    assert nodes["b"] is None
