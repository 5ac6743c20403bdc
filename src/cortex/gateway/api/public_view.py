"""What keys that are not operators' see of the fleet: everything but reasons of failures, files and addresses.

Reasons quote messages of nodes and of the network, which name files and hosts.
"""

from __future__ import annotations

from typing import Any

from cortex.fleet.placement.decision import Verdict

HIDDEN = "an operator's key shows the reason"
_QUOTING = (Verdict.FAILED.value, Verdict.UNSUPPORTED.value, Verdict.UNHEALTHY.value)
"""Verdicts whose reason is a message from elsewhere. The others are our own words about memory."""


def public_node(status: dict[str, Any]) -> dict[str, Any]:
    """A node of `/fleet/status` and of the feed."""
    models = [model | {"source": None, "reason": HIDDEN if model.get("reason") else None} for model in status["models"]]
    pulls = [pull | {"reason": HIDDEN if pull.get("reason") else None} for pull in status.get("pulls", ())]
    return status | {"problem": HIDDEN if status["problem"] else None, "models": models, "pulls": pulls}


def public_decision(record: dict[str, Any]) -> dict[str, Any]:
    """A decision as JSON, with its texts, if it has any."""
    shown = dict(record)
    shown["nodes"] = []
    for node in record["nodes"]:
        if node["verdict"] in _QUOTING:
            for name in ("outcome", "text"):
                if name in shown:
                    shown[name] = shown[name].replace(node["reason"], HIDDEN)
            node = node | {"reason": HIDDEN}
        parts = [part | ({"reason": HIDDEN} if part["verdict"] in _QUOTING else {}) for part in node.get("parts", ())]
        shown["nodes"].append(node | {"parts": parts})
    return shown


def public_event(event: dict[str, Any]) -> dict[str, Any]:
    """An event of `/fleet/events`."""
    if event["kind"] == "decision":
        return public_decision(event)
    return {name: value for name, value in event.items() if name != "why"}
