"""For operators, the servers that run models: their output (`GET /fleet/models/{model}/log`), which may show prompts,
and their measured sizes (`DELETE /fleet/models/{model}/size`). llama-swap's `/logs` and `/logs/stream` have the events
of the fleet and the output of all servers, as text."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any, TypeVar

from cortex.gateway.api.parts import ApiRoute, ApiServices, number_in_query
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.proxy.routes import json_response
from cortex.http.request import Request
from cortex.http.routing import Route, is_in_query, query
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import CortexError, NodeNotFound, shorten
from cortex.wire.node.load_options import ENGINE
from cortex.wire.node.orders import ModelLog
from cortex.wire.node.protocol import ModelStatus

T = TypeVar("T")

_MAX_LINES = 10**15
FOLLOW_S = 1.0
"""How often a stream of logs continues."""
_MAX_PENDING = 10_000
"""Events that a client has not read."""
_TEXT = ((b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-cache"))


class ModelServerRoutes:
    """Asks the nodes that know the model, all at once."""

    def __init__(self, api: ApiServices, event_log: EventLog, *, follow_s: float = FOLLOW_S) -> None:
        self._api = api
        self._follow_s = follow_s
        self._event_log = event_log

    def routes(self) -> list[ApiRoute]:
        return [
            Route("GET", "/fleet/models/{name:.+}/log", self._log),
            Route("DELETE", "/fleet/models/{name:.+}/size", self._forget_size),
            Route("GET", "/logs", self._show_all),
            Route("GET", "/logs/stream", self._stream, has_head=False),
            Route("GET", "/logs/stream/{name:.+}", self._stream, has_head=False),
        ]

    async def _show_all(self, exchange: Exchange) -> Response:
        self._api.authenticate_operator(exchange.request)
        text = "".join((*map(_line, reversed(self._event_log.events)), await self._output(None, {})))
        return Response(200, _TEXT, text.encode())

    def _stream(self, exchange: Exchange, name: str | None = None) -> None:
        """Follow events and output: `proxy` has the events, `upstream` the output of all servers, a model's id that of
        its servers. With `no-history`, from now on."""
        self._api.authenticate_operator(exchange.request)
        model = None if name in (None, "proxy", "upstream") else self._api.dispatcher.resolve(name or "").model_id
        has_history = not is_in_query(exchange.request, "no-history")
        exchange.start(200, _TEXT)
        following = self._follow(exchange, name, model, has_history=has_history)
        task = self._api.tasks.start(following, "follow logs")
        exchange.on_disconnect(task.cancel)

    async def _follow(self, exchange: Exchange, name: str | None, model: str | None, *, has_history: bool) -> None:
        """Until the client disconnects, or its key may no longer see this."""
        seen: dict[tuple[str, str], int] = {}
        pending = deque(map(_line, reversed(self._event_log.events)) if has_history else (), maxlen=_MAX_PENDING)
        unsubscribe = self._event_log.subscribe(lambda event: pending.append(_line(event)))
        try:
            if not has_history and name != "proxy":
                await self._output(model, seen)
            while not exchange.closed:
                self._api.authenticate_operator(exchange.request)
                if exchange.paused:  # it has not read the received lines; nodes keep the rest
                    await asyncio.sleep(self._follow_s)
                    continue
                texts = [] if name == "upstream" or model is not None else [*pending]
                pending.clear()
                if name != "proxy":
                    texts.append(await self._output(model, seen))
                if (text := "".join(texts)) and not exchange.closed:
                    exchange.write(text.encode())
                await asyncio.sleep(self._follow_s)
        except CortexError:
            exchange.finish(keep_alive=False)
        except BaseException:
            if not exchange.closed:
                exchange.finish(keep_alive=False)
            raise
        finally:
            unsubscribe()

    async def _output(self, model: str | None, seen: dict[tuple[str, str], int]) -> str:
        """What the servers of a model, or of all, have written since `seen`, which is updated."""
        places = [
            (self._api.nodes[node.name], each)
            for node in self._api.dispatcher.fleet.nodes
            if node.healthy and node.takes_orders
            for each in node.residencies
            if model in (None, each) and node.residencies[each].status.harness not in (None, ENGINE)
        ]
        calls = (_asked(client.model_log(each, seen.get((client.name, each), 0))) for client, each in places)
        parts = []
        for (client, each), found in zip(places, await asyncio.gather(*calls), strict=True):
            if isinstance(found, ModelLog):
                seen[client.name, each] = found.next
                parts += [f"[{each}] {line}\n" for line in found.lines]
        return "".join(parts)

    async def _log(self, exchange: Exchange, name: str) -> Response:
        """Raises the error of the last node where none has a log."""
        model, clients = self._nodes_of(exchange.request, name)
        after = number_in_query(exchange.request, "after", 0, most=_MAX_LINES)
        found = await asyncio.gather(*(_asked(self._log_of(client, model, after)) for client in clients))
        logs = [(client.name, log) for client, log in zip(clients, found, strict=True) if isinstance(log, ModelLog)]
        if not logs and isinstance(found[-1], CortexError):
            raise found[-1]
        nodes = [{"node": name, "lines": log.lines, "next": log.next} for name, log in logs]
        return json_response({"model": model, "nodes": nodes})

    def _nodes_of(self, request: Request, name: str) -> tuple[str, list[NodeClient]]:
        """The model, and the nodes that an operator's request is about."""
        self._api.authenticate_operator(request)
        model = self._api.dispatcher.resolve(name).model_id
        wanted = query(request, "node")
        fleet = [node for node in self._api.dispatcher.fleet.nodes if node.takes_orders and model in node.residencies]
        clients = [self._api.nodes[node.name] for node in fleet if wanted in (None, node.name)]
        if not clients:
            raise NodeNotFound(f"No node{f' {shorten(wanted)}' if wanted else ''} that loads models has {model}.")
        return model, clients

    async def _forget_size(self, exchange: Exchange, name: str) -> Response:
        """Forget it here and on the nodes. Each node reports the size that it now assumes, or its error."""
        model, clients = self._nodes_of(exchange.request, name)
        found = await asyncio.gather(*(_asked(self._forgotten(client, model)) for client in clients))
        self._api.dispatcher.forget_size(model)
        nodes = [
            {"node": client.name, "estimate_bytes": None, "error": each.message}
            if isinstance(each, CortexError)
            else {"node": client.name, "estimate_bytes": each.estimate_bytes, "error": None}
            for client, each in zip(clients, found, strict=True)
        ]
        return json_response({"model": model, "nodes": nodes})

    async def _forgotten(self, client: NodeClient, model: str) -> ModelStatus:
        await self._api.awaken(client.name)
        return await client.forget_size(model)

    async def _log_of(self, client: NodeClient, model: str, after: int) -> ModelLog:
        self._api.check_awake(client.name)
        return await client.model_log(model, after)


def _line(event: dict[str, Any]) -> str:
    """An event of the fleet as a line of a log."""
    at = datetime.fromtimestamp(event["at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if event["kind"] == "decision":
        return f"{at} {event['outcome']}\n"
    values = " ".join(f"{name}={value}" for name, value in event.items() if name not in ("kind", "at"))
    return f"{at} {event['kind'].replace('_', ' ')} {values}".rstrip() + "\n"


async def _asked(call: Awaitable[T]) -> T | CortexError:
    try:
        return await call
    except CortexError as error:
        return error
