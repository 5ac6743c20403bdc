"""What `/health` and `/ready` report: the gateway process itself, and whether a node could serve a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cortex import __version__
from cortex.fleet.topology import RESERVES, Node
from cortex.http.tls import ServerCertificate
from cortex.system.tasks import Supervisor
from cortex.wire.words import plural


@dataclass(slots=True, eq=False)
class GatewayHealth:
    """Owned by the gateway, which sets `stale_reason` with every reload."""

    tasks: Supervisor
    certificate: ServerCertificate | None = None
    stale_reason: str | None = None
    """Why the files on disk are not in force; None when they are."""
    is_database_away: Callable[[], bool] = bool
    """Whether usage, pins or drained nodes wait in memory for their database."""
    are_responses_away: Callable[[], bool] = bool
    """Whether a database of their own cannot be used for stored responses."""

    def body(self, nodes: Iterable[Node], *, for_operator: bool) -> dict[str, Any]:
        """The body of `/health`. Reasons, which may name files, are for operators."""
        config = {"status": "current" if self.stale_reason is None else "stale"}
        if self.stale_reason is not None and for_operator:
            config["reason"] = self.stale_reason
        if self.certificate is not None and self.certificate.stale_reason is not None:
            config |= {"certificate": "stale"}
            if for_operator:
                config["certificate_reason"] = self.certificate.stale_reason
        nodes = tuple(nodes)
        failing = self.tasks.failing
        reasons = [
            *self._database_reasons(),
            *_process_reasons(config, failing),
            *_node_reasons(nodes, for_operator=for_operator),
        ]
        body: dict[str, Any] = {
            "status": "degraded" if reasons else "ok",
            "ready": is_ready(nodes),
            "reasons": reasons,
            "version": __version__,
            "nodes": _nodes(nodes) if for_operator else _num_nodes(nodes),
            "config": config,
        }
        if failing and for_operator:
            body["failing_tasks"] = failing
        return body

    def _database_reasons(self) -> list[str]:
        reasons = []
        if self.is_database_away():
            reasons.append("the database cannot be used; usage and pins are kept in memory")
        if self.are_responses_away():
            reasons.append("the database of responses cannot be used; responses are not stored")
        return reasons


def _nodes(nodes: tuple[Node, ...]) -> dict[str, str]:
    return {node.name: _word(node) for node in nodes}


def _word(node: Node) -> str:
    return "up" if node.healthy else "asleep" if node.sleep in RESERVES else "down"


def _num_nodes(nodes: tuple[Node, ...]) -> dict[str, int]:
    """Without names, which are for operators."""
    words = Counter(map(_word, nodes))
    asleep = {"asleep": words["asleep"]} if words["asleep"] else {}
    return {"up": words["up"], "down": words["down"], **asleep}


def is_ready(nodes: Iterable[Node]) -> bool:
    """Whether a node takes requests, or would once it is woken for one."""
    return any((node.healthy and not node.draining) or node.sleep in RESERVES for node in nodes)


def _process_reasons(config: dict[str, str], failing: tuple[str, ...]) -> list[str]:
    reasons = []
    if failing:
        reasons.append(f"{plural(len(failing), 'task keeps', 'tasks keep')} failing in the gateway")
    if config["status"] == "stale":
        reasons.append("the configuration on disk was rejected; the previous one is in force")
    if "certificate" in config:
        reasons.append("the certificate on disk was rejected; the previous one is in force")
    return reasons


def _node_reasons(nodes: tuple[Node, ...], *, for_operator: bool) -> list[str]:
    if not nodes:
        return ["no node is configured or found by DNS"]
    reasons = []
    for node in nodes:
        name = f"node {node.name}" if for_operator else "a node"
        if not node.healthy and node.sleep not in RESERVES:
            problem = f": {node.problem}" if node.problem and for_operator else ""
            reasons.append(f"{name} is down{problem}")
        elif node.draining:
            reasons.append(f"{name} takes no new requests")
    return list(dict.fromkeys(reasons))
