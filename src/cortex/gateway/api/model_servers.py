"""What nodes keep of the servers that run a model, for operators: their output (`GET /fleet/models/{model}/log`), which
may show prompts, and the sizes that were measured (`DELETE /fleet/models/{model}/size`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from cortex.gateway.api.parts import ApiRoute, DeferredResponses, number_in_query
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.proxy.routes import json_response
from cortex.http.request import Request
from cortex.http.routing import Route, query
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.http.upstream.faults import UpstreamFault
from cortex.wire.errors import CortexError, NodeNotFound, UpstreamUnavailable, shorten
from cortex.wire.node.model_log import ModelLog

T = TypeVar("T")

_MAX_LINES = 10**15


class ModelServerRoutes:
    """Asks the nodes that know the model, all at once."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        nodes: Mapping[str, NodeClient],
        metering: Metering,
        deferred: DeferredResponses,
    ) -> None:
        self._dispatcher = dispatcher
        self._nodes = nodes
        self._metering = metering
        self._deferred = deferred

    def routes(self) -> list[ApiRoute]:
        return [
            Route("GET", "/fleet/models/(?P<name>.+)/log", self._show_log),
            Route("DELETE", "/fleet/models/(?P<name>.+)/size", self._begin_forgetting),
        ]

    def _show_log(self, exchange: Exchange, name: str) -> None:
        model, clients = self._nodes_of(exchange.request, name)
        after = number_in_query(exchange.request, "after", 0, most=_MAX_LINES)
        self._deferred.respond(exchange, _logs(model, clients, after))

    def _begin_forgetting(self, exchange: Exchange, name: str) -> None:
        self._deferred.respond(exchange, self._forget_size(*self._nodes_of(exchange.request, name)))

    def _nodes_of(self, request: Request, name: str) -> tuple[str, list[NodeClient]]:
        """The model, and the nodes that an operator's request is about."""
        self._metering.meter.authenticate_operator(request)
        model = self._dispatcher.resolve(name).model_id
        wanted = query(request, "node")
        fleet = [node for node in self._dispatcher.fleet.nodes if node.takes_orders and model in node.residencies]
        clients = [self._nodes[node.name] for node in fleet if wanted in (None, node.name)]
        if not clients:
            raise NodeNotFound(f"No node{f' {shorten(wanted)}' if wanted else ''} that loads models has {model}.")
        return model, clients

    async def _forget_size(self, model: str, clients: Sequence[NodeClient]) -> Response:
        """Here, and on the nodes; each of them reports what the model counts as there, or why it did not forget."""
        found = await asyncio.gather(*(_asked(client, client.forget_size(model)) for client in clients))
        self._dispatcher.forget_size(model)
        nodes = [
            {"node": client.name, "estimate_bytes": None, "error": each.message}
            if isinstance(each, CortexError)
            else {"node": client.name, "estimate_bytes": each.estimate_bytes, "error": None}
            for client, each in zip(clients, found, strict=True)
        ]
        return json_response({"model": model, "nodes": nodes})


async def _logs(model: str, clients: Sequence[NodeClient], after: int) -> Response:
    """Raises the error of the last node where none has a log."""
    found = await asyncio.gather(*(_asked(client, client.model_log(model, after)) for client in clients))
    logs = [(client.name, log) for client, log in zip(clients, found, strict=True) if isinstance(log, ModelLog)]
    if not logs and isinstance(found[-1], CortexError):
        raise found[-1]
    nodes = [{"node": name, "lines": log.lines, "next": log.next} for name, log in logs]
    return json_response({"model": model, "nodes": nodes})


async def _asked(client: NodeClient, call: Awaitable[T]) -> T | CortexError:
    try:
        return await call
    except UpstreamFault as fault:
        return UpstreamUnavailable(f"Node {client.name} did not respond: {fault}")
    except CortexError as error:
        return error
