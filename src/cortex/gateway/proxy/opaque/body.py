"""What a node gets of an opaque request: all of it, with the name of the model as nodes know it."""

from __future__ import annotations

from cortex.gateway.dispatch.leases import Lease
from cortex.http.composed_body import Body
from cortex.http.opaque_request import passed_headers, target_of, written
from cortex.http.request import Headers, Request
from cortex.parsing.parser import BodyParser
from cortex.wire.opaque.fields import OpaqueFields
from cortex.wire.opaque.routes import upstream_path


class OpaqueBody:
    """The same for every attempt, but for the path below `/upstream/`: a foreign server is the upstream itself."""

    __slots__ = ("_body", "_own_target", "_target", "_upstream", "headers", "method")

    def __init__(self, request: Request, model: str, found: OpaqueFields | str) -> None:
        """`found`: what is known of its fields; or, for a request below `/upstream/`, the path of the server."""
        self.method = request.method
        self.headers: Headers
        self._body: Body
        self._upstream: bytes | None = None
        """The target at one of our nodes, for a request below `/upstream/`."""
        if isinstance(found, str):
            self._own_target = target_of(found.encode("latin-1"), request.query)
            self._upstream = target_of(upstream_path(model, found).encode("latin-1"), request.query)
            self.headers = passed_headers(request)
            self._body = request.body if request.upload is None else request.upload
        else:
            self._own_target, self.headers, self._body = written(request, found, {"model": model})
        self._target = self._own_target

    def choose(self, lease: Lease) -> bool:
        self._target = self._own_target  # the attempt before may have been at a node of the other kind
        if self._upstream is not None and lease.abilities.reads_headers:
            self._target = self._upstream
        return True

    async def prepare(self, parser: BodyParser) -> None:
        """Nothing has to be prepared."""

    def made(self) -> tuple[bytes, Body, None]:
        return self._target, self._body, None
