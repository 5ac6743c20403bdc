"""Fetches the usage of requests whose clients disconnected before the end of the response: only the node knows it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.http.upstream.faults import UpstreamFault
from cortex.system.tasks import OwnedTasks
from cortex.wire.errors import CortexError
from cortex.wire.events import Usage

log = logging.getLogger(__name__)


class DisconnectedUsage:
    """Owns one task per request. `close` waits for them; a node responds within seconds or the call fails."""

    def __init__(self) -> None:
        self._tasks = OwnedTasks()

    def fetch(
        self, node: NodeClient | None, attempt_id: str, estimate: Usage | None, settle: Callable[[Usage | None], None]
    ) -> None:
        """Call `settle` exactly once, with the usage from the node, or with `estimate` when the node has none."""
        if node is None:
            settle(estimate)
            return
        self._tasks.start(_fetch(node, attempt_id, estimate, settle), f"usage of {attempt_id}")

    async def close(self) -> None:
        await self._tasks.finish()


async def _fetch(
    node: NodeClient, attempt_id: str, estimate: Usage | None, settle: Callable[[Usage | None], None]
) -> None:
    try:
        usage: Usage | None = await node.request_usage(attempt_id)
    except (UpstreamFault, CortexError) as problem:
        log.debug("usage estimated: node did not report it: %s", problem, extra={"attempt_id": attempt_id})
        usage = estimate
    settle(usage)
