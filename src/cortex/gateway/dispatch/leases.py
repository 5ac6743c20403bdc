"""Leases: the right to send one request to a model on a node, the requests for them, and the pool of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import msgspec

from cortex.fleet.demand import SOMEBODY, Demand
from cortex.fleet.placement.decision import Origin
from cortex.fleet.topology import Abilities, ModelOnNode, Node
from cortex.gateway.dispatch.fleet_state import ChangedNode, FleetState
from cortex.gateway.dispatch.replicas import ReadyReplica, ReadyReplicas, ReplicaLoads, ready_models
from cortex.routing.choice import source_of
from cortex.routing.prefixes import PrefixRecord, leading_blocks
from cortex.system.fair_turns import DEFAULT
from cortex.wire.errors import CortexError, Overloaded, UnsupportedModality
from cortex.wire.node.load_options import ENGINE
from cortex.wire.node.protocol import ModelState, ModelStatus
from cortex.wire.pictures.parts import reads_text_only

RequestKind = Literal["response", "count", "embeddings", "rerank", "relay"]
"""What a request needs from a node: a generated response, a token count, vectors, scores, or a server that reads it."""
_CAPABILITIES: dict[RequestKind, tuple[tuple[str, ...], str]] = {
    "response": (("chat",), "generates no text"),
    "embeddings": (("embeddings",), "makes no embeddings"),
    "rerank": (("rerank", "embeddings"), "makes no scores"),
}
"""For each kind of request: the capabilities that serve it, best first, and the error text for a model with none of
them."""

NO_NODES: frozenset[str] = frozenset()
RELOAD_TOLERANCE_S = 2.0
"""The reported time since which a model is ready varies by this much without a reload."""


class Lease(msgspec.Struct, eq=False, gc=False):
    """The right to send one request to a model on a node; counted there until released. Thousands may be open, so the
    garbage collector does not track them: a lease refers only to values."""

    node: str
    model: str
    target: ModelOnNode
    """Model and node as a key."""
    abilities: Abilities = Abilities()
    """Those of the node."""
    has_alternatives: bool = False
    """Whether another node could have served the request."""
    reason: str = ""
    """Why this node, in a few words."""
    is_alone: bool = False
    """Whether no other request was expected there when it was chosen among replicas."""
    waited_s: float = 0.0
    """Time in the queue."""
    load_s: float = 0.0
    """The part of `waited_s` in which the model was loaded."""
    kv_source: str = ""
    """Another node that has computed more of the prompt; empty if there is none."""
    client: str | None = None
    """The request's origin; None if only the model's files are used."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request for a lease. `deliver` is called exactly once, with a lease or with the error, unless the request is
    cancelled first."""

    model: str
    prompt: Callable[[], bytes]
    """Its tenant and the bytes of its prompt from the beginning, for prefix affinity."""
    deliver: Callable[[Lease | CortexError], None]
    since: float
    origin: Origin = "request"
    need: RequestKind = "response"
    excluded: frozenset[str] = NO_NODES
    """Nodes at which the request has just failed; ignored once it waits in a queue."""
    has_pictures: bool = False
    """Nodes whose replicas read pictures are preferred."""
    client: str = SOMEBODY
    level: int = DEFAULT
    """The level of the request's class."""
    tell: Callable[[float], None] | None = None
    """Called, once, with the seconds that a node takes to wake for the request."""


