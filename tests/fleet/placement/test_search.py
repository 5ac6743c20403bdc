"""A search over bounds decides as an assessment of every node does."""

# ruff: noqa: SLF001 - what is derived is private

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.placement import search as searching
from cortex.fleet.placement.bounds import by_free_memory, by_residents
from cortex.fleet.placement.decision import RANK
from cortex.fleet.placement.place import assess, place, preference
from cortex.fleet.placement.search import Feasibility, search
from cortex.fleet.rules import PlacementRules
from cortex.fleet.topology import Fleet, Node

from .test_properties import NAMES, NEWCOMER, NOW, Drawing

wanted = st.sampled_from([NEWCOMER, NEWCOMER, NEWCOMER, *NAMES])
origins = st.sampled_from(["request", "background", "operator"])


class WideDrawing(Drawing):
    """More nodes than the other properties need."""

    def fleet(self) -> Fleet:
        nodes = tuple(self.node(f"node-{index}") for index in range(self.random.randint(1, 7)))
        rules = self.random.choice((PlacementRules(), PlacementRules(strategy="spread")))
        return msgspec.structs.replace(super().fleet(), nodes=nodes, placement=rules)


fleets = st.integers(0, 2**48).map(lambda seed: WideDrawing(seed).fleet())


@given(fleets, wanted, origins)
def test_decides_as_an_assessment_of_every_node_does(fleet: Fleet, name: str, origin: Any) -> None:
    whole = place(name, fleet, NOW, origin=origin)
    found = search(name, fleet, NOW, origin=origin, small_fleet=0, min_assessed=1)
    assert (found.action, found.node, found.evictions) == (whole.action, whole.node, whole.evictions)
    assert found.assessments[0].verdict is whole.assessments[0].verdict
    assert len(found.assessments) + found.num_omitted == len(fleet.nodes)
    for rejected in (each for each in (found, whole) if each.action == "reject"):
        assert any(each.waits_for_foreground for each in rejected.assessments) == any(
            each.waits_for_foreground for each in whole.assessments
        )


@given(fleets, wanted, origins)
def test_no_assessment_is_better_than_its_bound(fleet: Fleet, name: str, origin: Any) -> None:
    spec = fleet.catalogue.spec(name)
    candidates = searching._Candidates(spec, fleet, NOW, origin)
    packs = fleet.placement.strategy == "pack"
    for node in fleet.nodes:
        key = preference(assess(spec, node, fleet, NOW, origin=origin), fleet.placement)
        need = candidates._need(node)
        bound, _, is_final = candidates._entry(fleet.index.positions[node.name])
        assert bound <= key
        if not is_final:
            assert bound == by_free_memory(spec, node, need, packs=packs)
            assert bound <= by_residents(spec, node, need, fleet, NOW, origin, bound) <= key


@given(fleets, wanted)
def test_a_listing_names_the_nodes_that_could_serve_a_model(fleet: Fleet, name: str) -> None:
    one_by_one = {
        node.name
        for node in fleet.nodes
        if place(name, fleet, NOW, origin="operator", only_on=node.name).action != "reject"
    }
    assert set(Feasibility(fleet, NOW, small_fleet=0).nodes(name)) == one_by_one


def test_assesses_few_of_many_nodes(node: Callable[..., Node], model: Callable[..., Any]) -> None:
    full = [node(f"full-{index}", [24], model("a", 20, idle_s=100 + index)) for index in range(100)]
    fleet = Fleet(nodes=tuple(full), catalogue=Catalogue(models=(ModelSpec(id="new", vram_mb=10 * 1024),)))
    found = search("new", fleet, NOW)
    assert (found.action, found.node) == ("load", "full-99")  # unused for the longest time
    assert len(found.assessments) == searching.MIN_ASSESSED
    assert RANK[found.assessments[0].verdict] == RANK[found.assessments[-1].verdict]
