"""Which handler serves a request: methods and paths of the node's API."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from cortex.http.observer import Translation
from cortex.http.request import Request
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import MethodNotAllowed, RouteNotFound, shorten


class ApiCall:
    """One request, and the exchange that its response goes to."""

    __slots__ = ("exchange", "load_s", "request", "translate", "values")

    def __init__(self, exchange: Exchange, values: dict[str, str]) -> None:
        self.exchange = exchange
        self.request = exchange.request
        self.values = values
        """What the named groups of the route's path matched, percent-decoded."""
        self.load_s = 0.0
        """How long the request waited for its model and for its turn; set by handlers that measure it."""
        self.translate: Callable[[str], Translation] | None = None
        """Makes the translation of a response that a server wrote, for the model of this name."""

    def query(self, name: str) -> str | None:
        """The first value of a query parameter, or None."""
        found = parse_qsl(self.request.query.decode("utf-8", "replace"), keep_blank_values=True)
        return next((value for key, value in found if key == name), None)


Handler = Callable[[ApiCall], Awaitable[Response | None]]
"""Returns the response, or None if it has written one to the exchange. Cancelled when the client disconnects."""


class Route(NamedTuple):
    """A handler for requests with `method` (HEAD too, if it is GET) to `path`, a regular expression."""

    method: str
    path: str
    handler: Handler


def path_of(request: Request) -> str:
    """The path as text, percent-decoded."""
    return unquote(request.path.decode("utf-8", "replace"))


class Router:
    """Finds the first route that serves a request."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._patterns: list[tuple[re.Pattern[str], Route]] = []
        for route in routes:
            if "(" in route.path:
                self._patterns.append((re.compile(route.path), route))
            else:
                self._exact.setdefault(route.path, {})[route.method] = route.handler

    def find(self, request: Request) -> tuple[Handler, dict[str, str]]:
        """The handler and what its path matched. Raises RouteNotFound or MethodNotAllowed."""
        sent = request.method.decode("latin-1")
        method = "GET" if sent == "HEAD" else sent
        path = request.path.decode("utf-8", "replace")
        allowed = set(exact := self._exact.get(path, {}))
        if method in exact:
            return exact[method], {}
        for pattern, route in self._patterns:
            if match := pattern.fullmatch(path):
                if route.method == method:
                    return route.handler, {name: unquote(value) for name, value in match.groupdict().items()}
                allowed.add(route.method)
        if not allowed:
            raise RouteNotFound(f"There is no route {shorten(path)}; the API begins at /v1 and /discovery.")
        methods = sorted(allowed | ({"HEAD"} if "GET" in allowed else set()))
        raise MethodNotAllowed(
            f"{shorten(sent)} is not allowed on {shorten(path)}; use {' or '.join(methods)}.",
            details={"allowed_methods": methods},
        )
