"""The paths of such requests, and their targets below `/upstream/{model}/`."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote, unquote

from cortex.wire.errors import MalformedHTTP, ModelNotReady

UPSTREAM = "/upstream/"
UPSTREAM_ROUTE = f"{UPSTREAM}{{target:.+}}"
UPSTREAM_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
PATHS: dict[str, str] = {
    "/v1/audio/transcriptions": "POST",
    "/v1/audio/translations": "POST",
    "/v1/audio/speech": "POST",
    "/v1/audio/voices": "GET",
    "/v1/images/generations": "POST",
    "/v1/images/edits": "POST",
    "/v1/images/variations": "POST",
}
"""Path → method. Requests of `/upstream/` name their model in the path, these in their body or query."""
CLIENT_HEADERS = (
    "accept",
    "accept-language",
    "content-type",
    "if-modified-since",
    "if-none-match",
    "last-event-id",
    "range",
)
"""The client's headers that the server gets: no keys, cookies or origin."""
SAFE_HEADERS = {"content-security-policy": "sandbox allow-scripts allow-forms", "x-content-type-options": "nosniff"}
"""Pages of such a server are shown under this program's address and must not act as pages of ours."""


def is_opaque(path: str) -> bool:
    return path in PATHS or path.startswith(UPSTREAM)


def split_upstream(path: str) -> Iterator[tuple[str, str]]:
    """The ways to divide a path below `/upstream/` into a model and a path of its server, the shortest name first: the
    name may contain slashes. Names are percent-decoded, paths as sent. Raises MalformedHTTP for a path that could be
    read as another one."""
    check_path(path)
    rest = path.removeprefix(UPSTREAM)
    position = -1
    while (position := rest.find("/", position + 1)) >= 0:
        if name := unquote(rest[:position]):
            yield name, rest[position:]
    if rest:
        yield unquote(rest), "/"


def with_slash(method: bytes, path: bytes, query: bytes) -> bytes | None:
    """The redirect for a client that opens the root of a server without its last slash, because a page's links are
    relative to it. None if its `path` below `/upstream/` has one, or if it sends a body."""
    if method not in (b"GET", b"HEAD") or path.endswith(b"/"):
        return None
    return path + b"/" + (b"?" + query if query else b"")


def upstream_path(model: str, path: str) -> str:
    """The path of a request to `model`, for a node."""
    return f"{UPSTREAM}{quote(model, safe='')}{path}"


def check_path(path: str) -> None:
    """Raises MalformedHTTP for dot segments, backslashes and control characters, encoded or not."""
    decoded = unquote(unquote(path))
    if not decoded.isprintable() or "\\" in decoded or any(part in (".", "..") for part in decoded.split("/")):
        raise MalformedHTTP("the path has dot segments, backslashes or control characters; send it without them")


HEALTH_CHECKS = frozenset(
    {"/health", "/healthz", "/health/live", "/health/ready", "/livez", "/readyz", "/ping", "/v1/health"}
)
"""Health check paths below `/upstream/{model}`. A `GET` is charged to no key, takes no slot, and loads nothing."""


def not_ready(model: str) -> ModelNotReady:
    """The response to a check of a model that has no server now."""
    return ModelNotReady(f"{model} is not loaded, and a health check does not load it; send it a request, or load it.")