class LeasePool:
    """Hands out leases on the fleet's ready models, and counts them. Owned by the dispatcher."""

    def __init__(self, fleet_state: FleetState, demand: Demand, clock: Callable[[], float]) -> None:
        self._fleet_state = fleet_state
        self._demand = demand
        self._clock = clock
        self._loads = ReplicaLoads(clock)
        self._in_flight: dict[str, dict[str, int]] = {}
        """By node and model; only models with any."""
        self._ready = ReadyReplicas(fleet_state)
        self._ready_since: dict[str, dict[str, float]] = {}
        """By node and model."""
        self._prefixes: dict[str, PrefixRecord] = {}
        self._recorded: dict[str, set[str]] = {}
        """By node, the models with prefixes there."""
        self._unsure: set[ModelOnNode] = set()
        """Nodes that went down, until they have reloaded the model."""
        self.suspects: set[str] = set()
        """Nodes at which a request has just failed; they get none until a poll succeeds."""
        self.closed: frozenset[ModelOnNode] = frozenset()
        """Ready models that take no new requests, to make room for an overdue model."""
        self.recount: set[str] = set()
        """Nodes whose request counts or reports changed since the fleet was last counted."""
        self._ended_at: dict[ModelOnNode, float] = {}
        """When the last request of this gateway ended there."""

    @property
    def in_flight(self) -> dict[ModelOnNode, int]:
        """Requests open at each model on each node; only those with any."""
        return {
            ModelOnNode(node, model): count
            for node, counts in self._in_flight.items()
            for model, count in counts.items()
        }

    def in_flight_on(self, node: str) -> Mapping[str, int]:
        """The same at the models of one node."""
        return self._in_flight.get(node, {})

    def nodes_changed(self, changed: Iterable[ChangedNode]) -> None:
        """The fleet was rebuilt: drop what was derived from the nodes as they were."""
        self.recount.update(after.name for _, after in changed)
        self._ready.nodes_changed(changed)

    def reconfigured(self) -> None:
        """The fleet has other nodes: drop everything that was derived from it, and everything about removed nodes."""
        self._ready.clear()
        for name in [each for each in {*self._ready_since, *self._recorded} if each not in self._fleet_state]:
            self.forget_cache(name)
            for model in self._ready_since.pop(name, {}):
                self._loads.forget(ModelOnNode(name, model))
                self._ended_at.pop(ModelOnNode(name, model), None)

    def acquire(
        self,
        model: str,
        prompt: Callable[[], bytes],
        excluded: frozenset[str] = NO_NODES,
        has_pictures: bool = False,
        client: str = SOMEBODY,
    ) -> Lease | None:
        """A lease where `model` is ready, or `None`. The hot path: for a single replica nothing is computed.
        `has_pictures` prefers a replica that reads pictures."""
        ready = self._ready.of(model)
        if excluded or self.suspects or self.closed:
            avoided, closed = excluded | self.suspects, self.closed
            ready = tuple(each for each in ready if each.target.node not in avoided and each.target not in closed)
        if not ready:
            return None
        if has_pictures and len(ready) > 1:
            ready = tuple(each for each in ready if each.reads_pictures) or ready
        lease = self._take(ready[0], prompt) if len(ready) == 1 else self._take_best(model, ready, prompt())
        lease.client = client
        self._demand.runs(client, lease.target)
        return lease

    def acquire_for(self, pending: PendingRequest, excluded: frozenset[str] = NO_NODES) -> Lease | None:
        return self.acquire(pending.model, pending.prompt, excluded, pending.has_pictures, pending.client)

    def context_tokens(self, model: str) -> int | None:
        """The largest context of `model` where it is ready; None where that is not known."""
        contexts = [each.context_tokens for each in self._ready.of(model)]
        known = [context for context in contexts if context is not None]
        return max(known) if known and len(known) == len(contexts) else None

    def has_context(self, model: str, tokens: int) -> bool:
        """Whether a ready replica has a context of `tokens`, or reports none."""
        return any((each.context_tokens or tokens) >= tokens for each in self._ready.of(model))

    def too_small(self, model: str, prompt_tokens: int) -> frozenset[str]:
        """The nodes whose replica has no room for such a prompt and a response; none if no other replica has it."""
        ready = self._ready.of(model)
        small = frozenset(each.target.node for each in ready if (each.context_tokens or math.inf) <= prompt_tokens)
        return small if len(small) < len(ready) else NO_NODES

    def tokeniser(self, model: str, *, has_pictures: bool = False) -> Lease | None:
        """A node that can count tokens for `model`, loaded or not. None while no node has its files, which a load
        fetches. Raises UnsupportedModality if no node ever can, and Overloaded if those that can are down."""
        fleet = self._fleet_state.fleet
        listing = fleet.listing(model)
        able = [node for node in listing if _counts_tokens(node) and not node.residencies[model].is_absent]
        candidates = [node for node in able if node.healthy]
        if able and not candidates:
            raise Overloaded(f"The nodes that count tokens for {model} are down; try again.", retry_after_s=5.0)
        if not candidates:
            if fleet.catalogue.has(model) and any(_counts_tokens(node) and node.takes_orders for node in fleet.nodes):
                return None
            raise UnsupportedModality(f"No node can count tokens for {model}; start a neuron that lists the model.")

        def rank(node: Node) -> tuple[bool, bool]:
            held = node.residencies[model]
            return has_pictures and held.status.capabilities.vision, held.state is ModelState.READY

        node = max(candidates, key=rank)
        target = ModelOnNode(node.name, model)
        return self._counted(Lease(*target, target, node.abilities, False, "counts tokens for this model"))

    def check_pictures(self, model: str, may_use: Callable[[str], bool]) -> None:
        """Raises UnsupportedModality if `model` is known to read text only; the error suggests models that read
        pictures and that `may_use` admits. For other servers this is known only from the catalogue."""
        fleet = self._fleet_state.fleet
        own = fleet.catalogue.spec(model).capabilities
        held = [(node, node.residencies[model].status) for node in fleet.listing(model)]
        may_read = not held or any(
            status.capabilities.vision or (not own and not _reports_what_it_reads(node, status))
            for node, status in held
        )
        if may_read or "vision" in own:
            return
        listed = {spec.id: spec.capabilities for spec in fleet.catalogue.models if spec.capabilities}
        reported = {
            name
            for node in fleet.nodes
            for name, residency in node.residencies.items()
            if residency.status.capabilities.vision or "vision" in listed.get(name, ())
        }
        raise reads_text_only(model, sorted(filter(may_use, reported)), "messages")

    def check_capable(self, model: str, need: RequestKind) -> None:
        """Raises UnsupportedModality if `model` is known not to do what a request needs; the error suggests a model
        that can. A model whose files no node has read yet passes."""
        if need == "relay":
            self._check_server(model)
        if need not in _CAPABILITIES:
            return
        capabilities, problem = _CAPABILITIES[need]
        fleet = self._fleet_state.fleet
        own = [can for node in fleet.listing(model) if (can := _known_capabilities(node, model, capabilities))]
        if not own or any(own[-1]):
            return
        known = {
            name: can
            for node in fleet.nodes
            for name in node.residencies
            if (can := _known_capabilities(node, name, capabilities))
        }
        others = sorted((name for name, can in known.items() if any(can)), key=lambda name: (not known[name][0], name))
        advice = f"use {others[0]}" if others else f"no model of this fleet has the capability `{capabilities[0]}`"
        raise UnsupportedModality(f"{model} {problem}; {advice}.", param="model", details={"models": others[:8]})

    def _check_server(self, model: str) -> None:
        """Raises UnsupportedModality for a model that is known to run on the built-in engine everywhere."""
        spec = self._fleet_state.fleet.catalogue.spec(model)
        nodes = self._fleet_state.fleet.listing(model)
        harnesses = {node.residencies[model].status.harness if node.takes_orders else None for node in nodes}
        if spec.harness is None and harnesses == {ENGINE}:
            raise UnsupportedModality(
                f"{model} runs on the built-in engine, which serves conversations, embeddings and scores; use a model "
                "that a server of its own runs (`harness`)."
            )

    def release(self, lease: Lease) -> bool:
        """End a lease; True when that was the last one for its model on its node."""
        counts = self._in_flight.get(lease.node, {})
        remaining = counts.get(lease.model, 0) - 1
        if remaining > 0:
            counts[lease.model] = remaining
        else:
            counts.pop(lease.model, None)
            self._ended_at[lease.target] = self._clock()
        self.recount.add(lease.node)
        if lease.client is not None:
            self._demand.ended(lease.client, lease.target, self._clock())
        if lease.has_alternatives:
            self._loads.released(lease.target, is_last=remaining <= 0)
        return remaining <= 0

    def is_outdated(self, node: Node) -> bool:
        """Whether the last report of `node` shows requests of this gateway that have ended since."""
        return any(
            held.is_busy and not held.in_flight and self._ended_at.get(target, -math.inf) >= held.seen_at
            for held in node.active
            if (target := ModelOnNode(node.name, held.model_id))
        )

    def measured(self, lease: Lease, num_computed_tokens: int, first_token_s: float | None, request_s: float) -> None:
        """A request was completed: its computed prompt tokens, and its times from when it was sent."""
        if lease.has_alternatives:
            self._loads.measured(
                lease.target, num_computed_tokens, first_token_s if lease.is_alone else None, request_s
            )

    def observed(self, name: str) -> None:
        """Apply a node's report: its load, and where cached prefixes of reloaded models are."""
        node = self._fleet_state.reported(name)
        known = self._ready_since.setdefault(name, {})
        ready = ready_models(node)
        for model in [each for each in known if each not in ready]:
            del known[model]
            self._loads.forget(ModelOnNode(name, model))
            self._ended_at.pop(ModelOnNode(name, model), None)
            self.left_device(name, model)
        for model in ready:
            held = node.residencies[model]
            before = known.setdefault(model, held.state_since)
            if node.takes_orders and held.state_since > before + RELOAD_TOLERANCE_S:
                known[model] = held.state_since
                self.left_device(name, model)
            target = ModelOnNode(name, model)
            self._loads.observed(target, held, self.in_flight_on(name).get(model, 0))
        for model in tuple(self._recorded.get(name, ())):
            self._limit(node, model)

    def went_down(self, node: str) -> None:
        """What `node` had computed may still be on its disk, which it reports after it has reloaded the model."""
        for model in self._recorded.get(node, ()):
            self._prefixes[model].moved_to_host(node)
            self._unsure.add(ModelOnNode(node, model))

    def forget_cache(self, node: str) -> None:
        """`node` lost its cached prefixes."""
        for model in self._recorded.pop(node, ()):
            self._prefixes[model].forget(node)
            self._unsure.discard(ModelOnNode(node, model))

    def left_device(self, node: str, model: str) -> None:
        """The model slept or was unloaded: its cached prefixes are in host memory, to the extent that the node
        reports."""
        if model in self._recorded.get(node, ()):
            self._prefixes[model].moved_to_host(node)

    def _limit(self, node: Node, model: str) -> None:
        """Forget prefixes beyond what `node` reports to hold."""
        prefixes, held = self._prefixes[model], node.residencies.get(model)
        if held is not None and held.state is ModelState.UNLOADING:
            return  # its pages are being copied, and reported at the end
        target = ModelOnNode(node.name, model)
        if target in self._unsure and (held is None or held.state is not ModelState.READY):
            return
        self._unsure.discard(target)
        if held is None:
            prefixes.forget(node.name)
        elif (kept := held.status.kv_host) is None:
            prefixes.limit(node.name, held.status.kv_tokens, 0)
        else:
            prefixes.limit(node.name, held.status.kv_tokens, kept.num_tokens or None)
        if node.name not in prefixes:
            self._recorded[node.name].discard(model)

    def _take(self, replica: ReadyReplica, prompt: Callable[[], bytes]) -> Lease:
        target = replica.target
        node, model = target
        lease = Lease(node, model, target, replica.abilities, False, "the only replica that is ready")
        if replica.abilities.takes_orders and len(self._fleet_state.fleet.listing(model)) > 1:
            # The model may move: another node then needs to know which pages were computed here.
            prefixes, blocks = self._prefixes.setdefault(model, PrefixRecord()), leading_blocks(prompt())
            if blocks:
                source = source_of(blocks, prefixes, self._is_source)
                if source.tokens_for(node, prefixes.cached(blocks, node)):
                    lease.kv_source = source.place
                prefixes.record(blocks, node)
                self._recorded.setdefault(node, set()).add(model)
        return self._counted(lease)

    def _take_best(self, model: str, ready: tuple[ReadyReplica, ...], prompt: bytes) -> Lease:
        if (prefixes := self._prefixes.get(model)) is None:
            prefixes = self._prefixes[model] = PrefixRecord()
        replica, is_alone, copies, source = self._loads.route(ready, self._in_flight, prompt, prefixes, self._is_source)
        target, reason = replica.target, _least_time(len(ready), copies=copies)
        if target.node in prefixes:
            self._recorded.setdefault(target.node, set()).add(model)
        return self._counted(Lease(*target, target, replica.abilities, True, reason, is_alone, kv_source=source))

    def _is_source(self, node: str) -> bool:
        """Whether a node that has computed a prompt can be asked for it."""
        return node in self._fleet_state and self._fleet_state.is_up(node) and node not in self.suspects

    def _counted(self, lease: Lease) -> Lease:
        if (counts := self._in_flight.get(lease.node)) is None:
            counts = self._in_flight[lease.node] = {}
        counts[lease.model] = counts.get(lease.model, 0) + 1
        self.recount.add(lease.node)
        return lease


def _known_capabilities(node: Node, model: str, capabilities: tuple[str, ...]) -> list[bool]:
    """Which of `capabilities` the model has there; empty: not known."""
    held = node.residencies[model]
    is_read = held.status.family is not None or held.state is ModelState.READY
    if not is_read or not node.takes_orders:  # the capabilities of a foreign server are unknown
        return []
    return [getattr(held.status.capabilities, capability) for capability in capabilities]


def _counts_tokens(node: Node) -> bool:
    return "anthropic_messages" in node.abilities.dialects


def _reports_what_it_reads(node: Node, status: ModelStatus) -> bool:
    """Models of other servers do not, nor do those whose files no node has read yet."""
    return node.takes_orders and status.harness == ENGINE and status.family is not None


@cache
def _least_time(num_replicas: int, *, copies: bool) -> str:
    kept = ", with a part of the prompt in its host memory" if copies else ""
    return f"least expected time of {num_replicas} replicas{kept}"
