"""What a load is to get of context: what it waits for, what it asks the node for, and what is said of less."""

from __future__ import annotations

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.topology import ModelOnNode
from cortex.gateway.dispatch import dispatcher
from cortex.wire.errors import InsufficientCapacity
from cortex.wire.node.contexts import ContextSize, ContextSizes

from ..fake_fleet import GB, FakeFleet, lease_of, node_of

FULL = 131_072
CONTEXTS = ContextSizes(
    limit_tokens=FULL,
    full_tokens=FULL,
    wanted_tokens=32_768,
    empty_tokens=FULL,
    full_bytes=66 * GB,
    sizes=(ContextSize(tokens=1, num_bytes=2 * GB), ContextSize(tokens=FULL, num_bytes=18 * GB)),
)
"""32,768 tokens take 6 GB."""


def fleet_with(other_bytes: int) -> FakeFleet:
    """The model, cold, on a node of 24 GB that has another one ready."""
    fake = FakeFleet({"n": {"m": 24 * GB, "other": other_bytes}})
    fake.contexts["m"] = CONTEXTS
    fake.ready["n"]["other"] = 900.0
    fake.poll()
    return fake


def test_request_waits_for_a_busy_model_and_not_with_less_context() -> None:
    fake = fleet_with(20 * GB)
    running = fake.ask("other")
    got = fake.ask("m")
    assert (fake.loads, fake.unloads, got) == ([], [], [])
    fake.dispatcher.release(lease_of(running))
    fake.poll()
    fake.finish_unload()
    (request,) = fake.load_requests
    assert request.min_context_tokens == 30_720, "what agents need, but for a little"
    fake.context_tokens["m"] = FULL
    fake.finish_load()
    assert node_of(got) == "n"
    assert not [event for event in fake.event_log.events if "why" in event]


def test_less_context_next_to_a_pinned_model_is_accepted_and_said() -> None:
    fake = fleet_with(20 * GB)
    fake.operator.pin("other")
    fake.ask("m")
    (request,) = fake.load_requests
    assert (request.min_context_tokens, request.max_bytes) == (1, None)
    assert "with a context of only about 16,384 of 131,072 tokens" in fake.event_log.decisions[0]["outcome"]
    fake.context_tokens["m"] = 16_000
    fake.finish_load()
    loaded = fake.event_log.events[0]
    assert (loaded["kind"], loaded["context_tokens"]) == ("model_loaded", 16_000)
    assert loaded["why"] == "context limited to 16,000 of 131,072 tokens by memory"


def test_load_that_finds_less_room_than_decided_evicts_for_its_context() -> None:
    """Memory that the gateway took for free was not."""
    fake = fleet_with(5 * GB)
    got = fake.ask("m")
    assert (fake.loads, fake.unloads) == ([("n", "m")], [])
    fake.dispatcher.load_ended(ModelOnNode("n", "m"), InsufficientCapacity("too little is free"))
    assert fake.unloads == [("n", "other", "evicted")]
    fake.finish_unload()
    fake.finish_load()
    assert node_of(got) == "n"


def both_ready(context_tokens: int) -> FakeFleet:
    """The model with less than its full context next to an idle one, which leaves it 16,384 tokens."""
    fake = FakeFleet({"n": {"m": 4 * GB, "other": 20 * GB}})
    fake.contexts["m"] = CONTEXTS
    fake.context_tokens["m"] = context_tokens
    fake.ready["n"] |= {"m": 900.0, "other": 900.0}
    fake.poll()
    return fake


def finish_unload_of(fake: FakeFleet, model: str) -> None:
    del fake.ready["n"][model]
    fake.poll()
    fake.dispatcher.unload_ended(ModelOnNode("n", model), None)


