"""Requests that only the server of a model understands: speech, images, and everything below `/upstream/{model}/`.

They are relayed unread except for the model's name, with the same queue, load on demand and limits as other requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from cortex.http.composed_body import Body
from cortex.http.opaque_request import WrittenRequest, passed_headers, read_fields, spooled_form, target_of, written
from cortex.http.routing import routed_path
from cortex.http.server.server import Response
from cortex.neuron.api import bodies
from cortex.neuron.api.calls import ApiCall, Route
from cortex.neuron.api.inference.opaque_relay import OpaqueRelay
from cortex.neuron.api.inference.routes import Inference
from cortex.neuron.api.inference.tracing import traced
from cortex.neuron.api.metrics import RequestWatch
from cortex.neuron.node.harness.harness import Upstream
from cortex.wire.errors import UnsupportedModality
from cortex.wire.opaque.routes import (
    HEALTH_CHECKS,
    PATHS,
    UPSTREAM,
    UPSTREAM_METHODS,
    UPSTREAM_ROUTE,
    split_upstream,
    with_slash,
)


@dataclass(frozen=True, slots=True)
class OpaqueRoutes:
    inference: Inference

    @property
    def _relay(self) -> OpaqueRelay:
        return self.inference.opaque

    def routes(self) -> list[Route]:
        return [
            *(Route(method, path, self.by_field, spooled_form, has_head=False) for path, method in PATHS.items()),
            Route(" ".join(UPSTREAM_METHODS), UPSTREAM_ROUTE, self.by_path, spooled_form, has_head=False),
        ]

    async def by_field(self, call: ApiCall) -> None:
        """The model is in the body or in the query."""
        http, shared = call.request, self.inference
        with shared.drain_gate.enter(), shared.metrics.watch("opaque") as watch, traced(shared.tracer, http, watch):
            fields = await read_fields(http)
            access = bodies.access_of(http)
            if access != "any":
                fields.check_known()
            upstream = self._upstream(fields.model, routed_path(http).decode(), watch)
            if fields.form == "json":
                dropped = (*upstream.stripped_fields, *upstream.fields)
                body = await shared.server_body(http, upstream.fields, dropped, access)
                await self._relay.pass_on_json(call, fields.model, body, upstream, watch)
                return
            sent = written(http, fields, upstream.fields, upstream.stripped_fields)
            await self._relay.pass_on(call, fields.model, sent, upstream, watch)

    async def by_path(self, call: ApiCall) -> Response | None:
        """Everything after the path's prefix reaches the server unchanged."""
        http, shared = call.request, self.inference
        with shared.drain_gate.enter(), shared.metrics.watch("opaque") as watch, traced(shared.tracer, http, watch):
            ways = list(split_upstream(http.path.decode("latin-1")))
            known = {status.id for status in shared.backend.models()}
            model, path = next((way for way in ways if way[0] in known), ways[0])
            upstream = self._upstream(model, None, watch)
            location = with_slash(http.method, http.path, http.query) if path == "/" else None
            if location is not None:
                return Response(307, ((b"location", location),), b"")
            body: Body = http.body if http.upload is None else http.upload
            sent = WrittenRequest(target_of(path.encode("latin-1"), http.query), passed_headers(http), body)
            is_check = http.method == b"GET" and path in HEALTH_CHECKS
            await self._relay.pass_on(call, model, sent, upstream, watch, is_check=is_check, passed_headers=None)
        return None

    def _upstream(self, model: str, path: str | None, watch: RequestWatch) -> Upstream:
        """Raises ModelNotFound, or UnsupportedModality for a model that does not take such requests."""
        backend = self.inference.backend
        backend.served(model)  # raises ModelNotFound
        watch.model = model
        upstream = backend.upstream(model)
        if upstream is None:
            raise UnsupportedModality(
                f"{model} is run by the built-in engine, which has no {path or UPSTREAM}; use a model of a "
                "harness with a server for it."
            )
        if path is not None:
            upstream.check_route(path)
        return upstream
