"""The one place that owns the picture of the fleet and the requests that wait.

A state machine without I/O: events come in as method calls, orders go out through `Effects`, decisions come from
`cortex.fleet`, time from a clock. Everything happens on the loop's thread, one event at a time, so there are no locks
and no decision is made from a copy that somebody else is changing. Nodes have the last word on their own state: an
order is "ensure ready" or "ensure gone", and is harmless when that is already so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from cortex.fleet import explain, routing
from cortex.fleet.catalogue import Catalogue, ModelSpec, Resolution
from cortex.fleet.decision import Assessment, Decision, Origin, Verdict
from cortex.fleet.eviction import expired
from cortex.fleet.placement import place, unmet_pins
from cortex.fleet.queueing import Seat, Waiting, plan
from cortex.fleet.routing import Affinity, Replica
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.gateway.config import NeuronSection
from cortex.gateway.journal import Journal
from cortex.gateway.picture import LoadFailure, LoadJob, Picture
from cortex.gateway.tickets import Lease, Ticket
from cortex.wire.errors import (
    CortexError,
    InsufficientCapacity,
    LoadFailed,
    ModelNotFound,
    Overloaded,
    ShuttingDown,
    UnsupportedModality,
    UpstreamUnavailable,
)
from cortex.wire.node import Dialect, Discovery, Health, LoadRequest, ModelState, ModelStatus, UnloadRequest

MAX_REMEMBERED_NAMES = 1024
_FEASIBLE = frozenset(
    {
        Verdict.RESIDENT,
        Verdict.STARTING,
        Verdict.ASLEEP,
        Verdict.FITS,
        Verdict.FITS_AFTER_EVICTION,
        Verdict.BLOCKED,
        Verdict.CROWDED,
    }
)


Watcher = Callable[[CortexError | None], None]
"""Hears once how a load or unload at a seat ended."""


class Effects(Protocol):
    """What the dispatcher orders. Each call returns at once; its outcome comes back as an event."""

    def load(self, node: str, request: LoadRequest) -> None:
        """Ends in `load_ended`."""

    def unload(self, node: str, request: UnloadRequest, cause: str) -> None:
        """`cause` is `evicted`, `ttl` or `operator`. Ends in `unload_ended`, after a fresh poll of the node."""

    def abandon(self, node: str) -> None:
        """The node is down: stop waiting for its loads and unloads. They end in no event."""

    def look(self, node: str) -> None:
        """Poll the node now; ends in `observed` or `missed`."""


class Dispatcher:
    """Routes requests that can be served now, queues the others, and decides what to load and unload for them."""

    def __init__(
        self,
        effects: Effects,
        journal: Journal,
        clock: Callable[[], float],
        *,
        catalogue: Catalogue,
        rules: EvictionRules,
        neurons: Iterable[NeuronSection],
        max_wait_s: float,
        max_waiting: int,
        missed_polls: int,
    ) -> None:
        self._effects = effects
        self._journal = journal
        self._clock = clock
        self._picture = Picture(catalogue, rules)
        self._in_flight: dict[Seat, int] = {}
        self._queues: dict[str, deque[Ticket]] = {}
        self._suspects: set[str] = set()
        self._closed: frozenset[Seat] = frozenset()
        self._names: dict[str, Resolution] = {}
        self._ready: dict[str, tuple[tuple[Node, Residency], ...]] = {}
        self._speaks: dict[str, frozenset[Dialect]] = {}
        self._affinities: dict[str, Affinity] = {}
        self._watchers: dict[Seat, list[Watcher]] = {}
        self._advancing = False
        self._advance_again = False
        self._closing = False
        self.reconfigure(
            catalogue, rules, neurons, max_wait_s=max_wait_s, max_waiting=max_waiting, missed_polls=missed_polls
        )

    # --- what is known

    @property
    def fleet(self) -> Fleet:
        """The current picture, with this gateway's own request counts."""
        return self._picture.fleet.with_in_flight(self._in_flight)

    @property
    def queue_depths(self) -> dict[str, int]:
        return {model: len(queue) for model, queue in self._queues.items()}

    @property
    def in_flight(self) -> dict[Seat, int]:
        """Requests open at each (node, model); only those with any."""
        return {seat: count for seat, count in self._in_flight.items() if count}

    def reconfigure(
        self,
        catalogue: Catalogue,
        rules: EvictionRules,
        neurons: Iterable[NeuronSection],
        *,
        max_wait_s: float,
        max_waiting: int,
        missed_polls: int,
    ) -> None:
        """Take over a new configuration; what runs and waits goes on under it."""
        self._max_wait_s = max_wait_s
        self._max_waiting = max_waiting
        self._missed_polls = missed_polls
        self._lifecycle = {neuron.name: neuron.kind == "neuron" for neuron in neurons}
        self._picture.catalogue = catalogue
        self._picture.rules = rules
        self._picture.expect(self._lifecycle)
        self._changed()

    def resolve(self, name: str) -> Resolution:
        """The model a client means. Raises ModelNotFound with near misses."""
        known = self._names.get(name)
        if known is None:
            known = self._picture.catalogue.resolve(name, self._picture.fleet.live_models())
            if len(self._names) >= MAX_REMEMBERED_NAMES:
                self._names.clear()
            self._names[name] = known
        return known

    def speaks(self, node: str, dialect: Dialect) -> bool:
        return dialect in self._speaks.get(node, ())

    def has_lifecycle(self, node: str) -> bool:
        return self._lifecycle.get(node, False)

    def is_ready(self, model: str, node: str) -> bool:
        return any(here.name == node for here, _ in self._picture.fleet.replicas(model))

    def explain(self, model: str, origin: Origin = "request") -> Decision:
        """What would be decided for a request now. Changes nothing."""
        return place(model, self.fleet, self._clock(), origin=origin)

    def feasible_on(self, spec: ModelSpec) -> tuple[str, ...]:
        """The nodes that could serve the model, now or after making room."""
        decision = place(spec.id, self._picture.fleet, self._clock(), origin="operator")
        return tuple(each.node for each in decision.assessments if each.verdict in _FEASIBLE)

    # --- requests

    def acquire(
        self, resolution: Resolution, prompt: Callable[[], bytes], excluded: frozenset[str] = frozenset()
    ) -> Lease | None:
        """A lease where the model is ready, or None. The hot path: with one replica nothing is computed."""
        model = resolution.model_id
        ready = self._ready.get(model)
        if ready is None:
            ready = self._ready[model] = tuple(self._picture.fleet.replicas(model))
        if not ready:
            return None
        if len(ready) > 1 or excluded or self._suspects or self._closed:
            ready = tuple(
                (node, held)
                for node, held in ready
                if node.name not in excluded
                and node.name not in self._suspects
                and (node.name, model) not in self._closed
            )
            if not ready:
                return None
        name = ready[0][0].name if len(ready) == 1 else self._choose(model, ready, prompt())
        seat = (name, model)
        self._in_flight[seat] = self._in_flight.get(seat, 0) + 1
        return Lease(name, model)

    def _choose(self, model: str, ready: tuple[tuple[Node, Residency], ...], prompt: bytes) -> str:
        replicas = [Replica.of(node, held, self._in_flight.get((node.name, model), 0)) for node, held in ready]
        affinity = self._affinities.setdefault(model, Affinity())
        return routing.choose(replicas, prompt, affinity).node

    def wait(self, ticket: Ticket) -> None:
        """Queue a request that `acquire` could not serve. Raises Overloaded when too many wait already."""
        if self._closing:
            raise ShuttingDown("This gateway is shutting down; try again in a moment.", retry_after_s=5.0)
        model = ticket.resolution.model_id
        queue = self._queues.setdefault(model, deque())
        if len(queue) >= self._max_waiting:
            raise Overloaded(
                f"{len(queue)} requests already wait for {model}; try again later, or raise max_waiting.",
                retry_after_s=10.0,
            )
        is_news = not queue or all(other.origin == "background" for other in queue)
        queue.append(ticket)
        if is_news:
            self._advance()

    def cancel(self, ticket: Ticket) -> None:
        """The client has left. A load under way goes on: others may want it, and it is cheap to keep."""
        queue = self._queues.get(ticket.resolution.model_id)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            self._drop_if_empty(ticket.resolution.model_id)

    def release(self, lease: Lease) -> None:
        """The request has ended, however it did."""
        seat = (lease.node, lease.model)
        left = self._in_flight.get(seat, 0) - 1
        if left > 0:
            self._in_flight[seat] = left
            return
        self._in_flight.pop(seat, None)
        if self._queues:
            self._effects.look(lease.node)  # its last report still shows the model busy
            self._advance()

    def suspect(self, node: str, why: str) -> None:
        """A request failed there: nothing more is sent until the next poll has shown that the node lives."""
        if node in self._lifecycle and node not in self._suspects:
            self._suspects.add(node)
            self._journal.happened("node_suspected", node=node, why=why)
            self._effects.look(node)

    def gone(self, lease: Lease) -> None:
        """The node denies having the model, whatever its last report said."""
        self._picture.forget_ready(lease.node, lease.model, self._clock())
        self._changed()
        self._effects.look(lease.node)

    def knower(self, resolution: Resolution) -> Lease:
        """A node that can tokenise for the model, whether or not it is loaded. Raises when none can."""
        model = resolution.model_id
        candidates = [
            node
            for node in self._picture.fleet.nodes
            if node.healthy and model in node.residencies and "anthropic_messages" in node.dialects
        ]
        if not candidates:
            raise UnsupportedModality(
                f"No node that is up can count tokens for {model}; a neuron that lists the model is needed."
            )
        best = max(candidates, key=lambda node: node.residencies[model].state is ModelState.READY)
        seat = (best.name, model)
        self._in_flight[seat] = self._in_flight.get(seat, 0) + 1
        return Lease(best.name, model)

    def embedder(self, resolution: Resolution) -> Lease:
        """A node whose model makes embeddings. Raises UnsupportedModality when there is none."""
        model = resolution.model_id
        for node, held in self._picture.fleet.replicas(model):
            if held.status.capabilities.embeddings:
                seat = (node.name, model)
                self._in_flight[seat] = self._in_flight.get(seat, 0) + 1
                return Lease(node.name, model)
        raise UnsupportedModality(f"{model} makes no embeddings; choose a model whose capabilities say it does.")

    # --- nodes

    def observed(self, node: str, discovery: Discovery, health: Health) -> None:
        """A poll was answered."""
        if node not in self._lifecycle:
            return
        was_up = self._is_up(node)
        self._picture.observed(node, discovery, health, self._clock(), has_lifecycle=self._lifecycle[node])
        self._suspects.discard(node)
        if not was_up:
            self._journal.happened("node_up", node=node, models=len(health.models))
        self._changed()
        self._notice_ends(node, health)
        self._advance()

    def missed(self, node: str, why: str) -> None:
        """A poll was not answered. Several in a row, and the node counts as down."""
        if node not in self._lifecycle:
            return
        was_up = self._is_up(node)
        self._picture.missed(node, why, limit=self._missed_polls)
        self._changed()
        if was_up and not self._is_up(node):
            self._went_down(node, why)
        self._advance()

    def _notice_ends(self, name: str, health: Health) -> None:
        """Loads that somebody else ordered end in a poll."""
        for status in health.models:
            seat = (name, status.id)
            if seat not in self._watchers or seat in self._picture.loads or seat in self._picture.unloads:
                continue
            if status.state is ModelState.READY:
                self._tell(seat, None)
            elif status.state in (ModelState.COLD, ModelState.FAILED):
                self._tell(seat, LoadFailed(status.reason or f"{status.id} is {status.state} on {name}."))

    def _is_up(self, name: str) -> bool:
        node = self._picture.fleet.node(name)
        return node is not None and node.healthy

    def _went_down(self, node: str, why: str) -> None:
        self._journal.happened("node_down", node=node, why=why)
        self._suspects.discard(node)
        self._effects.abandon(node)
        for jobs in (self._picture.loads, self._picture.unloads):
            for seat in [seat for seat in jobs if seat[0] == node]:
                del jobs[seat]
        for affinity in self._affinities.values():
            affinity.forget(node)
        self._changed()
        for seat in [seat for seat in self._watchers if seat[0] == node]:
            self._tell(seat, UpstreamUnavailable(f"Node {node} went down: {why}"))

    # --- loads and unloads

    def load_ended(self, node: str, model: str, result: ModelStatus | CortexError) -> None:
        """A load that was ordered is over."""
        job = self._picture.loads.pop((node, model), None)
        self._journal.settled(model)
        now = self._clock()
        if isinstance(result, ModelStatus):
            self._picture.put(node, result, now)
            self._picture.count_load(node)
            self._picture.failures.pop((node, model), None)
            self._journal.happened("model_loaded", node=node, model=model, bytes=result.measured_bytes)
        else:
            self._journal.happened("load_failed", node=node, model=model, why=result.message)
            self._changed()
            ran_out = job is not None and isinstance(result, InsufficientCapacity) and not job.is_retry
            if job is not None and ran_out and self._retry_with_more_room(job):
                return
            self._picture.failures[node, model] = LoadFailure(now, result.message)
        self._changed()
        self._tell((node, model), None if isinstance(result, ModelStatus) else result)
        self._advance()

    def _retry_with_more_room(self, job: LoadJob) -> bool:
        """The node ran out of memory: once, evict as if the model needed more than there was, and load again there."""
        others = [name for name in self._lifecycle if name != job.node]
        plain = place(job.model, self.fleet, self._clock(), excluded=others)
        have = sum(row.available_bytes for each in plain.assessments for row in each.rows if row.chosen)
        decision = place(
            job.model, self.fleet, self._clock(), excluded=others, at_least_bytes=max(have, job.num_bytes) + 1
        )
        if decision.action != "load" or not decision.victims:
            return False
        self._begin(decision, is_retry=True)
        return True

    def unload_ended(self, node: str, model: str, error: CortexError | None) -> None:
        """An unload that was ordered is over; the node has been polled since."""
        self._picture.unloads.pop((node, model), None)
        self._journal.settled(model)
        waiting = [job for job in self._picture.loads.values() if job.node == node and model in job.victims]
        if error is None:
            self._picture.forget_ready(node, model, self._clock())
            self._journal.happened("model_unloaded", node=node, model=model)
            if model in self._affinities:
                self._affinities[model].forget(node)
        else:
            self._journal.happened("unload_failed", node=node, model=model, why=error.message)
        self._changed()
        for job in waiting:
            if error is None:
                self._victim_gone(job, model)
            else:
                reason = f"{model} could not be unloaded to make room: {error.message}"
                self._picture.failures[node, job.model] = LoadFailure(self._clock(), reason)
                del self._picture.loads[node, job.model]
                self._tell((node, job.model), LoadFailed(reason))
        self._changed()
        self._tell((node, model), error)
        self._advance()

    def _victim_gone(self, job: LoadJob, victim: str) -> None:
        left = LoadJob(
            job.node,
            job.model,
            job.devices,
            job.num_bytes,
            job.begun_at,
            victims=job.victims - {victim},
            is_retry=job.is_retry,
        )
        self._picture.loads[job.node, job.model] = left
        if not left.victims:
            self._order_load(left)

    def _begin(self, decision: Decision, *, is_retry: bool = False) -> None:
        node, model = decision.node, decision.model_id
        assert node is not None  # only loads and wakes begin
        if (node, model) in self._picture.loads:
            return
        now = self._clock()
        job = LoadJob(
            node,
            model,
            decision.devices,
            decision.need_bytes or 0,
            now,
            victims=frozenset(decision.victims),
            is_retry=is_retry,
        )
        self._picture.loads[node, model] = job
        for victim in decision.victims:
            self._unload(node, victim, cause="evicted", for_model=model)
        self._changed()
        if not job.victims:
            self._order_load(job)

    def _order_load(self, job: LoadJob) -> None:
        spec = self._picture.catalogue.spec(job.model)
        self._journal.happened("load_started", node=job.node, model=job.model)
        self._effects.load(
            job.node,
            LoadRequest(
                model_id=spec.id,
                source=spec.source,
                harness=spec.harness,
                quant=spec.quant,
                devices=job.devices,
                tensor_parallel=max(1, len(job.devices)),
                context_tokens=spec.context,
            ),
        )

    def _unload(self, node: str, model: str, *, cause: str, for_model: str | None = None, force: bool = False) -> None:
        if (node, model) in self._picture.unloads:
            return
        self._picture.unloads[node, model] = self._clock()
        self._journal.happened("unload_started", node=node, model=model, cause=cause, for_model=for_model)
        self._effects.unload(node, UnloadRequest(model_id=model, force=force), cause)

    # --- by hand

    def watch(self, seat: Seat, watcher: Watcher) -> None:
        """Call `watcher` when what is under way at `seat` has ended."""
        self._watchers.setdefault(seat, []).append(watcher)

    def _tell(self, seat: Seat, error: CortexError | None) -> None:
        for watcher in self._watchers.pop(seat, ()):
            watcher(error)

    def load(self, model: str, node: str | None = None) -> Decision:
        """Load by order of the operator. Raises what stands in the way; returns the decision otherwise."""
        if node is not None and node not in self._lifecycle:
            raise UpstreamUnavailable(f"There is no node {node}; the fleet has {', '.join(self._lifecycle) or 'none'}.")
        excluded = [name for name in self._lifecycle if node is not None and name != node]
        decision = place(model, self.fleet, self._clock(), origin="operator", excluded=excluded)
        self._journal.decided(decision)
        if decision.action in ("load", "wake"):
            self._picture.failures.pop((decision.node or "", model), None)
            self._begin(decision)
        elif decision.action in ("wait", "refuse"):
            raise explain.refusal(decision)
        return decision

    def unload(self, model: str, node: str | None = None, *, force: bool = False) -> tuple[str, ...]:
        """Unload by order of the operator, everywhere or on one node; returns where. Raises when it is nowhere."""
        places = [
            here.name
            for here in self._picture.fleet.nodes
            if here.has_lifecycle
            and (node is None or here.name == node)
            and model in here.residencies
            and here.residencies[model].state not in (ModelState.COLD, ModelState.FAILED)
        ]
        if not places:
            raise ModelNotFound(f"{model} is loaded on no node{f' called {node}' if node else ''}.", param="model")
        for name in places:
            self._picture.pins.discard((name, model))
            self._unload(name, model, cause="operator", force=force)
        self._changed()
        return tuple(places)

    def pin(self, model: str, node: str | None = None) -> tuple[str, ...]:
        """Keep the model where it is, loading it first where it is nowhere. Returns the nodes that keep it."""
        places = [
            here.name
            for here, _ in self._picture.fleet.replicas(model)
            if here.has_lifecycle and (node is None or here.name == node)
        ]
        if not places:
            chosen = self.load(model, node).node
            places = [chosen] if chosen is not None else []
        self._picture.pins |= {(name, model) for name in places}
        self._changed()
        return tuple(places)

    def unpin(self, model: str, node: str | None = None) -> tuple[str, ...]:
        """Let the model be displaced again where a hand, not the catalogue, had pinned it."""
        freed = {seat for seat in self._picture.pins if seat[1] == model and node in (None, seat[0])}
        self._picture.pins -= freed
        self._changed()
        self._advance()
        return tuple(sorted(name for name, _ in freed))

    # --- time

    def tick(self) -> None:
        """Called about once a second: overdue requests, expired models, pinned models that are missing."""
        now = self._clock()
        for model, queue in list(self._queues.items()):
            while queue and now - queue[0].since >= self._max_wait_s:
                queue.popleft().deliver(self._waited_too_long(model))
            self._drop_if_empty(model)
        for node, model in expired(self.fleet, now):
            self._unload(node, model, cause="ttl")
        self._changed()
        for model, pinned_node in unmet_pins(self.fleet):
            others = [name for name in self._lifecycle if pinned_node is not None and name != pinned_node]
            decision = place(model, self.fleet, now, excluded=others)
            if decision.action in ("load", "wake"):
                self._journal.decided(decision)
                self._begin(decision)
        self._advance()

    def close(self) -> None:
        """Shutting down: everybody who waits is told so at once."""
        self._closing = True
        for model, queue in list(self._queues.items()):
            while queue:
                queue.popleft().deliver(
                    ShuttingDown("This gateway is shutting down; try again in a moment.", retry_after_s=5.0)
                )
            self._drop_if_empty(model)

    def _waited_too_long(self, model: str) -> CortexError:
        decision = self.explain(model)
        why = explain.outcome(decision)
        return Overloaded(
            f"{model} did not become ready within {self._max_wait_s:.0f} s. {why}",
            retry_after_s=30.0,
            details={"decision": explain.as_json(decision)},
        )

    # --- inside

    def _changed(self) -> None:
        """Redraw the picture and drop what was derived from the old one."""
        self._picture.redraw(self._clock())
        self._ready.clear()
        self._names.clear()
        self._speaks = {node.name: frozenset(node.dialects) for node in self._picture.fleet.nodes}

    def _drop_if_empty(self, model: str) -> None:
        if model in self._queues and not self._queues[model]:
            del self._queues[model]

    def _advance(self) -> None:
        """Serve who can be served and decide for the rest, until nothing changes. Not reentrant: a nested call,
        made by a delivery, asks for another round instead."""
        if self._advancing:
            self._advance_again = True
            return
        self._advancing = True
        try:
            while self._queues:
                self._advance_again = False
                self._serve()
                self._decide()
                if not self._advance_again:
                    break
            if not self._queues:
                self._closed = frozenset()
        finally:
            self._advancing = False

    def _serve(self) -> None:
        for model in list(self._queues):
            while queue := self._queues.get(model):
                lease = self.acquire(queue[0].resolution, queue[0].prompt)
                if lease is None:
                    break
                queue.popleft().deliver(lease)
            self._drop_if_empty(model)

    def _decide(self) -> None:
        now = self._clock()
        decided = plan([_waiting(model, queue) for model, queue in self._queues.items()], self.fleet, now)
        if self._closed - decided.closed:
            self._advance_again = True  # somebody may pass again
        self._closed = decided.closed
        for decision in (*decided.starts, *decided.waits, *decided.refusals):
            self._journal.decided(decision)
        for decision in decided.starts:
            self._begin(decision)
        for decision in decided.refusals:
            if not self._may_change_soon(decision):
                self._fail_all(decision.model_id, explain.refusal(decision))

    def _may_change_soon(self, decision: Decision) -> bool:
        """A node that has not been heard yet, or may only have stumbled, could still take it."""
        return any(self._is_undecided(each) for each in decision.assessments)

    def _is_undecided(self, assessment: Assessment) -> bool:
        node = self._picture.fleet.node(assessment.node)
        return node is not None and not node.healthy and node.missed_polls < self._missed_polls

    def _fail_all(self, model: str, error: CortexError) -> None:
        queue = self._queues.pop(model, None)
        while queue:
            queue.popleft().deliver(error)


def _waiting(model: str, queue: deque[Ticket]) -> Waiting:
    origins: set[Origin] = {ticket.origin for ticket in queue}
    origin: Origin = "operator" if "operator" in origins else "request" if "request" in origins else "background"
    return Waiting(model_id=model, since=queue[0].since, count=len(queue), origin=origin)