def test_request_for_a_longer_context_has_an_idle_model_loaded_again_with_it() -> None:
    fake = both_ready(32_768)
    ask = fake.dispatcher.ask_for_context
    ask("m", 32_768)
    lease = lease_of(fake.ask("m"))
    ask("m", 100_000)
    assert fake.unloads == [], "it has that context, or a request runs"
    fake.dispatcher.release(lease)
    ask("m", 100_000)
    assert fake.unloads == [("n", "other", "evicted"), ("n", "m", "evicted")]
    assert not fake.sleeps[1], "it would wake with the context that it has"
    got = fake.ask("m")
    finish_unload_of(fake, "m")
    assert (fake.loads, got) == ([], [])
    finish_unload_of(fake, "other")
    (request,) = fake.load_requests
    assert request.min_context_tokens is not None
    assert 90_000 < request.min_context_tokens <= 100_000
    fake.context_tokens["m"] = 100_000
    fake.finish_load()
    fake.dispatcher.release(lease_of(got))
    ask("m", FULL)
    assert len(fake.unloads) == 2, "once is enough"


def test_context_that_memory_does_not_allow_unloads_nothing() -> None:
    fake = both_ready(32_768)
    fake.operator.pin("other")
    fake.dispatcher.ask_for_context("m", 100_000)
    fake.dispatcher.change_pins(removed=[ModelOnNode("n", "other")])
    fake.context_tokens["m"] = FULL
    fake.poll()
    fake.dispatcher.ask_for_context("m", 2 * FULL)
    assert fake.unloads == [], "it has what it was made for"


def test_prompt_over_a_cut_context_has_the_model_loaded_again_once_evictions_make_room() -> None:
    fake = both_ready(16_384)
    exceeded = fake.dispatcher.prompt_exceeded
    fake.operator.pin("other")
    exceeded("m", 30_000, "request")
    assert fake.unloads == [], "the other is pinned"
    fake.operator.unpin("other")
    exceeded("m", 2 * FULL, "request")
    exceeded("m", 30_000, "background")
    assert fake.unloads == [], "no context suffices, and background requests evict nothing"
    exceeded("m", 30_000, "request")
    assert fake.unloads == [("n", "other", "evicted"), ("n", "m", "evicted")]
    for model in ("other", "m"):
        finish_unload_of(fake, model)
    (request,) = fake.load_requests
    assert request.min_context_tokens == 30_720


def test_pinned_model_is_loaded_again_for_operators_only_and_stays_pinned() -> None:
    fake = both_ready(16_384)
    fake.operator.pin("m")
    fake.dispatcher.prompt_exceeded("m", 30_000, "request")
    fake.dispatcher.ask_for_context("m", 30_000)
    assert fake.unloads == []
    fake.dispatcher.prompt_exceeded("m", 30_000, "request", is_operator=True)
    assert fake.unloads == [("n", "other", "evicted"), ("n", "m", "evicted")]
    assert fake.dispatcher.pins == {ModelOnNode("n", "m")}


@pytest.mark.parametrize(("entry_tokens", "is_reloaded"), [(None, False), (16_384, False), (32_768, True)])
def test_pinned_model_is_loaded_again_up_to_the_context_of_its_entry(
    entry_tokens: int | None, is_reloaded: bool
) -> None:
    fake = both_ready(16_384)
    fake.catalogue = Catalogue(models=(ModelSpec(id="m", load="pinned", context_tokens=entry_tokens),))
    fake.dispatcher.reconfigure(fake.settings("n"))
    fake.dispatcher.prompt_exceeded("m", 30_000, "request")
    assert bool(fake.unloads) == is_reloaded


def test_model_that_another_gateway_has_loaded_again_is_left_as_it_is() -> None:
    fake = both_ready(16_384)
    fake.dispatcher.prompt_exceeded("m", 30_000, "request")
    assert [request.seen_context_tokens for request in fake.unload_requests] == [None, 16_384]
    finish_unload_of(fake, "other")
    fake.context_tokens["m"] = 20_000
    fake.poll()
    fake.dispatcher.unload_ended(ModelOnNode("n", "m"), None, was_reloaded=True)
    assert fake.loads == []
    assert node_of(fake.ask("m")) == "n"
    fake.dispatcher.release(lease_of(fake.ask("m")))


