"""What a node gets of an opaque request: all of it, with the name of the model as nodes know it."""

from __future__ import annotations

from cortex.gateway.dispatch.leases import Lease
from cortex.http.composed_body import Body
from cortex.http.opaque_request import passed_headers, target_of, with_fields
from cortex.http.request import Headers, Request
from cortex.parsing.parser import BodyParser
from cortex.wire.opaque.fields import OpaqueFields
from cortex.wire.opaque.routes import upstream_path


class OpaqueBody:
    """The same for every attempt, but for the path below `/upstream/`: a foreign server is the upstream itself."""

    __slots__ = ("_body", "_own_path", "_path", "_query", "_upstream", "headers", "method")

    def __init__(self, request: Request, model: str, found: OpaqueFields | str) -> None:
        """`found`: what is known of its fields; or, for a request below `/upstream/`, the path of the server."""
        self.method = request.method
        self.headers: Headers = passed_headers(request)
        self._query = request.query
        self._body: Body = request.body if request.upload is None else request.upload
        self._path = request.path
        self._upstream: bytes | None = None
        if isinstance(found, str):
            self._path = found.encode("latin-1")
            self._upstream = upstream_path(model, found).encode("latin-1")
        elif found.model != model:  # the client named it by an alias
            self._query, self._body = with_fields(request, found, {"model": model})
        self._own_path = self._path

    def choose(self, lease: Lease, *, takes_salt: bool = False) -> bool:  # noqa: ARG002 - no prompt in it is cached
        self._path = self._own_path  # the attempt before may have been at a node of the other kind
        if self._upstream is not None and lease.has_lifecycle:
            self._path = self._upstream
        return True

    async def prepare(self, parser: BodyParser) -> None:
        """Nothing has to be prepared."""

    def made(self) -> tuple[bytes, Body, None]:
        return target_of(self._path, self._query), self._body, None
