"""What an operator may order by hand: load, unload, pin and unpin models, drain and undrain nodes.

An order is decided at once from the fleet as it is, and carried out as events of the dispatcher.
"""

from __future__ import annotations

from cortex.fleet.placement import explain
from cortex.fleet.placement.decision import Decision, Verdict
from cortex.fleet.topology import ModelOnNode
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.event_log import EventLog
from cortex.wire.errors import InvalidValue, ModelInUse, ModelNotFound
from cortex.wire.node.protocol import ModelState


class OperatorCommands:
    """Runs on the loop's thread. `watch` of the dispatcher reports when an order is complete."""

    def __init__(self, dispatcher: Dispatcher, event_log: EventLog) -> None:
        self._dispatcher = dispatcher
        self._event_log = event_log

    def decide(self, model: str, node: str | None = None) -> Decision:
        """What `load` would do now. Changes nothing. Raises NodeNotFound."""
        return self._dispatcher.explain(model, "operator", only_on=node)

    def sleepers_for(self, model: str, node: str | None = None) -> tuple[str, ...]:
        """The sleeping nodes without which `load` cannot load the model; it has to be called once they are awake.
        Raises NodeNotFound."""
        decision = self.decide(model, node)
        if decision.action not in ("wait", "reject"):
            return ()
        return tuple(sorted(self._dispatcher.sleepers_for(decision, only_on=node)))

    def load(self, model: str, node: str | None = None) -> Decision:
        """Load a model, anywhere or on one node. Raises why it cannot be loaded; returns the decision otherwise."""
        decision = self.decide(model, node)
        self._event_log.decided(decision)
        if decision.action in ("wait", "reject"):
            error = explain.rejection(decision)
            if node is not None and any(each.verdict is Verdict.EXCLUDED for each in decision.assessments):
                raise InvalidValue(error.message, param="node")  # fixed by the catalogue: a retry does not help
            raise error
        if decision.action in ("load", "wake"):
            self._dispatcher.start_load(decision)
        return decision

    def targets_of_unload(self, model: str, node: str | None = None) -> tuple[str, ...]:
        """The nodes where `unload` would unload the model or clear its failed load. Raises ModelNotFound when there is
        none, or NodeNotFound."""
        self._dispatcher.check_node(node)
        found = tuple(
            here.name
            for here in self._dispatcher.fleet.nodes
            if here.takes_orders
            and node in (None, here.name)
            and model in here.residencies
            and here.residencies[model].state is not ModelState.COLD
        )
        if not found:
            raise ModelNotFound(f"{model} is not loaded on {node or 'any node'}.", param="model")
        return found

    def is_pinned(self, target: ModelOnNode) -> bool:
        """By the operator or by the catalogue."""
        spec = self._dispatcher.fleet.catalogue.spec(target.model)
        return target in self._dispatcher.pins or spec.is_pinned_on(target.node)

    def unload(
        self, model: str, node: str | None = None, *, force: bool = False, sleep: bool = False, unpin: bool = False
    ) -> tuple[str, ...]:
        """Unload a model, everywhere or on one node; returns where. Raises ModelNotFound when it is loaded nowhere,
        ModelInUse when it is pinned and `unpin` is not set, or NodeNotFound.

        `sleep`: a node keeps the weights in host memory if there is room.
        """
        targets = [ModelOnNode(name, model) for name in self.targets_of_unload(model, node)]
        pinned = [target.node for target in targets if self.is_pinned(target)]
        if pinned and not unpin:
            raise ModelInUse(
                f"{model} is pinned on {', '.join(pinned)}; unpin it first, or send `unpin: true` "
                "(`cortex unload --yes`)."
            )
        self._dispatcher.change_pins(removed=targets)
        for target in targets:
            self._dispatcher.unload(target, force=force, sleep=sleep)
        return tuple(target.node for target in targets)

    def drain(self, node: str, *, drained: bool) -> None:
        """Send no new requests and loads to a node, or send them again. Raises NodeNotFound."""
        self._dispatcher.check_node(node)
        self._dispatcher.drain(node, drained=drained)
        self._event_log.happened("node_drained" if drained else "node_undrained", node=node)

    def pin(self, model: str, node: str | None = None) -> tuple[str, ...]:
        """Keep a model where it is ready; load it first if it is ready nowhere. Returns the nodes that keep it.

        Raises NodeNotFound, or why it cannot be loaded."""
        replicas = self._dispatcher.fleet.replicas(model)
        nodes = [here.name for here, _ in replicas if here.takes_orders and node in (None, here.name)]
        if not nodes and (chosen := self.load(model, node).node) is not None:
            nodes = [chosen]
        self._dispatcher.change_pins(added=[ModelOnNode(name, model) for name in nodes])
        return tuple(nodes)

    def unpin(self, model: str, node: str | None = None) -> tuple[str, ...]:
        """Undo `pin`; pins of the catalogue stay. Returns the nodes where the model may be evicted again.

        Raises NodeNotFound."""
        self._dispatcher.check_node(node)
        pins = [pin for pin in self._dispatcher.pins if pin.model == model and node in (None, pin.node)]
        self._dispatcher.change_pins(removed=pins)
        return tuple(sorted(pin.node for pin in pins))
