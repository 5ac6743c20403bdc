"""The state of every node as a stream: all of it at first, then once a second what has changed.

Costs nothing while nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cortex.fleet.catalogue import Catalogue
from cortex.fleet.topology import Fleet, Node
from cortex.gateway.api.live.public_view import FleetView
from cortex.gateway.dispatch.view import DispatchView
from cortex.http.server.exchange import Exchange
from cortex.wire import sse
from cortex.wire.node.protocol import ModelState

_NO_AGES = {"state_age_s": 0.0, "idle_s": 0.0}


@dataclass(slots=True)
class _Reader:
    view: FleetView
    has_missed: bool = False
    """Whether it was too slow for a change."""
    content: bytes = b""
    """What it was sent last, without ages, if it sees no individual nodes."""


class _Frame:
    """One event, encoded once for all readers with the same view."""

    def __init__(self, kind: str, shown_in: Callable[[FleetView], dict[str, Any]]) -> None:
        self._kind = kind
        self._shown_in = shown_in
        self._encoded: dict[FleetView, bytes] = {}

    def encoded(self, view: FleetView) -> bytes:
        if view not in self._encoded:
            self._encoded[view] = sse.frame(msgspec.json.encode(self._shown_in(view)), self._kind)
        return self._encoded[view]


class _Snapshot(_Frame):
    """The whole fleet at one moment."""

    def __init__(self, nodes: list[dict[str, Any]], waiting: dict[str, int]) -> None:
        super().__init__("fleet", lambda view: {"nodes": view.nodes(nodes), "waiting": view.waiting(waiting)})
        self._content: dict[FleetView, bytes] = {}

    def content(self, view: FleetView) -> bytes:
        """The snapshot in a view, without the ages of models: equal if only these differ."""
        if view not in self._content:
            shown = self._shown_in(view)
            nodes = [node | {"models": [model | _NO_AGES for model in node["models"]]} for node in shown["nodes"]]
            self._content[view] = msgspec.json.encode(shown | {"nodes": nodes})
        return self._content[view]


class FleetFeed:
    """Writes events `fleet`, `node` and `waiting` to its readers. Owned by the loop's thread.

    `fleet` is a snapshot: it comes first, and again if a reader was too slow for a change or sees no single nodes.
    `node` replaces one node, `waiting` the depths of the queues.
    """

    def __init__(self, dispatcher: DispatchView) -> None:
        self._dispatcher = dispatcher
        self._readers: dict[Exchange, _Reader] = {}
        self._seen: dict[str, object] = {}
        """For each node, the content that decides whether it has changed."""
        self._catalogue: Catalogue | None = None
        """That of `_seen`: it has the pins of all nodes."""
        self._waiting: dict[str, int] = {}

    def follow(self, exchange: Exchange, view: FleetView) -> Callable[[], None]:
        """Write to a started exchange until the returned function is called."""
        if not self._readers:
            self._changes()  # the state that a first reader gets now is no change at the next tick
        reader = self._readers[exchange] = _Reader(view)
        self._write(exchange, reader, self._everything())

        def stop() -> None:
            self._readers.pop(exchange, None)

        return stop

    def tick(self) -> None:
        """Send what has changed since the last tick."""
        if not self._readers:
            return
        frames = self._changes()
        snapshot: _Snapshot | None = None
        for exchange, reader in self._readers.items():
            if exchange.paused:
                reader.has_missed = reader.has_missed or bool(frames)
            elif reader.has_missed or (frames and reader.view.is_restricted):
                snapshot = snapshot or self._everything()
                self._write(exchange, reader, snapshot)
            else:
                for frame in frames:
                    exchange.write(frame.encoded(reader.view))

    def _write(self, exchange: Exchange, reader: _Reader, snapshot: _Snapshot) -> None:
        reader.has_missed = False
        if reader.view.is_restricted:
            if (content := snapshot.content(reader.view)) == reader.content:
                return
            reader.content = content
        exchange.write(snapshot.encoded(reader.view))

    def _changes(self) -> list[_Frame]:
        """Frames with what has changed since the last call."""
        frames: list[_Frame] = []
        fleet = self._dispatcher.fleet
        seen = {node.name: _comparable(node) for node in fleet.nodes}
        if seen.keys() != self._seen.keys() or fleet.catalogue is not self._catalogue:
            frames.append(self._everything())
        else:
            frames += [
                _Frame("node", partial(_node_in, _node_status(node, fleet.catalogue)))
                for node in fleet.nodes
                if seen[node.name] != self._seen[node.name]
            ]
        self._seen, self._catalogue = seen, fleet.catalogue
        if (waiting := dict(self._dispatcher.queue_depths)) != self._waiting:
            self._waiting = waiting
            frames.append(_Frame("waiting", lambda view: view.waiting(waiting)))
        return frames

    def _everything(self) -> _Snapshot:
        return _Snapshot(node_statuses(self._dispatcher.fleet), dict(self._dispatcher.queue_depths))


def _node_in(status: dict[str, Any], view: FleetView) -> dict[str, Any]:
    return view.node(status)


def node_statuses(fleet: Fleet) -> list[dict[str, Any]]:
    """Every node as plain data, for `/fleet/status` and `/fleet/events`."""
    return [_node_status(node, fleet.catalogue) for node in fleet.nodes]


def _node_status(node: Node, catalogue: Catalogue) -> dict[str, Any]:
    pinned = {spec.id for spec in catalogue.pinned if spec.is_pinned_on(node.name)}
    return {
        "name": node.name,
        "kind": "neuron" if node.takes_orders else "openai",
        "up": node.healthy,
        "draining": node.draining,
        "drained": node.drained,
        "sleep": node.sleep,
        "watts": node.watts if node.healthy else None,
        "problem": node.problem,
        "missed_polls": node.missed_polls,
        "can_sleep": node.can_sleep,
        "dialects": node.abilities.dialects,
        "ceiling_bytes": node.ceiling_bytes,
        "host": msgspec.to_builtins(node.host),
        "devices": [msgspec.to_builtins(device) for device in node.devices],
        "models": [
            msgspec.to_builtins(held.status)
            | {"in_flight": held.in_flight, "pinned": held.pinned or held.model_id in pinned}
            | {"pinned_by": "operator" if held.pinned else "catalogue" if held.model_id in pinned else None}
            | {"state": node.shown_state(held)}
            for held in node.residencies.values()
            if held.state is not ModelState.COLD
        ],
        "members": [msgspec.to_builtins(member) for member in node.members],
        "disk": msgspec.to_builtins(node.disk),
        "pulls": [msgspec.to_builtins(pull) for pull in node.pulls],
        "files": {
            held.model_id: held.status.disk_bytes for held in node.residencies.values() if held.status.disk_bytes
        },
        "cold_models": [
            held.model_id for held in node.residencies.values() if held.state is ModelState.COLD and not held.is_absent
        ],
        "cold_reasons": {
            held.model_id: held.failure
            for held in node.residencies.values()
            if held.state is ModelState.COLD and held.failure is not None
        },
        "absent_models": {held.model_id: held.status.reason for held in node.residencies.values() if held.is_absent},
    }


def _comparable(node: Node) -> object:
    """What decides whether a node has changed: all but the ages of its models; of cold models only the names."""
    models = [
        msgspec.structs.replace(held, status=msgspec.structs.replace(held.status, state_age_s=0.0, idle_s=0.0))
        for held in node.residencies.values()
        if held.state is not ModelState.COLD
    ]
    sizes = [(id, held.status.disk_bytes, held.is_absent, held.failure) for id, held in node.residencies.items()]
    held_models = [(held.status, held.in_flight, held.pinned) for held in models]
    return msgspec.structs.replace(node, residencies={}), held_models, sizes
