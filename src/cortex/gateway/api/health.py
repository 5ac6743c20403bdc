"""What `/health` reports about the gateway process itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cortex import __version__
from cortex.tasks import Supervisor


@dataclass(slots=True, eq=False)
class GatewayHealth:
    """Owned by the gateway, which sets `stale_reason` with every reload."""

    tasks: Supervisor
    stale_reason: str | None = None
    """Why the files on disk are not in force; None when they are."""

    def body(self, nodes: Mapping[str, str], *, for_operator: bool) -> dict[str, Any]:
        """The body of `/health`. Reasons, which may name files, are for operators."""
        config = {"status": "current" if self.stale_reason is None else "stale"}
        if self.stale_reason is not None and for_operator:
            config["reason"] = self.stale_reason
        failing = self.tasks.failing
        body: dict[str, Any] = {
            "status": "degraded" if failing else "ok",
            "version": __version__,
            "nodes": nodes,
            "config": config,
        }
        if failing and for_operator:
            body["failing_tasks"] = failing
        return body