def test_model_that_was_reloaded_for_less_than_is_needed_is_loaded_again() -> None:
    fake = both_ready(16_384)
    fake.dispatcher.prompt_exceeded("m", 30_000, "request")
    finish_unload_of(fake, "other")
    fake.context_tokens["m"] = 20_000
    fake.poll()
    fake.dispatcher.unload_ended(ModelOnNode("n", "m"), None, was_reloaded=True)
    fake.dispatcher.prompt_exceeded("m", 30_000, "request")
    assert fake.unload_requests[-1].seen_context_tokens == 20_000


def test_requests_that_waited_for_a_reload_get_what_it_leaves_as_it_is() -> None:
    fake = both_ready(16_384)
    fake.dispatcher.prompt_exceeded("m", 30_000, "request")
    finish_unload_of(fake, "other")
    own, other = fake.ask("m"), fake.ask("other")
    assert (own, other) == ([], [])
    fake.dispatcher.unload_ended(ModelOnNode("n", "m"), None, was_reloaded=True)
    assert node_of(own) == "n"
    assert fake.loads == [("n", "other")]


def test_load_of_an_operator_permits_another_reload() -> None:
    fake = both_ready(16_384)
    fake.dispatcher.prompt_exceeded("m", 30_000, "request")
    for model in ("other", "m"):
        finish_unload_of(fake, model)
    fake.finish_load()
    fake.dispatcher.prompt_exceeded("m", 30_000, "request")
    assert len(fake.unloads) == 2, "the load gave it no more"
    fake.operator.unload("m")
    finish_unload_of(fake, "m")
    fake.operator.load("m")
    fake.finish_load()
    fake.dispatcher.prompt_exceeded("m", 30_000, "request")
    assert fake.unloads[3:] == [("n", "m", "evicted")]


def test_model_that_already_has_nearly_as_much_as_it_can_get_is_not_loaded_again() -> None:
    fake = FakeFleet({"n": {"m": 10 * GB}}, total_bytes=12 * GB)
    fake.contexts["m"] = msgspec.structs.replace(CONTEXTS, empty_tokens=65_000)
    fake.context_tokens["m"] = 65_000
    fake.ready["n"]["m"] = 900.0
    fake.poll()
    fake.dispatcher.prompt_exceeded("m", 66_000, "request")
    assert (fake.loads, fake.unloads) == ([], []), "the prompt would not fit afterwards either"


def two_nodes(context_tokens: int) -> FakeFleet:
    """The model with a short context on a small card, and an idle one on a large card."""
    fake = FakeFleet({"small": {"m": 4 * GB}, "large": {"m": 4 * GB, "other": 20 * GB}})
    fake.contexts["m"] = CONTEXTS
    fake.context_tokens["m"] = context_tokens
    fake.ready["small"]["m"] = fake.ready["large"]["other"] = 900.0
    fake.foreign_bytes = 0
    fake.poll("large")
    fake.foreign_bytes = 16 * GB
    fake.poll("small")
    return fake


def test_prompt_over_the_context_on_a_small_node_has_the_model_loaded_on_a_larger_one() -> None:
    fake = two_nodes(32_768)
    exceeded = fake.dispatcher.prompt_exceeded
    exceeded("m", 100_000, "background")
    assert fake.unloads == [], "background requests evict nothing"
    exceeded("m", 100_000, "request")
    assert fake.unloads == [("large", "other", "evicted")], "it stays where it is, for other requests"
    exceeded("m", 100_000, "request")
    fake.finish_unload()
    assert fake.loads == [("large", "m")]
    assert (fake.load_requests[0].min_context_tokens or 0) > 90_000
    fake.finish_load()
    exceeded("m", 100_000, "request")
    assert len(fake.loads) == 1


