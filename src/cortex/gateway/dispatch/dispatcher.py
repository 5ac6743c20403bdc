"""The one place that owns the picture of the fleet and the requests that wait.

A state machine without I/O: events come in as method calls, orders go out through `Effects`, decisions come from
`cortex.fleet`, time from a clock. Everything happens on the loop's thread, one event at a time, so there are no locks
and no decision is made from a copy that somebody else is changing. Nodes have the last word on their own state: an
order is "ensure ready" or "ensure gone", and is harmless when that is already so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cortex.fleet import explain
from cortex.fleet.catalogue import Catalogue, ModelSpec, Resolution
from cortex.fleet.decision import Assessment, Decision, Origin, Verdict
from cortex.fleet.eviction import due_for_recycling, expired
from cortex.fleet.memory import ledger
from cortex.fleet.placement import place, unmet_pins
from cortex.fleet.queueing import ModelOnNode, plan
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import Fleet
from cortex.gateway.config import NeuronSection
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.fleet_state import FleetState, LoadJob, Shortfall
from cortex.gateway.dispatch.lease_pool import LeasePool
from cortex.gateway.dispatch.leases import Lease, PendingRequest
from cortex.gateway.dispatch.measured_sizes import Measured
from cortex.gateway.dispatch.model_jobs import Effects, ModelJobs, Watcher
from cortex.gateway.dispatch.queues import Queues
from cortex.wire.errors import (
    CortexError,
    InsufficientCapacity,
    InvalidValue,
    ModelNotFound,
    Overloaded,
    ShuttingDown,
    shorten,
)
from cortex.wire.node import Discovery, Health, ModelState, ModelStatus

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


class Dispatcher:
    """Routes requests that can be served now, queues the others, and decides what to load and unload for them."""

    def __init__(
        self,
        effects: Effects,
        event_log: EventLog,
        clock: Callable[[], float],
        *,
        catalogue: Catalogue,
        rules: EvictionRules,
        neurons: Iterable[NeuronSection],
        max_wait_s: float,
        max_waiting: int,
        missed_polls: int,
        measured: Measured | None = None,
    ) -> None:
        """`measured` is what models took when they were last loaded, as far as that is remembered."""
        self._effects = effects
        self._event_log = event_log
        self._clock = clock
        self._fleet_state = FleetState(catalogue, rules, Fleet(measured=dict(measured or {})))
        self._leases = LeasePool(self._fleet_state)
        self._model_jobs = ModelJobs(self._fleet_state, effects, event_log, clock)
        self._queues = Queues()
        self._names: dict[str, Resolution] = {}
        self._advancing = False
        self._advance_again = False
        self._closing = False
        self.acquire = self._leases.acquire
        self.reconfigure(
            catalogue, rules, neurons, max_wait_s=max_wait_s, max_waiting=max_waiting, missed_polls=missed_polls
        )

    # --- what is known

    @property
    def fleet(self) -> Fleet:
        """The current picture, with this gateway's own request counts."""
        return self._fleet_state.fleet.with_in_flight(self._leases.in_flight)

    @property
    def queue_depths(self) -> dict[str, int]:
        return self._queues.depths

    @property
    def in_flight(self) -> dict[ModelOnNode, int]:
        """Requests open at each (node, model); only those with any."""
        return dict(self._leases.in_flight)

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
        self._queues.max_wait_s = max_wait_s
        self._queues.max_waiting = max_waiting
        self._missed_polls = missed_polls
        self._has_lifecycle = {neuron.name: neuron.kind == "neuron" for neuron in neurons}
        self._fleet_state.catalogue = catalogue
        self._fleet_state.rules = rules
        self._fleet_state.expect(self._has_lifecycle)
        self._changed()

    def resolve(self, name: str) -> Resolution:
        """The model a client means. Raises ModelNotFound with near misses."""
        known = self._names.get(name)
        if known is None:
            known = self._fleet_state.catalogue.resolve(name, self._fleet_state.fleet.live_models())
            if len(self._names) >= MAX_REMEMBERED_NAMES:
                self._names.clear()
            self._names[name] = known
        return known

    def is_ready(self, model: str, node: str) -> bool:
        return any(here.name == node for here, _ in self._fleet_state.fleet.replicas(model))

    def explain(self, model: str, origin: Origin = "request") -> Decision:
        """What would be decided for a request now. Changes nothing."""
        return place(model, self.fleet, self._clock(), origin=origin)

    def feasible_on(self, spec: ModelSpec) -> tuple[str, ...]:
        """The nodes that could serve the model, now or after making room."""
        decision = place(spec.id, self._fleet_state.fleet, self._clock(), origin="operator")
        return tuple(each.node for each in decision.assessments if each.verdict in _FEASIBLE)

    # --- requests

    def ask(self, pending: PendingRequest) -> None:
        """Deliver a lease at once where one can be had, else queue the request.

        Raises what stands in the way: Overloaded, ShuttingDown, UnsupportedModality.
        """
        if pending.need == "count":
            pending.deliver(self._leases.tokeniser(pending.model))
        elif pending.need == "embeddings":
            pending.deliver(self._leases.embedder(pending.model))
        elif (lease := self.acquire(pending.model, pending.prompt, pending.excluded)) is not None:
            pending.deliver(lease)
        else:
            self.wait(pending)

    def wait(self, pending: PendingRequest) -> None:
        """Queue a request that `acquire` could not serve. Raises Overloaded when too many wait already."""
        if self._closing:
            raise _shutting_down()
        if self._queues.join(pending):
            self._advance()

    def cancel(self, pending: PendingRequest) -> None:
        """The client has left. A load under way goes on: others may want it, and it is cheap to keep."""
        self._queues.leave(pending)

    def release(self, lease: Lease) -> None:
        """The request has ended, however it did."""
        if self._leases.release(lease) and self._queues:
            self._effects.look(lease.node)  # its last report still shows the model busy
            self._advance()

    def suspect(self, node: str, why: str) -> None:
        """A request failed there: nothing more is sent until the next poll has shown that the node lives."""
        if node in self._has_lifecycle and node not in self._leases.suspects:
            self._leases.suspects.add(node)
            self._event_log.happened("node_suspected", node=node, why=why)
            self._effects.look(node)

    def gone(self, lease: Lease) -> None:
        """The node denies having the model, whatever its last report said."""
        self._fleet_state.forget_ready(lease.node, lease.model, self._clock())
        self._changed()
        self._effects.look(lease.node)

    # --- nodes

    def observed(self, node: str, discovery: Discovery, health: Health) -> None:
        """A poll was answered."""
        if node not in self._has_lifecycle:
            return
        was_up = self._is_up(node)
        self._fleet_state.observed(node, discovery, health, self._clock(), has_lifecycle=self._has_lifecycle[node])
        self._leases.suspects.discard(node)
        if not was_up:
            self._event_log.happened("node_up", node=node, models=len(health.models))
        self._changed()
        self._model_jobs.notice(node, health)
        self._advance()

    def missed(self, node: str, why: str) -> None:
        """A poll was not answered. Several in a row, and the node counts as down."""
        if node not in self._has_lifecycle:
            return
        was_up = self._is_up(node)
        self._fleet_state.missed(node, why, limit=self._missed_polls)
        self._changed()
        if was_up and not self._is_up(node):
            self._event_log.happened("node_down", node=node, why=why)
            self._leases.suspects.discard(node)
            self._leases.forget_cache(node)
            self._model_jobs.abandon(node, why)
            self._changed()
        self._advance()

    def _is_up(self, name: str) -> bool:
        node = self._fleet_state.fleet.node(name)
        return node is not None and node.healthy

    # --- loads and unloads

    def load_ended(self, node: str, model: str, result: ModelStatus | CortexError) -> None:
        """A load that was ordered is over."""
        job = self._model_jobs.load_ended(node, model, result)
        self._changed()
        if isinstance(result, ModelStatus):
            self._model_jobs.tell((node, model), None)
        elif not (isinstance(result, InsufficientCapacity) and job is not None and self._will_make_room(job)):
            self._model_jobs.give_up(node, model, result)
        self._changed()
        self._advance()

    def _will_make_room(self, job: LoadJob) -> bool:
        """The node ran out of memory: once, load again there as if the model needed more than there was.

        At once, where others can be evicted for it; where they are busy, those who wait go on waiting for that.
        """
        key, now = (job.node, job.model), self._clock()
        node = self._fleet_state.fleet.node(job.node)
        if key in self._fleet_state.shortfalls or node is None:
            return False
        have = sum(device.available_bytes for device in ledger(node) if device.index in job.devices)
        self._fleet_state.shortfalls[key] = Shortfall(now, max(have, job.need_bytes) + 1)
        self._changed()
        others = [name for name in self._has_lifecycle if name != job.node]
        decision = place(job.model, self.fleet, now, excluded=others)
        if decision.action in ("load", "wake"):
            self._event_log.decided(decision)
            self._model_jobs.begin(decision)
            return True
        return decision.assessments[0].verdict is Verdict.BLOCKED and job.model in self._queues

    def unload_ended(self, node: str, model: str, error: CortexError | None) -> None:
        """An unload that was ordered is over; the node has been polled since."""
        self._model_jobs.unload_ended(node, model, error)
        if error is None:
            self._leases.forget_cache(node, model)
        self._changed()
        self._advance()

    def recycle_ended(self, node: str, result: tuple[int, ...] | CortexError) -> None:
        """Workers that were to be replaced are, on these devices, or the node could not do it."""
        self._model_jobs.recycle_ended(node, result)
        self._changed()

    # --- by hand

    def watch(self, key: ModelOnNode, watcher: Watcher) -> None:
        """Call `watcher` when what is under way at `key` has ended."""
        self._model_jobs.watch(key, watcher)

    def load(self, model: str, node: str | None = None) -> Decision:
        """Load by order of the operator. Raises what stands in the way; returns the decision otherwise."""
        if node is not None and node not in self._has_lifecycle:
            known = ", ".join(self._has_lifecycle) or "none"
            raise InvalidValue(f"There is no node {shorten(node)}; the fleet has {known}.", param="node")
        excluded = [name for name in self._has_lifecycle if node is not None and name != node]
        decision = place(model, self.fleet, self._clock(), origin="operator", excluded=excluded)
        self._event_log.decided(decision)
        if decision.action in ("load", "wake"):
            self._fleet_state.failures.pop((decision.node or "", model), None)
            self._model_jobs.begin(decision)
            self._changed()
        elif decision.action in ("wait", "refuse"):
            raise explain.refusal(decision)
        return decision

    def unload(
        self, model: str, node: str | None = None, *, force: bool = False, sleep: bool = False
    ) -> tuple[str, ...]:
        """Unload by order of the operator, everywhere or on one node; returns where. Raises when it is nowhere.

        `sleep`: keep the weights in the node's host memory if there is room.
        """
        places = [
            here.name
            for here in self._fleet_state.fleet.nodes
            if here.has_lifecycle
            and node in (None, here.name)
            and model in here.residencies
            and here.residencies[model].state not in (ModelState.COLD, ModelState.FAILED)
        ]
        if not places:
            raise ModelNotFound(
                f"{model} is loaded on no node{f' called {shorten(node)}' if node else ''}.", param="model"
            )
        for name in places:
            self._fleet_state.pins.discard((name, model))
            self._model_jobs.unload(name, model, cause="operator", force=force, sleep=sleep)
        self._changed()
        return tuple(places)

    def pin(self, model: str, node: str | None = None) -> tuple[str, ...]:
        """Keep the model where it is, loading it first where it is nowhere. Returns the nodes that keep it."""
        places = [
            here.name
            for here, _ in self._fleet_state.fleet.replicas(model)
            if here.has_lifecycle and node in (None, here.name)
        ]
        if not places:
            chosen = self.load(model, node).node
            places = [chosen] if chosen is not None else []
        self._fleet_state.pins |= {(name, model) for name in places}
        self._changed()
        return tuple(places)

    def unpin(self, model: str, node: str | None = None) -> tuple[str, ...]:
        """Let the model be displaced again where a hand, not the catalogue, had pinned it."""
        freed = {key for key in self._fleet_state.pins if key[1] == model and node in (None, key[0])}
        self._fleet_state.pins -= freed
        self._changed()
        self._advance()
        return tuple(sorted(name for name, _ in freed))

    # --- time

    def tick(self) -> None:
        """Called about once a second: overdue requests, expired models, worn workers, missing pinned models."""
        now = self._clock()
        for pending in self._queues.overdue(now):
            pending.deliver(self._waited_too_long(pending.model))
        for node, model in expired(self.fleet, now):
            self._model_jobs.unload(node, model, cause="ttl", sleep=not self._fleet_state.is_asleep(node, model))
        self._changed()
        for here in self.fleet.nodes:
            if due_for_recycling(here, self._fleet_state.rules):
                self._model_jobs.recycle(here)
        for model, pinned_node in unmet_pins(self.fleet):
            others = [name for name in self._has_lifecycle if pinned_node is not None and name != pinned_node]
            decision = place(model, self.fleet, now, excluded=others)
            if decision.action in ("load", "wake"):
                self._event_log.decided(decision)
                self._model_jobs.begin(decision)
                self._changed()
        self._advance()

    def close(self) -> None:
        """Shutting down: everybody who waits is told so at once."""
        self._closing = True
        for model in self._queues.models:
            self._fail_all(model, _shutting_down())

    def _waited_too_long(self, model: str) -> CortexError:
        decision = self.explain(model)
        return Overloaded(
            f"{model} did not become ready within {self._queues.max_wait_s:.0f} s. {explain.outcome(decision)}",
            retry_after_s=30.0,
            details={"decision": explain.as_json(decision)},
        )

    # --- inside

    def _changed(self) -> None:
        """Redraw the picture and drop what was derived from the old one."""
        self._fleet_state.rebuild(self._clock())
        self._leases.rebuilt()
        self._names.clear()

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
                self._leases.closed = frozenset()
        finally:
            self._advancing = False

    def _serve(self) -> None:
        for model in self._queues.models:
            while (pending := self._queues.first(model)) is not None:
                lease = self.acquire(model, pending.prompt)
                if lease is None:
                    break
                lease.waited_s = self._clock() - pending.since
                self._queues.leave(pending)
                pending.deliver(lease)

    def _decide(self) -> None:
        decided = plan(self._queues.waiting(), self.fleet, self._clock())
        if self._leases.closed - decided.closed:
            self._advance_again = True  # somebody may pass again
        self._leases.closed = decided.closed
        for decision in (*decided.starts, *decided.waits, *decided.refusals):
            self._event_log.decided(decision)
        for decision in decided.starts:
            self._model_jobs.begin(decision)
        if decided.starts:
            self._changed()
        for decision in decided.refusals:
            if not any(map(self._is_undecided, decision.assessments)):
                self._fail_all(decision.model_id, explain.refusal(decision))

    def _is_undecided(self, assessment: Assessment) -> bool:
        """The node has not been heard yet, or may only have stumbled: it could still take the model."""
        node = self._fleet_state.fleet.node(assessment.node)
        return node is not None and not node.healthy and node.missed_polls < self._missed_polls

    def _fail_all(self, model: str, error: CortexError) -> None:
        for pending in self._queues.dismiss(model):
            pending.deliver(error)


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("This gateway is shutting down; try again in a moment.", retry_after_s=5.0)
