"""`GET /fleet/models/{model}/log`: the output of the servers that run a model. For operators: it may show prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from cortex.gateway.api.parts import DeferredResponses, expect, number_in_query, query
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.dispatch.view import DispatchView
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.proxy.routes import json_response
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.http.upstream.faults import UpstreamFault
from cortex.wire.errors import CortexError, NodeNotFound, UpstreamUnavailable, shorten
from cortex.wire.node.model_log import ModelLog

_MODELS = "/fleet/models/"
_LOG = "/log"
_MAX_LINES = 10**15


class ModelLogRoutes:
    """Asks the nodes that know the model, all at once."""

    def __init__(
        self,
        dispatcher: DispatchView,
        nodes: Mapping[str, NodeClient],
        metering: Metering,
        deferred: DeferredResponses,
    ) -> None:
        self._dispatcher = dispatcher
        self._nodes = nodes
        self._metering = metering
        self._deferred = deferred

    def serves(self, path: str) -> bool:
        return path.startswith(_MODELS) and path.endswith(_LOG)

    def handle(self, exchange: Exchange, path: str) -> None:
        request = exchange.request
        expect(request, b"GET")
        self._metering.meter.authenticate_operator(request)
        model = self._dispatcher.resolve(path.removeprefix(_MODELS).removesuffix(_LOG)).model_id
        wanted = query(request, "node")
        fleet = [node for node in self._dispatcher.fleet.nodes if node.has_lifecycle and model in node.residencies]
        clients = [self._nodes[node.name] for node in fleet if wanted in (None, node.name)]
        if not clients:
            raise NodeNotFound(f"No node{f' {shorten(wanted)}' if wanted else ''} that loads models has {model}.")
        after = number_in_query(request, "after", 0, most=_MAX_LINES)
        self._deferred.respond(exchange, _respond(model, clients, after))


async def _respond(model: str, clients: Sequence[NodeClient], after: int) -> Response:
    """Raises the error of the last node where none has a log."""
    found = await asyncio.gather(*(_log(client, model, after) for client in clients))
    logs = [(client.name, log) for client, log in zip(clients, found, strict=True) if isinstance(log, ModelLog)]
    if not logs and isinstance(found[-1], CortexError):
        raise found[-1]
    nodes = [{"node": name, "lines": log.lines, "next": log.next} for name, log in logs]
    return json_response({"model": model, "nodes": nodes})


async def _log(client: NodeClient, model: str, after: int) -> ModelLog | CortexError:
    try:
        return await client.model_log(model, after)
    except UpstreamFault as fault:
        return UpstreamUnavailable(f"Node {client.name} did not respond: {fault}")
    except CortexError as error:
        return error
