"""A request to the node's API, as its handlers get it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cortex.http import routing
from cortex.http.observer import Translation
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response


class ApiCall:
    """One request, and the exchange that its response goes to."""

    __slots__ = ("exchange", "load_s", "request", "translate", "values")

    def __init__(self, exchange: Exchange, values: dict[str, str]) -> None:
        self.exchange = exchange
        self.request = exchange.request
        self.values = values
        """The parameters of the path, percent-decoded."""
        self.load_s = 0.0
        """How long the request waited for its model and for its turn; set by handlers that measure it."""
        self.translate: Callable[[str], Translation] | None = None
        """Makes the translation of a response that a server wrote, for the model of this name."""

    def query(self, name: str) -> str | None:
        """The first value of a query parameter, or None."""
        return routing.query(self.request, name)


Handler = Callable[[ApiCall], Awaitable[Response | None]]
"""Returns the response, or None if it has written one to the exchange. Cancelled when the client disconnects."""
Route = routing.Route[Handler]
