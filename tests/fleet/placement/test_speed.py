"""A model goes to the one of otherwise equal nodes where it was measured to be faster."""

from __future__ import annotations

import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.devices import DeviceState
from cortex.fleet.placement.explain import as_json
from cortex.fleet.placement.place import place
from cortex.fleet.placement.search import search
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.wire.node.bench import BenchResult, StreamRate
from cortex.wire.node.protocol import ModelState, ModelStatus

GB = 1 << 30
NOW = 1000.0


def fleet(**rates: float | None) -> Fleet:
    """Nodes with the same room, where the model was measured at these rates."""
    return Fleet(
        nodes=tuple(node(name, rate) for name, rate in rates.items()), catalogue=Catalogue(models=(ModelSpec(id="m"),))
    )


def node(name: str, rate: float | None) -> Node:
    streams = () if rate is None else (StreamRate(streams=1, tokens_per_s=rate),)
    bench = None if rate is None else BenchResult(measured_at=0.0, version="0", streams=streams)
    status = ModelStatus(id="m", state=ModelState.COLD, estimate_bytes=GB, bench=bench)
    device = DeviceState(index=0, kind="cuda", name="card", total_bytes=8 * GB, free_bytes=8 * GB)
    return Node(
        name=name,
        healthy=True,
        devices=(device,),
        residencies={"m": Residency(status=status, seen_at=NOW)},
    )


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
    made = fleet(**rates)
    assert place("m", made, NOW).node == chosen
    assert search("m", made, NOW).node == chosen


def test_explanation_has_the_measurement() -> None:
    nodes = {each["node"]: each["bench"] for each in as_json(place("m", fleet(a=50.0, b=None), NOW))["nodes"]}
    assert nodes["a"]["streams"][0]["tokens_per_s"] == 50.0
    assert nodes["b"] is None
