"""Responses of routes whose work waits: for a database, for a node, for another process."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from cortex.gateway.database import StoreError, client_error
from cortex.gateway.proxy.routes import error_response, family_of
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.system.tasks import OwnedTasks
from cortex.wire.errors import CortexError

log = logging.getLogger(__name__)


class DeferredResponses:
    """Responds when the work is done. The work continues if its client disconnects. Owns one task per request."""

    def __init__(self) -> None:
        self._tasks = OwnedTasks()

    def respond(self, exchange: Exchange, work: Coroutine[Any, Any, Response | None]) -> None:
        """Respond with the result of `work`, or with the error that it raises. If it returns None, it has responded
        itself."""
        self._tasks.start(respond(exchange, work))

    async def close(self) -> None:
        """Returns when the work in progress is done."""
        await self._tasks.finish()


async def respond(exchange: Exchange, work: Coroutine[Any, Any, Response | None]) -> None:
    """As `DeferredResponses.respond`, in a task of the caller. An error in the middle of a response aborts it."""
    request = exchange.request
    try:
        response = await work
    except CortexError as error:
        response = error_response(error, family_of(request.path))
    except StoreError as error:
        response = error_response(client_error(error), family_of(request.path))
    except Exception:
        log.exception("%s %s failed", request.method.decode("latin-1"), request.path.decode("latin-1"))
        internal = CortexError("Internal error of the gateway; its log has the details.")
        response = error_response(internal, family_of(request.path))
    if response is None:
        return
    if exchange.started:
        exchange.abort()
    else:
        exchange.respond(*response)  # of a client that has disconnected, the audit log gets the status
