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
from cortex.fleet.queueing import Seat, plan
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import Fleet
from cortex.gateway.config import NeuronSection
from cortex.gateway.journal import Journal
from cortex.gateway.orders import Effects, Orders, Watcher
from cortex.gateway.picture import LoadJob, Picture, Shortfall
from cortex.gateway.queues import Queues
from cortex.gateway.seats import Seats
from cortex.gateway.sizes import Measured
from cortex.gateway.tickets import Lease, Ticket
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
        journal: Journal,
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
        self._journal = journal
        self._clock = clock
        self._picture = Picture(catalogue, rules, Fleet(measured=dict(measured or {})))
        self._seats = Seats(self._picture)
        self._orders = Orders(self._picture, effects, journal, clock)
        self._queues = Queues()
        self._names: dict[str, Resolution] = {}
        self._advancing = False
        self._advance_again = False
        self._closing = False
        self.acquire = self._seats.acquire
        self.reconfigure(
            catalogue, rules, neurons, max_wait_s=max_wait_s, max_waiting=max_waiting, missed_polls=missed_polls
        )

    # --- what is known

    @property
    def fleet(self) -> Fleet:
        """The current picture, with this gateway's own request counts."""
        return self._picture.fleet.with_in_flight(self._seats.in_flight)

    @property
    def queue_depths(self) -> dict[str, int]:
        return self._queues.depths

    @property
    def in_flight(self) -> dict[Seat, int]:
        """Requests open at each (node, model); only those with any."""
        return dict(self._seats.in_flight)

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

    def ask(self, ticket: Ticket) -> None:
        """Deliver a lease at once where one can be had, else queue the request.

        Raises what stands in the way: Overloaded, ShuttingDown, UnsupportedModality.
        """
        if ticket.need == "count":
            ticket.deliver(self._seats.tokeniser(ticket.model))
        elif ticket.need == "embeddings":
            ticket.deliver(self._seats.embedder(ticket.model))
        elif (lease := self.acquire(ticket.model, ticket.prompt, ticket.excluded)) is not None:
            ticket.deliver(lease)
        else:
            self.wait(ticket)

    def wait(self, ticket: Ticket) -> None:
        """Queue a request that `acquire` could not serve. Raises Overloaded when too many wait already."""
        if self._closing:
            raise _shutting_down()
        if self._queues.join(ticket):
            self._advance()

    def cancel(self, ticket: Ticket) -> None:
        """The client has left. A load under way goes on: others may want it, and it is cheap to keep."""
        self._queues.leave(ticket)

    def release(self, lease: Lease) -> None:
        """The request has ended, however it did."""
        if self._seats.release(lease) and self._queues:
            self._effects.look(lease.node)  # its last report still shows the model busy
            self._advance()

    def suspect(self, node: str, why: str) -> None:
        """A request failed there: nothing more is sent until the next poll has shown that the node lives."""
        if node in self._lifecycle and node not in self._seats.suspects:
            self._seats.suspects.add(node)
            self._journal.happened("node_suspected", node=node, why=why)
            self._effects.look(node)

    def gone(self, lease: Lease) -> None:
        """The node denies having the model, whatever its last report said."""
        self._picture.forget_ready(lease.node, lease.model, self._clock())
        self._changed()
        self._effects.look(lease.node)

    # --- nodes

    def observed(self, node: str, discovery: Discovery, health: Health) -> None:
        """A poll was answered."""
        if node not in self._lifecycle:
            return
        was_up = self._is_up(node)
        self._picture.observed(node, discovery, health, self._clock(), has_lifecycle=self._lifecycle[node])
        self._seats.suspects.discard(node)
        if not was_up:
            self._journal.happened("node_up", node=node, models=len(health.models))
        self._changed()
        self._orders.notice(node, health)
        self._advance()

    def missed(self, node: str, why: str) -> None:
        """A poll was not answered. Several in a row, and the node counts as down."""
        if node not in self._lifecycle:
            return
        was_up = self._is_up(node)
        self._picture.missed(node, why, limit=self._missed_polls)
        self._changed()
        if was_up and not self._is_up(node):
            self._journal.happened("node_down", node=node, why=why)
            self._seats.suspects.discard(node)
            self._seats.forget_cache(node)
            self._orders.abandon(node, why)
            self._changed()
        self._advance()

    def _is_up(self, name: str) -> bool:
        node = self._picture.fleet.node(name)
        return node is not None and node.healthy

    # --- loads and unloads

    def load_ended(self, node: str, model: str, result: ModelStatus | CortexError) -> None:
        """A load that was ordered is over."""
        job = self._orders.load_ended(node, model, result)
        self._changed()
        if isinstance(result, ModelStatus):
            self._orders.tell((node, model), None)
        elif not (isinstance(result, InsufficientCapacity) and job is not None and self._will_make_room(job)):
            self._orders.give_up(node, model, result)
        self._changed()
        self._advance()

    def _will_make_room(self, job: LoadJob) -> bool:
        """The node ran out of memory: once, load again there as if the model needed more than there was.

        At once, where others can be evicted for it; where they are busy, those who wait go on waiting for that.
        """
        seat, now = (job.node, job.model), self._clock()
        node = self._picture.fleet.node(job.node)
        if seat in self._picture.shortfalls or node is None:
            return False
        have = sum(device.available_bytes for device in ledger(node) if device.index in job.devices)
        self._picture.shortfalls[seat] = Shortfall(now, max(have, job.need_bytes) + 1)
        self._changed()
        others = [name for name in self._lifecycle if name != job.node]
        decision = place(job.model, self.fleet, now, excluded=others)
        if decision.action in ("load", "wake"):
            self._journal.decided(decision)
            self._orders.begin(decision)
            return True
        return decision.assessments[0].verdict is Verdict.BLOCKED and job.model in self._queues

    def unload_ended(self, node: str, model: str, error: CortexError | None) -> None:
        """An unload that was ordered is over; the node has been polled since."""
        self._orders.unload_ended(node, model, error)
        if error is None:
            self._seats.forget_cache(node, model)
        self._changed()
        self._advance()

    def recycle_ended(self, node: str, result: tuple[int, ...] | CortexError) -> None:
        """Workers that were to be replaced are, on these devices, or the node could not do it."""
        self._orders.recycle_ended(node, result)
        self._changed()

    # --- by hand

    def watch(self, seat: Seat, watcher: Watcher) -> None:
        """Call `watcher` when what is under way at `seat` has ended."""
        self._orders.watch(seat, watcher)

    def load(self, model: str, node: str | None = None) -> Decision:
        """Load by order of the operator. Raises what stands in the way; returns the decision otherwise."""
        if node is not None and node not in self._lifecycle:
            known = ", ".join(self._lifecycle) or "none"
            raise InvalidValue(f"There is no node {shorten(node)}; the fleet has {known}.", param="node")
        excluded = [name for name in self._lifecycle if node is not None and name != node]
        decision = place(model, self.fleet, self._clock(), origin="operator", excluded=excluded)
        self._journal.decided(decision)
        if decision.action in ("load", "wake"):
            self._picture.failures.pop((decision.node or "", model), None)
            self._orders.begin(decision)
            self._changed()
        elif decision.action in ("wait", "refuse"):
            raise explain.refusal(decision)
        return decision

    def unload(
        self, model: str, node: str | None = None, *, force: bool = False, park: bool = False
    ) -> tuple[str, ...]:
        """Unload by order of the operator, everywhere or on one node; returns where. Raises when it is nowhere.

        `park`: keep the weights in the node's host memory if there is room.
        """
        places = [
            here.name
            for here in self._picture.fleet.nodes
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
            self._picture.pins.discard((name, model))
            self._orders.unload(name, model, cause="operator", force=force, park=park)
        self._changed()
        return tuple(places)

    def pin(self, model: str, node: str | None = None) -> tuple[str, ...]:
        """Keep the model where it is, loading it first where it is nowhere. Returns the nodes that keep it."""
        places = [
            here.name
            for here, _ in self._picture.fleet.replicas(model)
            if here.has_lifecycle and node in (None, here.name)
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
        """Called about once a second: overdue requests, expired models, worn workers, missing pinned models."""
        now = self._clock()
        for ticket in self._queues.overdue(now):
            ticket.deliver(self._waited_too_long(ticket.model))
        for node, model in expired(self.fleet, now):
            self._orders.unload(node, model, cause="ttl", park=not self._picture.is_asleep(node, model))
        self._changed()
        for here in self.fleet.nodes:
            if due_for_recycling(here, self._picture.rules):
                self._orders.recycle(here)
        for model, pinned_node in unmet_pins(self.fleet):
            others = [name for name in self._lifecycle if pinned_node is not None and name != pinned_node]
            decision = place(model, self.fleet, now, excluded=others)
            if decision.action in ("load", "wake"):
                self._journal.decided(decision)
                self._orders.begin(decision)
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
        self._picture.redraw(self._clock())
        self._seats.redrawn()
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
                self._seats.closed = frozenset()
        finally:
            self._advancing = False

    def _serve(self) -> None:
        for model in self._queues.models:
            while (ticket := self._queues.first(model)) is not None:
                lease = self.acquire(model, ticket.prompt)
                if lease is None:
                    break
                lease.waited_s = self._clock() - ticket.since
                self._queues.leave(ticket)
                ticket.deliver(lease)

    def _decide(self) -> None:
        decided = plan(self._queues.waiting(), self.fleet, self._clock())
        if self._seats.closed - decided.closed:
            self._advance_again = True  # somebody may pass again
        self._seats.closed = decided.closed
        for decision in (*decided.starts, *decided.waits, *decided.refusals):
            self._journal.decided(decision)
        for decision in decided.starts:
            self._orders.begin(decision)
        if decided.starts:
            self._changed()
        for decision in decided.refusals:
            if not any(map(self._is_undecided, decision.assessments)):
                self._fail_all(decision.model_id, explain.refusal(decision))

    def _is_undecided(self, assessment: Assessment) -> bool:
        """The node has not been heard yet, or may only have stumbled: it could still take the model."""
        node = self._picture.fleet.node(assessment.node)
        return node is not None and not node.healthy and node.missed_polls < self._missed_polls

    def _fail_all(self, model: str, error: CortexError) -> None:
        for ticket in self._queues.dismiss(model):
            ticket.deliver(error)


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("This gateway is shutting down; try again in a moment.", retry_after_s=5.0)
