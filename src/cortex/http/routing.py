"""The routes of a server: which handler serves a request, by its method and path. Gateway and node share it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote

from cortex.http.limits import ClientLimits
from cortex.http.request import Request
from cortex.http.server.parser import Spooled
from cortex.wire.errors import InvalidValue, MethodNotAllowed, RouteNotFound, shorten

Handler = TypeVar("Handler")
Other = TypeVar("Other")
Handler_co = TypeVar("Handler_co", covariant=True)
_PARAMETER = re.compile(r"\{(\w+)(?::((?:[^{}]|\{[^{}]*\})+))?\}")


BodyLimit = Callable[[Request, ClientLimits], int | Spooled]
"""How long the body of a request may be, by its head."""


class Route(NamedTuple, Generic[Handler_co]):
    """A handler for requests to `path`."""

    methods: str
    """Such as `GET PATCH`. Empty: every method."""
    path: str
    """Such as `/v1/files/{id}/content`. A parameter matches one segment, or with a regular expression, as in
    `/v1/models/{name:.+}`, what that matches."""
    handler: Handler_co
    body_limit: BodyLimit | None = None
    """None: that of the server."""
    has_head: bool = True
    """HEAD is taken with GET."""

    def served_by(self, handler: Other) -> Route[Other]:
        """The same route with another handler."""
        return Route(self.methods, self.path, handler, self.body_limit, self.has_head)


class Match(NamedTuple, Generic[Handler_co]):
    """The route of a request."""

    route: Route[Handler_co]
    values: dict[str, str]
    """The parameters of the path, percent-decoded."""


def routed_path(request: Request) -> bytes:
    """The path as sent, without the slashes at its end, which routers ignore."""
    return request.path.rstrip(b"/") or b"/"


def path_of(request: Request) -> str:
    """The path as text, percent-decoded."""
    return unquote(request.path.decode("utf-8", "replace"))


def query(request: Request, name: str) -> str | None:
    """The first value of a query parameter; None when it is absent or empty. Raises InvalidValue for one with NUL,
    which no name has and not every database stores."""
    found = parse_qsl(request.query.decode("utf-8", "replace"))
    value = next((value for key, value in found if key == name), None)
    if value is not None and "\0" in value:
        raise InvalidValue(f"Invalid value for '{name}': it contains a NUL character.", param=name)
    return value


def is_in_query(request: Request, name: str) -> bool:
    """Whether a query parameter is there, with a value or without one."""
    found = parse_qsl(request.query.decode("utf-8", "replace"), keep_blank_values=True)
    return any(key == name for key, _ in found)


class Router(Generic[Handler]):
    """The routes of one server. A path without parameters comes before those with, which are tried in their order. A
    slash at the end of a path is ignored."""

    def __init__(self, routes: Iterable[Route[Handler]], hint: str = "GET / lists the routes") -> None:
        """`hint`: what the error for an unknown path says."""
        self._hint = hint
        self.paths: dict[str, list[str]] = {}
        """The methods of every path that takes particular ones, for people."""
        self._exact: dict[bytes, dict[bytes, Match[Handler]]] = {}
        """By path and method; no method: every one."""
        self._patterns: list[tuple[re.Pattern[str], frozenset[str], Route[Handler]]] = []
        for route in routes:
            methods = frozenset(route.methods.split())
            if methods:
                self.paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), []).extend(route.methods.split())
            methods |= {"HEAD"} if "GET" in methods and route.has_head else set()
            if "{" in route.path:
                self._patterns.append((_pattern(route.path), methods, route))
            else:
                here = self._exact.setdefault(route.path.encode(), {})
                here.update((method.encode(), Match(route, {})) for method in methods or {""})

    def match(self, request: Request) -> Match[Handler] | None:
        """The route of a request, if there is one."""
        exact = self._exact.get(request.path)
        if exact is not None and (match := exact.get(request.method)) is not None:
            return match
        found = self._search(request)
        return found if isinstance(found, Match) else None

    def find(self, request: Request) -> Match[Handler]:
        """The route of a request. Raises RouteNotFound or MethodNotAllowed."""
        found = self.match(request) or self._search(request)
        if isinstance(found, Match):
            return found
        if not found:
            raise RouteNotFound(f"There is no {shorten(path_of(request))}; {self._hint}.")
        method, path = request.method.decode("latin-1"), request.path.decode("utf-8", "replace")
        raise MethodNotAllowed(
            f"{shorten(method)} is not allowed on {shorten(path)}; use {' or '.join(sorted(found))}.",
            details={"allowed_methods": sorted(found)},
        )

    def _search(self, request: Request) -> Match[Handler] | set[str]:
        """The route of a request, or else the methods that its path takes."""
        plain = routed_path(request)
        exact = self._exact.get(plain, {})
        if (match := exact.get(request.method) or exact.get(b"")) is not None:
            return match
        method, path = request.method.decode("latin-1"), plain.decode("utf-8", "replace")
        allowed = {each.decode() for each in exact}
        for pattern, methods, route in self._patterns:
            if found := pattern.fullmatch(path):
                if not methods or method in methods:
                    return Match(route, {name: unquote(value) for name, value in found.groupdict().items()})
                allowed |= methods
        return allowed


def _pattern(path: str) -> re.Pattern[str]:
    """The regular expression of a path with parameters."""
    expression, position = "", 0
    for parameter in _PARAMETER.finditer(path):
        expression += re.escape(path[position : parameter.start()])
        expression += f"(?P<{parameter[1]}>{parameter[2] or '[^/]+'})"
        position = parameter.end()
    return re.compile(expression + re.escape(path[position:]))


def in_memory(_: Request, limits: ClientLimits) -> int:
    """The body limit of a request that is held in memory."""
    return limits.body_bytes


def spooled(_: Request, limits: ClientLimits) -> Spooled:
    """The body limit of a file."""
    return Spooled(limits.upload_bytes)
