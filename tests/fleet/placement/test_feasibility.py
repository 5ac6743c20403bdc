"""Where every model of a fleet could run, computed for all of them at once."""

from __future__ import annotations

from cortex.fleet.catalogue import Catalogue, ModelSpec, SwapGroup
from cortex.fleet.devices import DeviceState
from cortex.fleet.placement.place import place
from cortex.fleet.placement.search import Feasibility
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.wire.node.protocol import ModelState, ModelStatus

GB = 1 << 30
NOW = 1000.0


def node(name: str, total_gb: int, **states: tuple[ModelState, int]) -> Node:
    """A node with one device and the given models: state and size in GiB."""
    residencies = {
        model: Residency(
            status=ModelStatus(
                id=model,
                state=state,
                devices=(0,) if state is not ModelState.COLD else (),
                estimate_bytes=size * GB,
                measured_bytes=size * GB if state is ModelState.READY else None,
                state_age_s=500.0,
                idle_s=500.0,
            ),
            seen_at=NOW,
        )
        for model, (state, size) in states.items()
    }
    used = sum(size for state, size in states.values() if state is ModelState.READY)
    device = DeviceState(
        index=0, kind="cuda", name="card", total_bytes=total_gb * GB, free_bytes=(total_gb - used) * GB
    )
    return Node(name=name, devices=(device,), residencies=residencies, healthy=True)


def test_agrees_with_placement_for_every_model_and_node() -> None:
    ready, cold, asleep, loading = ModelState.READY, ModelState.COLD, ModelState.ASLEEP, ModelState.LOADING
    fleet = Fleet(
        nodes=(
            node("large", 48, a=(ready, 20), b=(cold, 30), c=(asleep, 8), d=(cold, 90)),
            node("small", 8, a=(cold, 20), b=(cold, 30), c=(cold, 8), e=(loading, 6)),
            node("empty", 24),
        ),
        catalogue=Catalogue(models=(ModelSpec(id="a", priority=5), ModelSpec(id="b"), ModelSpec(id="f"))),
    )
    feasibility = Feasibility(fleet, NOW)
    for model in ("a", "b", "c", "d", "e", "f"):
        one_by_one = {
            here.name
            for here in fleet.nodes
            if place(model, fleet, NOW, origin="operator", only_on=here.name).action != "reject"
        }
        assert set(feasibility.nodes(model)) == one_by_one, model
    assert set(feasibility.nodes("d")) == set()
    assert "large" in feasibility.nodes("a")


def test_large_fleets_follow_the_rules_of_groups() -> None:
    ready = ModelState.READY
    nodes = tuple(node(f"n{index}", 24, kept=(ready, 2)) for index in range(9))
    models = (ModelSpec(id="kept", load="pinned"), ModelSpec(id="new", vram_mb=4096))
    group = SwapGroup(members=("kept", "new"))
    fleet = Fleet(nodes=nodes, catalogue=Catalogue(models=models, swap_groups={"one": group}))
    assert place("new", fleet, NOW, origin="operator").action == "reject"
    assert Feasibility(fleet, NOW).nodes("new") == ()
