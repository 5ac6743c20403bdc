"""What a request holds while it runs (a lease) or waits (a ticket)."""

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
"""What a request wants of a node: a generated answer, a count of tokens, or embeddings."""

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
        """What the node speaks."""
        self.has_lifecycle = has_lifecycle
        """The node can be told to load the model, should it be gone."""
        self.has_alternatives = has_alternatives
        """Another node could have taken the request just as well."""
        self.waited_s = waited_s
        """How long the request stood in the queue for it."""


class PendingRequest:
    """A request for a lease. `deliver` is called exactly once, with a lease or the reason why there is none, unless
    the ticket is cancelled first."""

    __slots__ = ("deliver", "excluded", "model", "need", "number", "origin", "prompt", "since")

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
        number: int = 0,
    ) -> None:
        self.model = model
        self.prompt = prompt
        """The start of the conversation, for prefix affinity."""
        self.deliver = deliver
        self.since = since
        self.origin = origin
        self.need = need
        self.excluded = excluded
        """Nodes that have just failed the request: taken only when it has to wait anyway."""
        self.number = number
        """Of the admission it belongs to."""


class LeasePool:
    """Hands out leases on the picture's ready models. Owned by the dispatcher, which tells it of every redrawing."""

    def __init__(self, fleet_state: FleetState) -> None:
        self._fleet_state = fleet_state
        self._in_flight: dict[ModelOnNode, int] = {}
        self._ready: dict[str, tuple[tuple[Node, Residency], ...]] = {}
        self._affinities: dict[str, Affinity] = {}
        self.suspects: set[str] = set()
        """Nodes at which a request has just failed; nothing is sent there until a poll has shown that they live."""
        self.closed: frozenset[ModelOnNode] = frozenset()
        """Ready models that take no new work, so that one which has waited too long gets their room."""

    @property
    def in_flight(self) -> dict[ModelOnNode, int]:
        """Requests open at each model on each node; only those with any."""
        return self._in_flight

    def fleet_changed(self) -> None:
        """The fleet was rebuilt: drop what was derived from the old one."""
        self._ready.clear()

    def acquire(self, model: str, prompt: Callable[[], bytes], excluded: frozenset[str] = NO_NODES) -> Lease | None:
        """A lease where `model` is ready, or None. The hot path: with one replica nothing is computed."""
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
                f"No node that is up can count tokens for {model}; a neuron that lists the model is needed."
            )
        best = max(candidates, key=lambda node: node.residencies[model].state is ModelState.READY)
        return self._take(best, model)

    def embedder(self, model: str) -> Lease:
        """A node where `model` makes embeddings. Raises UnsupportedModality when there is none."""
        for node, held in self._fleet_state.fleet.replicas(model):
            if held.status.capabilities.embeddings:
                return self._take(node, model)
        raise UnsupportedModality(f"{model} makes no embeddings; choose a model whose capabilities say it does.")

    def release(self, lease: Lease) -> bool:
        """End a lease; True when that was the last one at its seat."""
        key = ModelOnNode(lease.node, lease.model)
        left = self._in_flight.get(key, 0) - 1
        if left > 0:
            self._in_flight[key] = left
            return False
        self._in_flight.pop(key, None)
        return True

    def forget_cache(self, node: str, model: str | None = None) -> None:
        """Whatever prefixes `node` had cached, for one model or all, are gone."""
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
