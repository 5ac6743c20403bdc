"""What the parts of the gateway's API have in common, and functions that read requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.ledger.meter import Meter, Metering, has_credentials
from cortex.gateway.proxy.deferred_responses import DeferredResponses
from cortex.http.request import Request
from cortex.http.routing import Route, query
from cortex.http.server.server import Response
from cortex.system.tasks import OwnedTasks
from cortex.wire.errors import CortexError, InvalidValue, UpstreamUnavailable
from cortex.wire.fields.body import decode

T = TypeVar("T")


ApiHandler = Callable[..., Response | Coroutine[Any, Any, Response] | None]
"""Gets the exchange, and what the path matched by name. It returns the response or a coroutine that makes it, or None
when it responds itself, now or later. Both raise CortexError, a coroutine also StoreError. The client was authenticated
before."""
ApiRoute = Route[ApiHandler]


@dataclass(frozen=True, slots=True)
class ApiServices:
    """What the parts have in common."""

    dispatcher: Dispatcher
    nodes: Mapping[str, NodeClient]
    metering: Metering
    tasks: OwnedTasks
    """Follow work of nodes; at the end of the gateway they are cancelled, and nodes finish by themselves."""
    deferred: DeferredResponses

    def authenticate_operator(self, request: Request) -> str:
        """The name of the operator who sent the request. Raises InvalidAPIKey or OperatorOnly."""
        return self.metering.meter.authenticate_operator(request)

    async def awaken(self, *nodes: str) -> None:
        """Wake those of these nodes that sleep; returns when they respond. Raises why one of them cannot be woken."""
        await asyncio.gather(*map(self._awake, nodes))

    def _awake(self, node: str) -> asyncio.Future[None]:
        awake: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(error: CortexError | None) -> None:
            if awake.done():  # its order was cancelled
                return
            if error is not None:
                awake.set_exception(error)
            else:
                awake.set_result(None)

        self.dispatcher.when_awake(node, ended)
        return awake

    def check_awake(self, node: str) -> None:
        """Raises UpstreamUnavailable for a node that sleeps, or could not be woken."""
        if (why := self.dispatcher.why_away(node)) is not None:
            raise UpstreamUnavailable(f"Node {node}: {why}.")


def listing_key(meter: Meter, request: Request, open_paths: Sequence[bytes]) -> KeySection | None:
    """The key of a client that lists models. Without one, a path of `open_paths` shows what an open gateway does.
    Raises InvalidAPIKey."""
    if request.path in open_paths and not has_credentials(request):
        return None
    return meter.key(request)


def number_in_query(request: Request, name: str, default: int, *, most: int) -> int:
    """A number of the query from 0 to `most`. Raises InvalidValue."""
    text = query(request, name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidValue(f"Invalid value for '{name}': use a number from 0 to {most}.", param=name)
    return min(int(text), most)


def time_in_query(request: Request, name: str, default: float) -> float:
    """A time of the query: seconds since 1970, or a date or time such as `2026-01-31`. Raises InvalidValue."""
    text = query(request, name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
            seconds = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            seconds = -1.0
    if not 0 <= seconds < 1e11:
        raise InvalidValue(
            f"Invalid value for '{name}': use seconds since 1970, or a date or time such as 2026-01-31.", param=name
        )
    return seconds


def read_body(body: bytes, kind: type[T]) -> T:
    """The JSON body of a request; the default value of `kind` when there is none. Raises InvalidValue or
    MalformedJSON."""
    return decode(body.strip() or b"{}", kind)
