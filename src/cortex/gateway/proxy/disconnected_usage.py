"""Clients that left before the end of their answer pay for what was done until then: only the node knows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cortex.gateway.dispatch.node_client import NodeClient
from cortex.http.upstream.faults import UpstreamFault
from cortex.wire.errors import CortexError
from cortex.wire.events import Usage

log = logging.getLogger(__name__)


class DisconnectedUsage:
    """Asks nodes what such answers had cost. Owns a task for each; `close` waits for them, seconds at most."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(
        self, node: NodeClient | None, request_id: str, guess: Usage | None, settle: Callable[[Usage | None], None]
    ) -> None:
        """Call `settle` exactly once, with what the node says, or with `guess` when it does not, or is gone."""
        if node is None:
            settle(guess)
            return
        task = asyncio.create_task(_ask(node, request_id, guess, settle), name=f"cost of {request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._tasks)


async def _ask(node: NodeClient, request_id: str, guess: Usage | None, settle: Callable[[Usage | None], None]) -> None:
    try:
        usage: Usage | None = await node.request_usage(request_id)
    except (UpstreamFault, CortexError) as problem:
        log.debug("what a client that left had used is a guess: %s", problem, extra={"request_id": request_id})
        usage = guess
    settle(usage)