def test_prompt_over_the_limit_of_the_operator_unloads_nothing() -> None:
    fake = both_ready(16_384)
    fake.max_prompt_tokens["n"] = 8_192
    fake.poll()
    exceeded, demand = fake.dispatcher.prompt_exceeded, fake.dispatcher.fleet.demand
    exceeded("m", 20_000, "request")
    assert fake.unloads == [], "it would be rejected all the same"
    assert demand is not None
    assert demand.wanted_context("m") == 0
    fake.max_prompt_tokens["n"] = 20_000
    fake.poll()
    exceeded("m", 20_000, "request")
    assert fake.unloads == [("n", "other", "evicted"), ("n", "m", "evicted")]


def test_prompt_over_the_limit_of_the_operator_unloads_nothing_where_the_context_is_cut_below_it() -> None:
    fake = both_ready(16_384)
    fake.max_prompt_tokens["n"] = 25_000
    fake.poll()
    fake.dispatcher.prompt_exceeded("m", 30_000, "request")
    assert fake.unloads == [], "it would be rejected all the same"
    fake.dispatcher.prompt_exceeded("m", 24_000, "request")
    assert fake.unloads == [("n", "other", "evicted"), ("n", "m", "evicted")]


def test_prompt_over_the_limit_of_one_node_has_the_model_loaded_where_it_is_allowed() -> None:
    fake = two_nodes(32_768)
    fake.max_prompt_tokens["small"] = fake.max_prompt_tokens["large"] = 8_192
    fake.poll("small")
    fake.foreign_bytes = 0
    fake.poll("large")
    fake.dispatcher.prompt_exceeded("m", 100_000, "request")
    assert fake.unloads == []
    del fake.max_prompt_tokens["large"]
    fake.poll("large")
    fake.dispatcher.prompt_exceeded("m", 100_000, "request")
    assert fake.unloads == [("large", "other", "evicted")]


def test_model_is_loaded_elsewhere_only_where_the_operator_allows_the_prompt() -> None:
    fake = two_nodes(32_768)
    fake.max_prompt_tokens["large"] = 8_192
    fake.foreign_bytes = 0
    fake.poll("large")
    fake.dispatcher.prompt_exceeded("m", 100_000, "request")
    assert fake.unloads == [], "the small card has no room"
    fake.dispatcher.ask_for_context("m", 100_000)
    assert fake.unloads == [("large", "other", "evicted")], "a context is for responses, too"


def test_model_reloaded_just_before_is_not_assessed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = both_ready(16_384)
    fake.dispatcher.ask_for_context("m", 30_000)
    for model in ("other", "m"):
        finish_unload_of(fake, model)
    fake.finish_load()
    assert len(fake.loads) == 1
    assessed = list[str]()
    monkeypatch.setattr(dispatcher, "to_load_again", lambda model, *_, **__: assessed.append(model))
    fake.dispatcher.ask_for_context("m", 30_000)
    assert not assessed
    fake.now += 601.0
    fake.dispatcher.ask_for_context("m", 30_000)
    assert assessed == ["m"]


def test_prompt_over_every_context_of_the_fleet_unloads_nothing() -> None:
    fake = two_nodes(32_768)
    fake.operator.pin("other")
    fake.dispatcher.prompt_exceeded("m", 100_000, "request")
    assert (fake.loads, fake.unloads) == ([], [])


def test_reload_by_the_node_is_said_with_its_context() -> None:
    fake = fleet_with(20 * GB)
    fake.operator.pin("other")
    fake.ask("m")
    fake.context_tokens["m"] = 16_000
    fake.finish_load()
    fake.poll()
    fake.context_tokens["m"] = FULL
    fake.poll()
    fake.poll()
    loaded = [event for event in fake.event_log.events if event["kind"] == "model_loaded"]
    assert [(event["context_tokens"], "why" in event) for event in loaded] == [(FULL, False), (16_000, True)]
