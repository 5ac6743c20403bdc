"""The contexts that `/v1/models` promises: those of loaded models, and what others will have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.gateway.api.models import entry
from cortex.wire.node.contexts import ContextSize, ContextSizes
from cortex.wire.node.protocol import ModelState, ModelStatus

FULL = 131_072
CONTEXTS = ContextSizes(
    limit_tokens=FULL,
    full_tokens=FULL,
    wanted_tokens=32_768,
    empty_tokens=FULL,
    full_bytes=1 << 30,
    sizes=(ContextSize(tokens=1, num_bytes=1 << 20),),
)


def node(name: str, tokens: int, state: ModelState = ModelState.COLD) -> Node:
    """A node that gives the model a context of `tokens`."""
    status = ModelStatus(
        id="m",
        state=state,
        contexts=msgspec.structs.replace(CONTEXTS, empty_tokens=tokens),
        context_tokens=tokens,
        max_input_tokens=tokens,
        max_output_tokens=tokens,
    )
    return Node(name=name, healthy=True, residencies={"m": Residency(status=status, seen_at=0.0)})


def described(*nodes: Node, context: int | None = None) -> dict[str, Any]:
    return entry(Fleet(nodes=nodes), ModelSpec(id="m", context_tokens=context), lambda _: (), 0)


@pytest.mark.parametrize(("context", "expected"), [(None, FULL), (8192, 8192), (200_000, FULL)])
def test_model_that_is_not_loaded_has_what_the_best_node_can_give_it(context: int | None, expected: int) -> None:
    found = described(node("small", 4480), node("large", FULL), context=context)
    assert found["max_model_len"] == expected
    assert found["limit"] == {"context": expected, "input": expected, "output": expected}


def test_size_before_a_load_is_that_of_the_context_that_the_entry_names() -> None:
    (held,) = (large := node("n", FULL)).residencies.values()
    status = msgspec.structs.replace(held.status, estimate_bytes=CONTEXTS.full_bytes)
    large = msgspec.structs.replace(large, residencies={"m": msgspec.structs.replace(held, status=status)})
    (size,) = described(large)["sizes"]
    assert size["bytes"] == CONTEXTS.full_bytes
    (size,) = described(large, context=8192)["sizes"]
    assert size["bytes"] == CONTEXTS.named(8192).full_bytes < CONTEXTS.full_bytes / 10


def configured_for(tokens: int, *, max_prompt_tokens: int = FULL, state: ModelState = ModelState.COLD) -> Node:
    """A node whose own configuration gives the model a context of `tokens`."""
    (held,) = (large := node("n", tokens, state)).residencies.values()
    status = msgspec.structs.replace(
        held.status,
        contexts=msgspec.structs.replace(CONTEXTS, full_tokens=tokens, wanted_tokens=tokens, empty_tokens=tokens),
        max_input_tokens=min(tokens, max_prompt_tokens),
    )
    return msgspec.structs.replace(large, residencies={"m": msgspec.structs.replace(held, status=status)})


def test_context_of_the_catalogue_replaces_that_of_the_node_also_before_a_load() -> None:
    assert described(configured_for(32_768))["max_model_len"] == 32_768
    found = described(configured_for(32_768), context=65_536)
    assert found["max_model_len"] == 65_536
    assert found["limit"] == {"context": 65_536, "input": 65_536, "output": 65_536}
    limited = described(configured_for(32_768, max_prompt_tokens=16_384), context=65_536)
    assert limited["limit"] == {"context": 65_536, "input": 16_384, "output": 65_536}
    asleep = configured_for(32_768, state=ModelState.ASLEEP)
    assert described(asleep, context=65_536)["max_model_len"] == 32_768, "it wakes with what it has"


def test_loaded_model_has_the_context_of_its_largest_replica_and_it_is_said_if_memory_limits_that() -> None:
    ready = ModelState.READY
    found = described(node("small", 4480, ready), node("large", FULL, ready), node("cold", 1000))
    assert found["max_model_len"] == FULL, "prompts that are too long for one replica go to another"
    assert "full_context" not in found["limit"]
    places = {place["node"]: (place.get("context"), place.get("full_context")) for place in found["locations"]}
    assert places == {"small": (4480, FULL), "large": (None, None)}
    found = described(node("small", 4480, ready), node("smaller", 2240, ready), node("cold", FULL))
    assert found["limit"] == {"context": 4480, "input": 4480, "output": 4480, "full_context": FULL}
    assert "full_context" not in described(node("large", FULL, ready))["limit"]
