"""The fleet as keys without operator rights see it: everything but reasons of failures, files and addresses.

Reasons quote messages of nodes and of the network, which name files and hosts. A key with `models` sees these models,
as if one node without devices had them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cortex.fleet.placement.decision import Verdict
from cortex.gateway.ledger.keys import KeySection, may_use
from cortex.wire.node.protocol import ModelState

HIDDEN = "an operator's key shows the reason"
_QUOTING = (Verdict.FAILED.value, Verdict.UNSUPPORTED.value, Verdict.UNHEALTHY.value)
"""Verdicts whose reason quotes a message from elsewhere. The other reasons are about memory."""


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
    "host_bytes": 0,
    "host_splits": None,
}
"""Fields of a model's status that reveal its node or, by speed and memory, its devices."""
_OF_ANY_PLACE = ("kind", "at", "model", "cause", "bytes")
"""Fields of an event that reveal nothing about nodes and other models."""


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
            {name: value for name, value in place.items() if name not in ("replica_devices", "nodes")}
            | {"node": WHOLE_FLEET}
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
    order = {ModelState.READY: 0, ModelState.SUSPENDED: 2, ModelState.UNREACHABLE: 3}
    return sorted(places, key=lambda place: order.get(place[field], 1))[:1]


def _everywhere(places: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A model in all its places as if it were in one: the state where it is nearest to ready, and the load of all."""
    (nearest,) = _nearest_to_ready(places, "state")
    loads = [place["load"] for place in places]
    load: dict[str, Any] = {name: sum(each[name] for each in loads) for name in ("running", "waiting", "tokens_per_s")}
    by_class: Counter[str] = Counter()
    for each in loads:
        by_class.update(each["waiting_by_class"])
    load["waiting_by_class"] = dict(by_class)
    in_flight = sum(place["in_flight"] for place in places)
    return nearest | {"load": nearest["load"] | load, "in_flight": in_flight} | _NO_PLACE


def _as_one(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Filtered nodes merged into one, which has the models of all and reveals nothing about any of them."""
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
        "sleep": "awake",
        "watts": None,
        "problem": None,
        "missed_polls": 0,
        "can_sleep": False,
        "dialects": [],
        "ceiling_bytes": None,
        "host": None,
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
