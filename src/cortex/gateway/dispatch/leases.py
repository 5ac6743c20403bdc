"""Leases: the right to send one request to a model on a node, the requests for them, and the pool of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cortex.fleet import routing
from cortex.fleet.decision import Origin
from cortex.fleet.routing import Affinity, Replica
from cortex.fleet.topology import ModelOnNode, Node, Residency
from cortex.gateway.dispatch.fleet_state import FleetState
from cortex.wire.errors import CortexError, UnsupportedModality
from cortex.wire.node import Dialect, ModelState

Need = Literal["answer", "count", "embeddings"]
"""What a request needs from a node: a generated response, a token count, or embeddings."""

NO_NODES: frozenset[str] = frozenset()


class Lease:
    """The right to send one request to a model on a node; counted there until released."""

    __slots__ = ("dialects", "has_alternatives", "has_lifecycle", "model", "node", "waited_s")

    def __init__(
        self,
        node: str,
        model: str,
        dialects: tuple[Dialect, ...] = (),
        *,
        has_lifecycle: bool = True,
        has_alternatives: bool = False,
        waited_s: float = 0.0,
    ) -> None:
        self.node = node
        self.model = model
        self.dialects = dialects
        """The dialects of the node."""
        self.has_lifecycle = has_lifecycle
        """Whether the node loads the model on request, should it be gone."""
        self.has_alternatives = has_alternatives
        """Whether another node could have served the request."""
        self.waited_s = waited_s
        """Time in the queue."""


class PendingRequest:
    """A request for a lease. `deliver` is called exactly once, with a lease or with the error, unless the request is
    cancelled first."""

    __slots__ = ("deliver", "excluded", "model", "need", "origin", "prompt", "since")

    def __init__(
        self,
        model: str,
        prompt: Callable[[], bytes],
        deliver: Callable[[Lease | CortexError], None],
        since: float,
        *,
        origin: Origin = "request",
        need: Need = "answer",
        excluded: frozenset[str] = NO_NODES,
    ) -> None:
        self.model = model
        self.prompt = prompt
        """The beginning of the prompt, for prefix affinity."""
        self.deliver = deliver
        self.since = since
        self.origin = origin
        self.need = need
        self.excluded = excluded
        """Nodes at which the request has just failed; ignored once it waits in a queue."""


class LeasePool:
    """Hands out leases on the fleet's ready models, and counts them. Owned by the dispatcher."""

    def __init__(self, fleet_state: FleetState) -> None:
        self._fleet_state = fleet_state
        self._in_flight: dict[ModelOnNode, int] = {}
        self._ready: dict[str, tuple[tuple[Node, Residency], ...]] = {}
        self._affinities: dict[str, Affinity] = {}
        self.suspects: set[str] = set()
        """Nodes at which a request has just failed; no request is sent there until a poll succeeds."""
        self.closed: frozenset[ModelOnNode] = frozenset()
        """Ready models that take no new requests, so that an overdue model gets their room."""

    @property
    def in_flight(self) -> dict[ModelOnNode, int]:
        """Requests open at each model on each node; only those with any."""
        return self._in_flight

    def fleet_changed(self) -> None:
        """The fleet was rebuilt: drop what was derived from the old one."""
        self._ready.clear()

    def acquire(self, model: str, prompt: Callable[[], bytes], excluded: frozenset[str] = NO_NODES) -> Lease | None:
        """A lease where `model` is ready, or `None`. The hot path: with one replica nothing is computed."""
        ready = self._ready.get(model)
        if ready is None:
            ready = self._ready[model] = tuple(self._fleet_state.fleet.replicas(model))
        if not ready:
            return None
        if len(ready) > 1 or excluded or self.suspects or self.closed:
            avoided = excluded | self.suspects
            ready = tuple(
                (node, held)
                for node, held in ready
                if node.name not in avoided and ModelOnNode(node.name, model) not in self.closed
            )
            if not ready:
                return None
        if len(ready) == 1:
            return self._take(ready[0][0], model)
        return self._take(self._choose(model, ready, prompt()), model, has_alternatives=True)

    def tokeniser(self, model: str) -> Lease:
        """A node that can count tokens for `model`, loaded or not. Raises UnsupportedModality when none can."""
        candidates = [
            node
            for node in self._fleet_state.fleet.nodes
            if node.healthy and model in node.residencies and "anthropic_messages" in node.dialects
        ]
        if not candidates:
            raise UnsupportedModality(
                f"No node that is up can count tokens for {model}; start a neuron that lists the model."
            )
        best = max(candidates, key=lambda node: node.residencies[model].state is ModelState.READY)
        return self._take(best, model)

    def embedder(self, model: str) -> Lease:
        """A node where `model` computes embeddings. Raises UnsupportedModality when there is none."""
        for node, held in self._fleet_state.fleet.replicas(model):
            if held.status.capabilities.embeddings:
                return self._take(node, model)
        raise UnsupportedModality(
            f"{model} computes no embeddings; choose a model with the capability `embeddings` in /v1/models."
        )

    def release(self, lease: Lease) -> bool:
        """End a lease; True when that was the last one for its model on its node."""
        key = ModelOnNode(lease.node, lease.model)
        remaining = self._in_flight.get(key, 0) - 1
        if remaining > 0:
            self._in_flight[key] = remaining
            return False
        self._in_flight.pop(key, None)
        return True

    def forget_cache(self, node: str, model: str | None = None) -> None:
        """`node` lost its cached prefixes, of one model or of all."""
        for name, affinity in self._affinities.items():
            if model in (None, name):
                affinity.forget(node)

    def _take(self, node: Node, model: str, *, has_alternatives: bool = False) -> Lease:
        key = ModelOnNode(node.name, model)
        self._in_flight[key] = self._in_flight.get(key, 0) + 1
        return Lease(
            node.name,
            model,
            node.dialects,
            has_lifecycle=node.has_lifecycle,
            has_alternatives=has_alternatives,
        )

    def _choose(self, model: str, ready: tuple[tuple[Node, Residency], ...], prompt: bytes) -> Node:
        replicas = [
            Replica.of(node, held, self._in_flight.get(ModelOnNode(node.name, model), 0)) for node, held in ready
        ]
        affinity = self._affinities.setdefault(model, Affinity())
        chosen = routing.choose(replicas, prompt, affinity).node
        return next(node for node, _ in ready if node.name == chosen)
