"""The state of every node as a stream: all of it at first, then once a second what has changed.

Costs nothing while nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from cortex.fleet.topology import Fleet, Node
from cortex.gateway.api.public_view import public_node
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.http.server.exchange import Exchange
from cortex.wire import sse
from cortex.wire.node.protocol import ModelState

_AGES = ("state_age_s", "idle_s")
"""Fields of a model that differ in every report: they alone are no change."""


@dataclass(slots=True)
class _Reader:
    for_operator: bool
    has_missed: bool = False
    """Whether it was too slow for a change."""


class _Frames(NamedTuple):
    """One event, for operators and for others."""

    operator: bytes
    public: bytes

    def shown(self, for_operator: bool) -> bytes:
        return self.operator if for_operator else self.public


class FleetFeed:
    """Writes events `fleet`, `node` and `waiting` to its readers. Owned by the loop's thread.

    `fleet` has everything and comes first, and again to a reader that was too slow for a change. `node` replaces one
    node, `waiting` the depths of the queues.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._readers: dict[Exchange, _Reader] = {}
        self._seen: dict[str, bytes] = {}
        """For each node, the content that decides whether it has changed."""
        self._waiting: dict[str, int] = {}

    def follow(self, exchange: Exchange, *, for_operator: bool) -> Callable[[], None]:
        """Write to a started exchange until the returned function is called."""
        if not self._readers:
            self._changes()  # what a first reader gets now is no change at the next tick
        self._readers[exchange] = _Reader(for_operator)
        exchange.write(self._everything().shown(for_operator))

        def stop() -> None:
            self._readers.pop(exchange, None)

        return stop

    def tick(self) -> None:
        """Send what has changed since the last tick."""
        if not self._readers:
            return
        frames = self._changes()
        for exchange, reader in self._readers.items():
            if exchange.paused:
                reader.has_missed = reader.has_missed or bool(frames)
            elif reader.has_missed:
                reader.has_missed = False
                exchange.write(self._everything().shown(reader.for_operator))
            else:
                for frame in frames:
                    exchange.write(frame.shown(reader.for_operator))

    def _changes(self) -> list[_Frames]:
        """Frames with what has changed since the last call."""
        frames = []
        statuses = {status["name"]: status for status in node_statuses(self._dispatcher.fleet)}
        seen = {name: _comparable(status) for name, status in statuses.items()}
        if seen.keys() != self._seen.keys():
            frames.append(self._everything())
        else:
            frames += [
                _Frames(_frame("node", status), _frame("node", public_node(status)))
                for name, status in statuses.items()
                if seen[name] != self._seen[name]
            ]
        self._seen = seen
        if (waiting := dict(self._dispatcher.queue_depths)) != self._waiting:
            self._waiting = waiting
            frame = _frame("waiting", waiting)
            frames.append(_Frames(frame, frame))
        return frames

    def _everything(self) -> _Frames:
        nodes = node_statuses(self._dispatcher.fleet)
        waiting = self._dispatcher.queue_depths
        public = list(map(public_node, nodes))
        return _Frames(
            _frame("fleet", {"nodes": nodes, "waiting": waiting}),
            _frame("fleet", {"nodes": public, "waiting": waiting}),
        )


def node_statuses(fleet: Fleet) -> list[dict[str, Any]]:
    """Every node as plain data, for `/fleet/status` and `/fleet/events`."""
    pinned = [spec for spec in fleet.catalogue.models if spec.policy == "pinned"]
    return [_node_status(node, {spec.id for spec in pinned if spec.is_pinned_on(node.name)}) for node in fleet.nodes]


def _node_status(node: Node, pinned: set[str]) -> dict[str, Any]:
    """One node. `pinned`: the models that the catalogue pins there."""
    return {
        "name": node.name,
        "kind": "neuron" if node.has_lifecycle else "openai",
        "up": node.healthy,
        "draining": node.draining,
        "drained": node.drained,
        "problem": node.problem,
        "missed_polls": node.missed_polls,
        "can_sleep": node.can_sleep,
        "dialects": node.dialects,
        "ceiling_bytes": node.ceiling_bytes,
        "devices": [msgspec.to_builtins(device) for device in node.devices],
        "models": [
            msgspec.to_builtins(held.status)
            | {"in_flight": held.in_flight, "pinned": held.pinned or held.model_id in pinned}
            | {"pinned_by": "operator" if held.pinned else "catalogue" if held.model_id in pinned else None}
            | ({} if node.healthy else {"state": ModelState.UNREACHABLE})
            for held in node.residencies.values()
            if held.state is not ModelState.COLD
        ],
        "shares": [msgspec.to_builtins(share) for share in node.shares],
        "disk": msgspec.to_builtins(node.disk),
        "pulls": [msgspec.to_builtins(pull) for pull in node.pulls],
        "files": {
            held.model_id: held.status.disk_bytes for held in node.residencies.values() if held.status.disk_bytes
        },
        "cold_models": [held.model_id for held in node.residencies.values() if held.state is ModelState.COLD],
    }


def _comparable(status: dict[str, Any]) -> bytes:
    models = [{name: value for name, value in model.items() if name not in _AGES} for model in status["models"]]
    return msgspec.json.encode(status | {"models": models})


def _frame(kind: str, value: object) -> bytes:
    return sse.frame(msgspec.json.encode(value), kind)
