"""The state of every node as a stream: all of it at first, then once a second what has changed. Costs nothing while
nobody reads it.

Keys that are not operators' see everything but reasons of failures, files and addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cortex.fleet.catalogue import Catalogue
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.topology import Fleet, Node
from cortex.gateway.dispatch.view import DispatchView
from cortex.gateway.ledger.keys import KeySection, may_use
from cortex.http.server.exchange import Exchange
from cortex.wire import sse
from cortex.wire.node.protocol import ModelState

HIDDEN = "an operator's key shows the reason"
_QUOTING = (Verdict.FAILED.value, Verdict.UNSUPPORTED.value, Verdict.UNHEALTHY.value)
"""Verdicts whose reason is a message from elsewhere. The others are our own words about memory."""


WHOLE_FLEET = "fleet"
"""The name of every node for a key with `models`."""
_NO_PLACE: dict[str, Any] = {
    "devices": [],
    "replica_devices": [],
    "device_bytes": [],
    "stage_layers": [],
    "nodes": [],
    "disk_bytes": None,
    "bench": None,
    "kv_tokens": None,
    "kv_host": None,
}
"""What of a model's status says where it is, and by its speed and its memory on which devices."""
_OF_ANY_PLACE = ("kind", "at", "model", "cause", "bytes")
"""What of an event says nothing about nodes and other models."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """What one client sees."""

    is_operator: bool
    key: KeySection | None = None
    """None: a client of an open gateway."""

    @property
    def is_restricted(self) -> bool:
        """Whether it sees its models only, and no nodes."""
        return not self.is_operator and self.key is not None and not self.key.sees_nodes

    def nodes(self, statuses: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The nodes of `/fleet/status` and of the feed."""
        seen = list(map(self.node, statuses))
        return [_as_one(seen)] if seen and self.is_restricted else seen

    def node(self, status: dict[str, Any]) -> dict[str, Any]:
        """One of several nodes."""
        if self.is_operator:
            return status
        of_model = [("models", "id"), ("members", "id"), ("pulls", "model_id")]
        seen = {name: [each for each in status[name] if may_use(self.key, each[field])] for name, field in of_model}
        for name in ("models", "pulls"):
            seen[name] = [each | {"reason": HIDDEN if each.get("reason") else None} for each in seen[name]]
        seen["models"] = [model | {"source": None, "progress": _progress(model)} for model in seen["models"]]
        return status | {
            **seen,
            "problem": HIDDEN if status["problem"] else None,
            "files": {model: size for model, size in status["files"].items() if may_use(self.key, model)},
            "cold_models": [model for model in status["cold_models"] if may_use(self.key, model)],
            "cold_reasons": {model: HIDDEN for model in status["cold_reasons"] if may_use(self.key, model)},
            "absent_models": {model: HIDDEN for model in status["absent_models"] if may_use(self.key, model)},
        }

    def model(self, entry: dict[str, Any]) -> dict[str, Any]:
        """A model of `/v1/models` that the client may use."""
        if not self.is_restricted:
            return entry
        places = [
            {name: value for name, value in place.items() if name != "replica_devices"} | {"node": WHOLE_FLEET}
            for place in _nearest_to_ready(entry["locations"], "status")
        ]
        sizes = [size | {"nodes": [WHOLE_FLEET]} for size in entry["sizes"]]
        return entry | {"locations": places, "sizes": sizes, "feasible_on": [WHOLE_FLEET] * bool(entry["feasible_on"])}

    def waiting(self, depths: Mapping[str, int]) -> dict[str, int]:
        """How many requests wait for each model."""
        return {model: depth for model, depth in depths.items() if self.is_operator or may_use(self.key, model)}

    def decisions(self, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self.decision(each) for each in records if self.is_operator or may_use(self.key, each["model"])]

    def decision(self, record: dict[str, Any]) -> dict[str, Any]:
        """A decision as JSON, with its texts, if it has any."""
        if self.is_operator:
            return record
        shown = dict(record)
        if self.is_restricted:
            place = None if record["node"] is None else WHOLE_FLEET
            shown |= {"node": place, "devices": [], "nodes": [], "nodes_omitted": 0}
            shown |= {name: f"{record['action']}: {HIDDEN}" for name in ("outcome", "text") if name in record}
        for node in shown["nodes"]:
            if node["verdict"] in _QUOTING:
                for name in ("outcome", "text"):
                    if name in shown:
                        shown[name] = shown[name].replace(node["reason"], HIDDEN)
        nodes = list(map(self._assessment, shown["nodes"]))
        return shown | {"victims": self._allowed(record["victims"]), "nodes": nodes}

    def events(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """An event of `/fleet/events`, if it is shown."""
        if self.is_operator:
            yield event
        elif not may_use(self.key, event["model"]) if "model" in event else self.is_restricted:
            return
        elif event["kind"] == "decision":
            yield self.decision(event)
        elif self.is_restricted:
            other = event.get("for_model")
            named = {"for_model": other} if other is not None and may_use(self.key, other) else {}
            yield {name: event[name] for name in _OF_ANY_PLACE if name in event} | named | {"node": WHOLE_FLEET}
        else:
            yield {name: value for name, value in event.items() if name != "why"}

    def _assessment(self, assessment: dict[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = {"reason": HIDDEN} if assessment["verdict"] in _QUOTING else {}
        if "victims" in assessment:
            shown["victims"] = self._allowed(assessment["victims"])
        if "parts" in assessment:
            shown["parts"] = list(map(self._assessment, assessment["parts"]))
        if occupants := assessment.get("occupants"):
            shown["occupants"] = [each for each in occupants if may_use(self.key, each["model"])]
        return assessment | shown

    def _allowed(self, models: Iterable[str]) -> list[str]:
        return [model for model in models if may_use(self.key, model)]


def _progress(model: dict[str, Any]) -> dict[str, Any] | None:
    """Without what the load waits for, which names other models."""
    progress: dict[str, Any] | None = model.get("progress")
    return None if progress is None else progress | {"waits_for": None}


def _nearest_to_ready(places: Sequence[dict[str, Any]], field: str) -> Sequence[dict[str, Any]]:
    """The one of a model's places, if it has any, that serves first. `field` has its state."""
    order = {ModelState.READY: 0, ModelState.UNREACHABLE: 2}
    return sorted(places, key=lambda place: order.get(place[field], 1))[:1]


def _everywhere(places: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A model in all its places as if it were in one: the state where it is nearest to ready, and the load of all."""
    (nearest,) = _nearest_to_ready(places, "state")
    loads = [place["load"] for place in places]
    load = {name: sum(each[name] for each in loads) for name in ("running", "waiting", "tokens_per_s")}
    in_flight = sum(place["in_flight"] for place in places)
    return nearest | {"load": nearest["load"] | load, "in_flight": in_flight} | _NO_PLACE


def _as_one(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Nodes that have been filtered, as one that has the models of all and says nothing about any of them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for model in (model for node in nodes for model in node["models"]):
        found.setdefault(model["id"], []).append(model)
    models = [_everywhere(places) for places in found.values()]
    warm = {model["id"] for model in models}
    return {
        "name": WHOLE_FLEET,
        "kind": "neuron",
        "up": any(node["up"] for node in nodes),
        "draining": False,
        "drained": False,
        "problem": None,
        "missed_polls": 0,
        "can_sleep": False,
        "dialects": [],
        "ceiling_bytes": None,
        "devices": [],
        "models": models,
        "members": [],
        "disk": None,
        "pulls": [],
        "files": {},
        "cold_models": sorted({model for node in nodes for model in node["cold_models"]} - warm),
        "cold_reasons": {},
        "absent_models": {},
    }


_NO_AGES = {"state_age_s": 0.0, "idle_s": 0.0}


@dataclass(slots=True)
class _Reader:
    view: FleetView
    has_missed: bool = False
    """Whether it was too slow for a change."""
    facts: bytes = b""
    """What it was last sent, without ages, if it sees no single nodes."""


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


class _Everything(_Frame):
    """The whole fleet at one moment."""

    def __init__(self, nodes: list[dict[str, Any]], waiting: dict[str, int]) -> None:
        super().__init__("fleet", lambda view: {"nodes": view.nodes(nodes), "waiting": view.waiting(waiting)})
        self._facts: dict[FleetView, bytes] = {}

    def facts(self, view: FleetView) -> bytes:
        """Equal where a view shows nothing new but the ages of models."""
        if view not in self._facts:
            shown = self._shown_in(view)
            nodes = [node | {"models": [model | _NO_AGES for model in node["models"]]} for node in shown["nodes"]]
            self._facts[view] = msgspec.json.encode(shown | {"nodes": nodes})
        return self._facts[view]


class FleetFeed:
    """Writes events `fleet`, `node` and `waiting` to its readers. Owned by the loop's thread.

    `fleet` has everything and comes first, and again to a reader that was too slow for a change, or that sees no single
    nodes. `node` replaces one node, `waiting` the depths of the queues.
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
            self._changes()  # what a first reader gets now is no change at the next tick
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
        everything: _Everything | None = None
        for exchange, reader in self._readers.items():
            if exchange.paused:
                reader.has_missed = reader.has_missed or bool(frames)
            elif reader.has_missed or (frames and reader.view.is_restricted):
                everything = everything or self._everything()
                self._write(exchange, reader, everything)
            else:
                for frame in frames:
                    exchange.write(frame.encoded(reader.view))

    def _write(self, exchange: Exchange, reader: _Reader, everything: _Everything) -> None:
        reader.has_missed = False
        if reader.view.is_restricted:
            if (facts := everything.facts(reader.view)) == reader.facts:
                return
            reader.facts = facts
        exchange.write(everything.encoded(reader.view))

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

    def _everything(self) -> _Everything:
        return _Everything(node_statuses(self._dispatcher.fleet), dict(self._dispatcher.queue_depths))


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
        "problem": node.problem,
        "missed_polls": node.missed_polls,
        "can_sleep": node.can_sleep,
        "dialects": node.abilities.dialects,
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
    """What decides whether a node has changed: all of it but the ages of its models, of which those that are cold are
    only listed."""
    models = [
        msgspec.structs.replace(held, status=msgspec.structs.replace(held.status, state_age_s=0.0, idle_s=0.0))
        for held in node.residencies.values()
        if held.state is not ModelState.COLD
    ]
    sizes = [(id, held.status.disk_bytes, held.is_absent, held.failure) for id, held in node.residencies.items()]
    facts = [(held.status, held.in_flight, held.pinned) for held in models]
    return msgspec.structs.replace(node, residencies={}), facts, sizes
