"""Which handler serves a request, by its method and path. Gateway and node share it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote

from cortex.http.request import Request
from cortex.wire.errors import InvalidValue, MethodNotAllowed, RouteNotFound, shorten

Handler = TypeVar("Handler")
Handler_co = TypeVar("Handler_co", covariant=True)


class Route(NamedTuple, Generic[Handler_co]):
    """A handler for requests to `path`."""

    methods: str
    """Such as `GET PATCH`; HEAD is taken with GET. Empty: every method."""
    path: str
    """A path, or a regular expression with named groups."""
    handler: Handler_co


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


def expect(request: Request, *methods: bytes) -> None:
    """Raise MethodNotAllowed for any other method."""
    if request.method not in methods:
        allowed = b" or ".join(methods).decode()
        raise MethodNotAllowed(
            f"{shorten(request.path.decode('latin-1'))} takes {allowed} only.",
            details={"allowed_methods": [method.decode() for method in methods]},
        )


class Router(Generic[Handler]):
    """Finds the first route that serves a request. A slash at the end of a path is ignored."""

    def __init__(self, routes: Iterable[Route[Handler]], hint: str = "GET / lists the routes") -> None:
        """`hint`: what the error for an unknown path says."""
        self._hint = hint
        self._exact: dict[str, dict[str, Handler]] = {}
        self._patterns: list[tuple[re.Pattern[str], frozenset[str], Handler]] = []
        for route in routes:
            methods = frozenset(route.methods.split())
            methods |= {"HEAD"} if "GET" in methods else set()
            if "(" in route.path:
                self._patterns.append((re.compile(route.path), methods, route.handler))
            else:
                here = self._exact.setdefault(route.path, {})
                here.update(dict.fromkeys(methods or {""}, route.handler))

    def serves(self, request: Request) -> bool:
        """Whether there is a route for the path, with whatever method."""
        path = _path(request)
        return path in self._exact or any(pattern.fullmatch(path) for pattern, _, _ in self._patterns)

    def find(self, request: Request) -> tuple[Handler, dict[str, str]]:
        """The handler and what its path matched, percent-decoded. Raises RouteNotFound or MethodNotAllowed."""
        method, path = request.method.decode("latin-1"), _path(request)
        exact = self._exact.get(path, {})
        if (handler := exact.get(method) or exact.get("")) is not None:
            return handler, {}
        allowed = set(exact)
        for pattern, methods, handler in self._patterns:
            if match := pattern.fullmatch(path):
                if not methods or method in methods:
                    return handler, {name: unquote(value) for name, value in match.groupdict().items()}
                allowed |= methods
        if not allowed:
            raise RouteNotFound(f"There is no {shorten(path_of(request))}; {self._hint}.")
        raise MethodNotAllowed(
            f"{shorten(method)} is not allowed on {shorten(path)}; use {' or '.join(sorted(allowed))}.",
            details={"allowed_methods": sorted(allowed)},
        )


def _path(request: Request) -> str:
    return request.path.decode("utf-8", "replace").rstrip("/") or "/"
