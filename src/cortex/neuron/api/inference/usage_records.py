"""What answers had cost whose clients left: whoever bills by what was used asks here."""

from __future__ import annotations

import asyncio

from aiohttp import web

from cortex.neuron.api import responses
from cortex.wire.errors import RouteNotFound, shorten
from cortex.wire.events import Usage

MAX_KEPT = 1024
WAIT_S = 2.0
"""The question may come before the answer it is about has ended here."""


class UsageRecords:
    """Costs by request id, each told once. Bounded: the oldest go unasked. Belongs to one loop."""

    def __init__(self) -> None:
        self._costs: dict[str, Usage] = {}
        self._asked: dict[str, asyncio.Future[Usage]] = {}

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/requests/{id:.+}/usage", self.tell)]

    def note(self, request_id: str, cost: Usage) -> None:
        """The client of this request has left; this is what was done for it."""
        asked = self._asked.get(request_id)
        if asked is not None and not asked.done():
            asked.set_result(cost)
            return
        if len(self._costs) >= MAX_KEPT:
            del self._costs[next(iter(self._costs))]
        self._costs[request_id] = cost

    async def tell(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        cost = self._costs.pop(request_id, None) or await self._noted(request_id)
        if cost is None:
            raise RouteNotFound(f"No answer to a request {shorten(request_id)} was left here.")
        return responses.json(cost)

    async def _noted(self, request_id: str) -> Usage | None:
        waiting = self._asked.setdefault(request_id, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.shield(waiting)
        except TimeoutError:
            return None
        finally:
            self._asked.pop(request_id, None)
