"""The owner of the fleet state and of the requests that wait.

A state machine without I/O. Events come in as method calls, orders go out through `Effects`, decisions come from
`cortex.fleet`, time from a clock. Everything runs on the loop's thread, so there are no locks. Nodes are the authority
on their own state: an order is "ensure ready" or "ensure gone", and harmless when that is already so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

from cortex.fleet.demand import SOMEBODY
from cortex.fleet.memory import ledger
from cortex.fleet.placement import explain
from cortex.fleet.placement.decision import Decision, Origin, Verdict
from cortex.fleet.placement.eviction import due_for_recycling, expired, over_ceilings
from cortex.fleet.placement.place import UnmetPin, place, to_load_again, to_load_elsewhere, unmet_pins
from cortex.fleet.placement.search import search
from cortex.fleet.topology import Fleet, ModelOnNode
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.fleet_state import DispatchSettings, FleetState, LoadJob, Shortfall
from cortex.gateway.dispatch.groups import LostGroups
from cortex.gateway.dispatch.leases import Lease, PendingRequest, RequestKind
from cortex.gateway.dispatch.measured_sizes import Measured
from cortex.gateway.dispatch.model_jobs import Effects, ModelJobs, Watcher
from cortex.gateway.dispatch.pending_decisions import PendingDecisions, WaitingRequests
from cortex.gateway.dispatch.source_inspections import SourceInspections
from cortex.gateway.dispatch.state_machine import StateMachine, event
from cortex.gateway.dispatch.view import DispatchView
from cortex.wire.errors import (
    CortexError,
    GroupClaimed,
    InsufficientCapacity,
    RateLimitExceeded,
    ShuttingDown,
    UpstreamUnavailable,
)
from cortex.wire.node.protocol import Discovery, Health, ModelState, ModelStatus
from cortex.wire.words import plural


class Dispatcher(DispatchView, StateMachine):
    """Routes requests that can be served now, queues the others, and decides what to load and unload for them."""

    def __init__(
        self,
        effects: Effects,
        event_log: EventLog,
        clock: Callable[[], float],
        settings: DispatchSettings,
        *,
        measured: Measured | None = None,
    ) -> None:
        """`measured`: the sizes of models that an earlier run measured."""
        StateMachine.__init__(self)
        DispatchView.__init__(self, FleetState(settings, Fleet(measured=dict(measured or {}))), clock)
        self._effects = effects
        self._event_log = event_log
        self._jobs = ModelJobs(self._fleet_state, effects, event_log, self._demand, clock)
        self._inspections = SourceInspections(self._fleet_state, effects, clock)
        self._waiting = WaitingRequests(self._queues, self._leases, self._jobs, clock)
        self._pending = PendingDecisions()
        self._lost_groups = LostGroups()
        self._orders: dict[str, list[Watcher]] = {}
        """Orders that wait until a node is awake."""
        self._is_closing = False
        self.acquire = self._leases.acquire
        self.measured = self._leases.measured
        self.too_small = self._leases.too_small
        self.watch = self._jobs.watch
        self.reconfigure(settings)

    def _rebuild(self) -> None:
        changed = self._fleet_state.rebuild(self._clock())
        for before, node in changed:
            self._lost_groups.changed(before, node)
        self._leases.nodes_changed(changed)
        self._counted.fleet()
        news = {
            node.name
            for before, node in changed
            if node.name in self._pending.awaited or before.placement_state != node.placement_state
        }
        self._pending.nodes |= news

    def _advance(self) -> None:
        self._settle_orders()
        self._waiting.serve()
        self._decide()

    # --- requests: the hot path, so only what changes a decision is an event

    def lease_now(
        self,
        model: str,
        prompt: Callable[[], bytes],
        excluded: frozenset[str],
        need: RequestKind = "response",
        has_pictures: bool = False,
        client: str = SOMEBODY,
    ) -> Lease | None:
        """A lease, if one is available at once. None while an event is applied, because the state is about to change.
        Raises UnsupportedModality, except for generated responses, which the node checks: most requests want one."""
        if self._is_applying:
            return None
        self._check_limit(model)
        if need != "response":
            self._leases.check_capable(model, need)
        return self.acquire(model, prompt, excluded, has_pictures, client)

    def request_lease(self, pending: PendingRequest) -> None:
        """Deliver a lease at once where one is available, else queue the request.

        Raises Overloaded, ShuttingDown or UnsupportedModality. While an event is applied every request is queued,
        because the state is about to change.
        """
        if pending.need == "count" and (
            lease := self._leases.tokeniser(pending.model, has_pictures=pending.has_pictures)
        ):
            pending.deliver(lease)
            return
        self._check_limit(pending.model)
        self._leases.check_capable(pending.model, pending.need)
        if not self._is_applying and (lease := self._leases.acquire_for(pending, pending.excluded)):
            pending.deliver(lease)
        elif self._is_closing:
            raise _shutting_down()
        elif self._queues.join(pending):
            self._pending.joined.add(pending.model)
            self.apply(lambda: None)  # only the queue has changed

    def keep(self, model: str, kept_s: float) -> None:
        """Keep the model from eviction and `ttl_s` for this long, as a request asked."""
        now, kept = self._clock(), self._demand.kept_until
        kept[model] = max(kept.get(model, 0.0), now + kept_s)
        for other in [each for each, until in kept.items() if until <= now]:
            del kept[other]

    @event
    def ask_for_context(
        self, model: str, tokens: int, origin: Origin = "request", *, prompt_tokens: int = 0, is_operator: bool = False
    ) -> None:
        """A request needs a context of `tokens`, which later loads get. If no replica has it, an idle one is reloaded
        for it, or the model is loaded on another node, if idle models can be evicted. `prompt_tokens`: those of its
        prompt, if known. `is_operator`: the client may have pinned models reloaded."""
        now, fleet = self._clock(), self.fleet
        self._demand.asks(model, tokens, now)
        is_met = bool(self._queues.depths.get(model)) or self._leases.has_context(model, tokens)
        if is_met or not self._demand.may_reload(model, now):
            return
        again = to_load_again(
            model, tokens, fleet, now, prompt_tokens=prompt_tokens, origin=origin, is_operator=is_operator
        )
        decision = again or to_load_elsewhere(model, tokens, fleet, now, prompt_tokens=prompt_tokens, origin=origin)
        if decision is not None:
            self._demand.reloads(model, now)
            self._event_log.decided(decision)
            self._jobs.start(decision, again=again is not None)

    def prompt_exceeded(self, model: str, tokens: int, origin: Origin, *, is_operator: bool = False) -> None:
        """A node rejected a prompt of `tokens` tokens, which is too long for the context that the model has there."""
        listed = [node.residencies[model].status for node in self.fleet.listing(model)]
        full_tokens = [each.full_context_tokens or 0 for each in listed if not each.forbids_prompt(tokens)]
        if tokens < max(full_tokens, default=0):
            self.ask_for_context(model, tokens + 1, origin, prompt_tokens=tokens, is_operator=is_operator)

    def _check_limit(self, model: str) -> None:
        """Raises RateLimitExceeded for a request beyond the `max_requests` of its model."""
        limit = self._fleet_state.settings.catalogue.request_limits.get(model)
        if limit is None:
            return
        running = sum(self._leases.in_flight_on(node.name).get(model, 0) for node in self.fleet.listing(model))
        if running + self._queues.depths.get(model, 0) >= limit:
            requests = plural(limit, "request", "requests")
            raise RateLimitExceeded(f"{model} already has {requests}, its limit; try again later.", retry_after_s=1.0)

    def cancel(self, pending: PendingRequest) -> None:
        """The client disconnected. A load under way continues: other clients may want it."""
        self._queues.leave(pending)

    def release(self, lease: Lease) -> None:
        """The request ended, whatever its outcome."""
        if self._leases.release(lease) and self._pending.request_ended(lease.node, self._counted.fleet, self._clock):
            self.apply(lambda: None)  # this decision may need a newer report

    def request_failed(self, node: str, why: str) -> None:
        """A request failed there: send nothing there until a poll succeeds. Effective at once."""
        if node in self._fleet_state and node not in self._leases.suspects:
            self._leases.suspects.add(node)
            self._event_log.happened("node_suspected", node=node, why=why)
            self._effects.poll_now(node)

    @event
    def model_not_found(self, lease: Lease) -> None:
        """The node does not have the model, whatever its last report said."""
        self._fleet_state.forget_ready(lease.target, ModelState.COLD, self._clock())
        self._effects.poll_now(lease.node)

    @event
    def model_recovers(self, lease: Lease) -> None:
        """The node is loading the model again after a fault, whatever its last report said."""
        self._fleet_state.forget_ready(lease.target, ModelState.RECOVERING, self._clock())
        self._effects.poll_now(lease.node)

    def close(self) -> None:
        """Shutting down: every waiting request fails at once."""
        self._is_closing = True
        for model in self._queues.models:
            self._waiting.fail(model, _shutting_down())
        for node in [*self._orders]:
            self._end_orders(node, _shutting_down())

    # --- configuration and time

    @event
    def reconfigure(self, settings: DispatchSettings) -> None:
        """Use new settings; running and waiting requests continue under them."""
        for section in self._fleet_state.settings.neurons:
            if section not in settings.neurons:
                self._jobs.abandon(section.name, "was changed in the configuration")
                self.suspend_ended(section.name, None)
                self._inspections.ended(section.name)
        self._pending.is_all = True
        self._queues.max_wait_s = settings.max_wait_s
        self._queues.max_waiting = settings.max_waiting
        gone = self._fleet_state.settings.catalogue.ids - settings.catalogue.ids
        self._fleet_state.reconfigure(settings, self._clock())
        self._leases.reconfigured()
        self._counted.forget()
        for name in self._fleet_state:
            self._inspections.forget(name)
        for node in self._fleet_state.fleet.nodes if gone else ():
            if node.name in self._fleet_state and node.takes_orders and node.healthy:
                for model in gone & node.residencies.keys():
                    self._effects.forget(node.name, model)

    @event
    def tick(self) -> None:
        """About once a second: fail overdue requests, recycle workers, unload expired models, load unmet pins.

        While it `lacks_pinned`, its owner first reads the pins that gateways share."""
        self._pending.is_all = True
        now, fleet = self._clock(), self.fleet
        self._demand.forget_old(now)
        self._waiting.fail_overdue(lambda model: search(model, fleet, now))
        for node in fleet.nodes:
            if due_for_recycling(node, fleet.rules):
                self._jobs.recycle(node)
        for target in over_ceilings(fleet, now):
            self._jobs.unload(target, cause="evicted")
        for target in expired(fleet, now):
            self._jobs.unload(target, cause="ttl", sleep=not self._fleet_state.is_asleep(target))
        self._tend_sleep(now)
        unmet = [UnmetPin(*pin) for pin in self._fleet_state.pins if self._fleet_state.is_absent(pin)]
        for pin in (*unmet_pins(fleet), *unmet):
            self._load_pinned(pin)
        for model in sorted(self._lost_groups.models):
            self._restart_group(model)

    def _tend_sleep(self, now: float) -> None:
        """Suspend idle nodes, and report those that do not come back."""
        sleeping = self._fleet_state.sleeping
        if not sleeping:
            return
        for name in sleeping.due(self.fleet, now):
            self._fleet_state.changed(name)
            self._event_log.happened("node_suspending", node=name)
            self._effects.suspend(name)
        for name in sleeping.lost(now):
            self._lose(name, f"it {sleeping.problem(name, now)}")
        for name in sleeping.resent(now):
            self._effects.wake(name, sleeping.rules(name))

    def _lose(self, node: str, why: str) -> None:
        self._fleet_state.changed(node)
        self._pending.is_all = True
        self._event_log.happened("node_lost", node=node, why=why)

    @event
    def suspend_ended(self, node: str, error: CortexError | None) -> None:
        """The node is suspending itself, or could not. Without effect if that is known."""
        if self._fleet_state.sleeping.state(node) != "suspending":
            return
        self._fleet_state.sleeping.suspend_ended(node, self._clock(), is_accepted=error is None)
        self._fleet_state.changed(node)
        if error is None:
            self._event_log.happened("node_asleep", node=node)
        else:
            self._event_log.happened("node_not_suspended", node=node, why=error.message)
            self._pending.is_all = True

    @event
    def wake_failed(self, node: str, error: CortexError) -> None:
        """The wake command failed."""
        if self._fleet_state.sleeping.wake_failed(node, self._clock(), error.message):
            self._lose(node, error.message)

    @event
    def when_awake(self, node: str, watcher: Watcher) -> None:
        """By order of the operator: call `watcher` once the node responds. A node that sleeps, or could not be woken
        before, is woken for it."""
        if self._is_closing:
            watcher(_shutting_down())
            return
        self._wake(node, "an order needs it", again=True)
        self._orders.setdefault(node, []).append(watcher)

    def _settle_orders(self) -> None:
        """Call the watchers of nodes that respond now, or cannot be woken."""
        sleeping = self._fleet_state.sleeping
        for name in [*self._orders]:
            node = self.fleet.node(name)
            if node is None or node.sleep == "lost":
                why = "was removed from the configuration" if node is None else node.problem
                self._end_orders(name, UpstreamUnavailable(f"Node {name} {why}."))
            elif node.healthy or name not in sleeping.away:
                self._end_orders(name, None)
            elif node.sleep == "asleep":  # it was going to sleep when the order came
                self._wake(name, "an order needs it")

    def _end_orders(self, node: str, error: CortexError | None) -> None:
        for watcher in self._orders.pop(node, ()):
            watcher(error)

    def _wakes_for(self, decision: Decision) -> bool:
        """Whether a sleeping node can serve the model. Wakes it, and reports the expected wait to waiting clients."""
        sleeping, now = self._fleet_state.sleeping, self._clock()
        names = sorted(self.sleepers_for(decision))
        for name in names:
            if self._wake(name, f"{decision.model_id} needs it"):
                self._event_log.settled(decision.model_id)
        if names:
            self._queues.tell(decision.model_id, max(sleeping.expected_wait_s(name, now) for name in names))
        return bool(names)

    def _wake(self, node: str, why: str, *, again: bool = False) -> bool:
        """Returns False if a wake is under way or has failed, and is not tried `again`."""
        sleeping = self._fleet_state.sleeping
        if not sleeping.wake(node, self._clock(), again=again):
            return False
        self._fleet_state.changed(node)
        self._event_log.happened("node_waking", node=node, why=why)
        self._effects.wake(node, sleeping.rules(node))
        return True

    @event
    def _restart_group(self, model: str) -> None:
        """Restart a group that ended by itself. Retried with every tick while nodes are missing or it has just
        failed."""
        fleet = self.fleet
        if fleet.catalogue.spec(model).num_nodes == 1:
            self._lost_groups.settle(model)
            return
        decision = search(model, fleet, self._clock(), origin="pin")
        if decision.action in ("route", "join"):
            self._lost_groups.settle(model)
        elif decision.action in ("load", "wake"):
            self._event_log.decided(decision)
            self._jobs.start(decision)

    @event
    def _load_pinned(self, pin: UnmetPin) -> None:
        """Decided and started in one event, so that the next pin sees the memory that this one takes."""
        fleet, now = self.fleet, self._clock()
        if pin.node is None:
            decision = search(pin.model, fleet, now, origin="pin")
        else:
            decision = place(pin.model, fleet, now, origin="pin", only_on=pin.node)
        if decision.action in ("load", "wake"):
            self._event_log.decided(decision)
            self._jobs.start(decision)

    # --- nodes

    @event
    def observed(self, node: str, discovery: Discovery, health: Health) -> None:
        """A poll succeeded."""
        if node not in self._fleet_state:
            return
        after_sleep = self._fleet_state.sleeping.responded(node, self._clock())
        if after_sleep == "waits":
            return
        if after_sleep is not None:
            self._fleet_state.changed(node)
            self._pending.is_all = True
            self._event_log.happened("node_woken" if after_sleep == "woken" else "node_not_suspended", node=node)
        was_up = self._fleet_state.is_up(node)
        self._fleet_state.observed(node, discovery, health, self._clock())
        self._leases.observed(node)
        self._leases.suspects.discard(node)
        if not was_up:
            self._inspections.forget(node)
            self._effects.mark_down(node, is_down=False)
            self._event_log.happened("node_up", node=node, models=len(health.models))
        self._jobs.observed(node, health)
        self._inspections.ask(node, health.uptime_s)

    @event
    def missed(self, node: str, why: str) -> None:
        """A poll failed. Several in a row make the node down."""
        if node not in self._fleet_state:
            return
        self._pending.is_all = True
        was_up = self._fleet_state.is_up(node)
        self._fleet_state.missed(node, why)
        went_down = was_up and not self._fleet_state.is_up(node)
        self._fleet_state.sleeping.missed(node)
        is_news = not self._fleet_state.sleeping.is_expected_down(node)
        # A node that was never up is reported too, once.
        is_first = self._fleet_state.reported(node).missed_polls == self._fleet_state.settings.missed_polls
        if is_news and (went_down or is_first):
            self._event_log.happened("node_down", node=node, why=why)
            self._take_for_asleep(node)
        if went_down:
            self._effects.mark_down(node, is_down=True)
            self._leases.suspects.discard(node)
            self._leases.went_down(node)
            if node not in self._orders:  # those wait for a node that sleeps, where nothing runs
                self._jobs.abandon(node, f"went down: {why}")
            self.suspend_ended(node, None)  # if its response to that order is lost
            self._inspections.ended(node)

    def _take_for_asleep(self, node: str) -> None:
        """A node that may sleep does not respond. Wake it if its models are not known yet."""
        if not self._fleet_state.sleeping.went_down(node, self._clock()):
            return
        self._fleet_state.changed(node)
        if not self._fleet_state.reported(node).devices:
            self._wake(node, "its models are not known")

    @event
    def source_inspected(self, target: ModelOnNode, source: str, result: ModelStatus | CortexError) -> None:
        """A node inspected a model of the catalogue, whose source was `source` at the request."""
        if target.node in self._fleet_state:
            self._inspections.responded(target, source, result)

    @event
    def sources_inspected(self, node: str) -> None:
        """It has responded about all of them."""
        self._inspections.ended(node)

    # --- loads and unloads

    @event
    def start_load(self, decision: Decision) -> None:
        """Carry out a decision to load or wake."""
        self._event_log.decided(decision)
        self._jobs.start(decision)

    @event
    def load_ended(self, target: ModelOnNode, result: ModelStatus | CortexError) -> None:
        is_elsewhere = isinstance(result, GroupClaimed)  # another gateway runs it: polls show where
        is_cancelled = self._jobs.take_cancelled(target, result) or is_elsewhere
        job = self._jobs.load_ended(target, result, is_cancelled=is_cancelled)
        if isinstance(result, ModelStatus):
            self._jobs.notify(target, "load", None)
        elif is_cancelled:
            self._jobs.notify(target, "load", None if is_elsewhere else result)
        elif isinstance(result, InsufficientCapacity) and job and target not in self._fleet_state.shortfalls:
            self._raise_need(job, result)
        else:
            self._jobs.give_up(target, result)

    @event
    def cancel_load(self, target: ModelOnNode) -> None:
        """By order of the operator. Requests that wait for the model may start it again."""
        self._lost_groups.settle(target.model)
        self._jobs.cancel_load(target)

    @event
    def _raise_need(self, job: LoadJob, error: CortexError) -> None:
        """The load ran out of memory: assume that the model needs more than there was, and try once more."""
        have = 0
        for name, reservation in ((job.target.node, job.reservation), *job.parts):
            node = self._fleet_state.fleet.node(name)
            devices = ledger(node) if node is not None else ()
            have += sum(device.available_bytes for device in devices if device.index in reservation.devices)
        self._fleet_state.shortfalls[job.target] = Shortfall(self._clock(), max(have, job.need_bytes) + 1)
        self._retry_load(job, error)

    @event
    def _retry_load(self, job: LoadJob, error: CortexError) -> None:
        """Load again at once if other models can be evicted for it. Otherwise queued requests wait until models are
        idle or other programs free memory."""
        node, model = job.target
        # A request that arrived since may evict models that the load could not.
        origin = self._queues.origin(model) if job.origin == "background" else job.origin
        decision = place(model, self.fleet, self._clock(), origin=origin, only_on=node)
        passing = (Verdict.BLOCKED, Verdict.CROWDED)
        is_blocked = any(assessment.verdict in passing for assessment in decision.assessments)
        if decision.action in ("load", "wake"):
            self.start_load(decision)
        elif any(assessment.waits_for_foreground for assessment in decision.assessments):
            self._jobs.notify(job.target, "load", error)  # no failure: another request may evict models for it at once
        elif not (is_blocked and model in self._queues):
            self._jobs.give_up(job.target, error)

    @event
    def unload_ended(self, target: ModelOnNode, error: CortexError | None, *, was_reloaded: bool = False) -> None:
        """The node has been polled since. `was_reloaded`: it has given the model a longer context before."""
        self._jobs.unload_ended(target, error, was_reloaded=was_reloaded)
        if error is None and not was_reloaded:
            self._leases.left_device(target.node, target.model)

    @event
    def recycle_ended(self, node: str, result: tuple[int, ...] | CortexError) -> None:
        """The workers of these devices were replaced, or the node could not do it."""
        self._jobs.recycle_ended(node, result)

    @event
    def unload(self, target: ModelOnNode, *, force: bool, sleep: bool) -> None:
        """By order of the operator. `sleep`: the node keeps the weights in host memory if there is room."""
        self._lost_groups.settle(target.model)

        def unload(error: CortexError | None) -> None:
            if error is None:
                self._jobs.unload(target, cause="operator", force=force, sleep=sleep)
            else:
                self._jobs.notify(target, "unload", error)

        if target.node in self._fleet_state.sleeping.away:
            self.when_awake(target.node, lambda error: self.apply(partial(unload, error)))
        else:
            unload(None)

    def leaving(self, model: str, node: str | None = None) -> tuple[ModelOnNode, ...]:
        """Where this gateway unloads the model now, on one node or anywhere; `watch` reports the ends."""
        return tuple(
            target for target in self._fleet_state.unloads if target.model == model and node in (None, target.node)
        )

    @event
    def change_pins(self, *, added: Iterable[ModelOnNode] = (), removed: Iterable[ModelOnNode] = ()) -> None:
        """By order of the operator."""
        self._fleet_state.change_pins(added=added, removed=removed)

    @event
    def forget_size(self, model: str) -> None:
        """By order of the operator: discard the model's measured size and shortfalls."""
        self._pending.is_all = True
        self._fleet_state.forget_size(model)

    @event
    def drain(self, node: str, *, drained: bool) -> None:
        """By order of the operator: a drained node gets no new requests and loads."""
        self._fleet_state.drain(node, drained=drained)

    # --- requests that wait

    def _decide(self) -> None:
        """Decide for every model that requests wait for. The decisions cause further events."""
        if not self._queues and not self._leases.closed:
            self._pending.nobody_waits()
            return
        if not self._pending:
            return
        fleet = self.fleet
        decided = self._pending.decide(self._queues.waiting, fleet, self._clock())
        for name in self._pending.awaited:
            if (node := fleet.node(name)) is not None and self._leases.is_outdated(node):
                self._effects.poll_now(name)
        if self._pending.closed != self._leases.closed:
            self._close_models(self._pending.closed)
        for decision in decided.starts:
            self.start_load(decision)
        for decision in (*decided.waits, *decided.rejections):
            self._event_log.decided(decision)
        for decision in decided.waits:
            if decision.origin != "background":
                self._wakes_for(decision)
        for decision in decided.rejections:
            if not self._is_any_node_undecided() and not self._wakes_for(decision):
                awaited = self._may_return(decision.model_id)
                until = self._clock() - self._fleet_state.settings.rules.fair_wait_s if awaited else math.inf
                self._waiting.fail(decision.model_id, explain.rejection(decision), until)

    @event
    def _close_models(self, models: frozenset[ModelOnNode]) -> None:
        """Stop new work for exactly these ready models."""
        self._leases.closed = models

    def _may_return(self, model: str) -> bool:
        """A node that has the model, or may have it because it is still starting, is down or shutting down and may be
        back soon. A drained node, or one that could not be woken, needs an operator and does not count."""
        nodes = self._fleet_state.fleet.listing(model)
        returning = [node for node in nodes if not node.drained and node.sleep != "lost"]
        is_any_away = any(node.draining or not node.healthy for node in returning)
        return is_any_away or bool(self.starting_nodes)

    def _is_any_node_undecided(self) -> bool:
        """A node was not observed yet, or missed too few polls to count as down, so it may still take the model."""
        limit = self._fleet_state.settings.missed_polls
        nodes = self._fleet_state.fleet.nodes
        return any(not node.healthy and node.missed_polls < limit and node.sleep == "awake" for node in nodes)


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("This gateway is shutting down; try again in a moment.", retry_after_s=5.0)
