"""What keys that are not operators' see of the fleet: everything but reasons of failures, files and addresses.

Reasons quote messages of nodes and of the network, which name files and hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cortex.fleet.placement.decision import Verdict
from cortex.gateway.ledger.keys import KeySection, may_use

HIDDEN = "an operator's key shows the reason"
_QUOTING = (Verdict.FAILED.value, Verdict.UNSUPPORTED.value, Verdict.UNHEALTHY.value)
"""Verdicts whose reason is a message from elsewhere. The others are our own words about memory."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """What one client sees. A key with `models` sees nothing of other models, and no reasons: those name them."""

    is_operator: bool
    key: KeySection | None = None
    """None: a client of an open gateway."""

    @property
    def _is_restricted(self) -> bool:
        return not self.is_operator and self.key is not None and bool(self.key.models)

    def node(self, status: dict[str, Any]) -> dict[str, Any]:
        """A node of `/fleet/status` and of the feed."""
        if self.is_operator:
            return status
        of_model = [("models", "id"), ("shares", "model_id"), ("pulls", "model_id")]
        seen = {name: [each for each in status[name] if may_use(self.key, each[field])] for name, field in of_model}
        for name in ("models", "pulls"):
            seen[name] = [each | {"reason": HIDDEN if each.get("reason") else None} for each in seen[name]]
        seen["models"] = [model | {"source": None} for model in seen["models"]]
        return status | {
            **seen,
            "problem": HIDDEN if status["problem"] else None,
            "files": {model: size for model, size in status["files"].items() if may_use(self.key, model)},
            "cold_models": [model for model in status["cold_models"] if may_use(self.key, model)],
        }

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
        for node in record["nodes"]:
            if self._hides(node):
                for name in ("outcome", "text"):
                    if name in shown:
                        shown[name] = HIDDEN if self._is_restricted else shown[name].replace(node["reason"], HIDDEN)
        nodes = list(map(self._assessment, record["nodes"]))
        return shown | {"victims": self._allowed(record["victims"]), "nodes": nodes}

    def events(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """An event of `/fleet/events`, if it is shown."""
        if self.is_operator:
            yield event
        elif "model" in event and not may_use(self.key, event["model"]):
            return
        elif event["kind"] == "decision":
            yield self.decision(event)
        else:
            other = event.get("for_model")
            hidden = {"why"} if other is None or may_use(self.key, other) else {"why", "for_model"}
            yield {name: value for name, value in event.items() if name not in hidden}

    def _hides(self, assessment: dict[str, Any]) -> bool:
        return self._is_restricted or assessment["verdict"] in _QUOTING

    def _assessment(self, assessment: dict[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = {"reason": HIDDEN} if self._hides(assessment) else {}
        if "victims" in assessment:
            shown["victims"] = self._allowed(assessment["victims"])
        if "parts" in assessment:
            shown["parts"] = list(map(self._assessment, assessment["parts"]))
        if occupants := assessment.get("occupants"):
            shown["occupants"] = [each for each in occupants if may_use(self.key, each["model"])]
        return assessment | shown

    def _allowed(self, models: Iterable[str]) -> list[str]:
        return [model for model in models if may_use(self.key, model)]
