"""Models that are never loaded together on a node, whatever its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue, SwapGroup
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.placement.place import place
from cortex.fleet.rules import PlacementRules

NOW = 10_000.0
Make = Callable[..., Any]


@pytest.fixture
def decide(model: Make, node: Make, fleet: Make, spec: Make) -> Callable[..., Any]:
    """Decides for the model `new` on a node with 80 GiB, where small models are ready."""

    def decided(catalogue: dict[str, Any], *ready: Any, costs: dict[str, float] | None = None, **placement: Any) -> Any:
        held = [model(each, 2) if isinstance(each, str) else each for each in ready]
        names = {"new", *(each.model_id for each in held)}
        specs = tuple(spec(name, 2, evict_cost=(costs or {}).get(name, 1.0)) for name in sorted(names))
        found = fleet(node("n", [80], *held))
        found = msgspec.structs.replace(
            found, catalogue=Catalogue(models=specs, **catalogue), placement=PlacementRules(**placement)
        )
        return place("new", found, NOW)

    return decided


def victims(decision: Any) -> set[str]:
    return {model for _, model in decision.evictions}


def test_member_of_a_swap_group_evicts_the_others_although_there_is_room(decide: Make) -> None:
    groups = {"llm": SwapGroup(members=("new", "a", "b"))}
    decision = decide({"swap_groups": groups}, "a", "b", "speech")
    assert (decision.action, victims(decision)) == ("load", {"a", "b"})
    assert "of the same group llm" in decision.assessments[0].reason


def test_member_of_an_exclusive_group_evicts_all_others_but_pinned_and_persistent_ones(
    decide: Make, model: Make
) -> None:
    groups = {
        "big": SwapGroup(members=("new", "a"), swap=False, exclusive=True),
        "forever": SwapGroup(members=("kept",), persistent=True),
    }
    decision = decide({"swap_groups": groups}, "a", "other", "kept", model("pinned", 2, pinned=True))
    assert victims(decision) == {"other"}


def test_persistent_model_is_not_evicted_for_memory_by_other_groups(decide: Make, model: Make) -> None:
    groups = {"forever": SwapGroup(members=("kept",), persistent=True)}
    decision = decide({"swap_groups": groups}, model("kept", 79))
    assert decision.assessments[0].verdict is Verdict.HELD
    assert "its group is persistent" in decision.assessments[0].reason


def test_busy_rival_is_waited_for(decide: Make, model: Make) -> None:
    groups = {"llm": SwapGroup(members=("new", "a"))}
    decision = decide({"swap_groups": groups}, model("a", 2, running=1))
    assert decision.action == "wait"
    assert "busy with 1 request" in decision.assessments[0].reason


def test_set_with_the_lowest_cost_of_evictions_is_chosen(decide: Make) -> None:
    sets = {"together": (("new", "tts"), ("new", "image"), ("tts", "image"))}
    assert victims(decide(sets, "tts", "image")) == {"image"}
    assert victims(decide(sets, "tts", "image", costs={"image": 50.0})) == {"tts"}


def test_model_in_no_set_is_loaded_alone(decide: Make) -> None:
    assert victims(decide({"together": (("a", "b"),)}, "a", "b")) == {"a", "b"}


def test_limit_on_loaded_models_evicts_the_least_recently_used_or_cheapest(decide: Make, model: Make) -> None:
    old, recent = model("old", 2, idle_s=900), model("recent", 2, idle_s=10)
    assert victims(decide({}, old, recent, max_loaded=3)) == set()
    assert victims(decide({}, old, recent, max_loaded=2)) == {"old"}
    assert victims(decide({}, old, recent, max_loaded=2, costs={"old": 2.0})) == {"recent"}


def test_rivals_free_memory_for_the_newcomer(decide: Make, model: Make) -> None:
    groups = {"llm": SwapGroup(members=("new", "a"))}
    decision = decide({"swap_groups": groups}, model("a", 40), model("b", 39))
    assert victims(decision) == {"a"}


def test_model_is_in_one_swap_group_at_most() -> None:
    with pytest.raises(ValueError, match="remove it from one"):
        Catalogue(swap_groups={"x": SwapGroup(members=("a",)), "y": SwapGroup(members=("a",))})
