"""The node's own routes: discovery, health, models, and loading and unloading them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

import cortex
from cortex.build import build_information, version_of
from cortex.neuron.api import responses
from cortex.neuron.api.access import NodeAccess
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.bodies import body_of
from cortex.neuron.api.connections.peers import SHARES_PATH, accepted
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.stream import EventStream
from cortex.wire import sse
from cortex.wire.errors import InvalidValue, MalformedJSON, RouteNotFound, shorten
from cortex.wire.node.protocol import (
    Endpoint,
    FilesRequest,
    LoadRequest,
    ModelList,
    ModelState,
    Recycled,
    UnloadRequest,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Control:
    """Reads return what the node knows; none of them waits for a device."""

    backend: Backend
    drain_gate: DrainGate
    access: NodeAccess
    keepalive_s: float

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.about),
            web.get("/discovery", self.discovery),
            web.get("/health", self.health),
            web.get("/version", self.version),
            web.get("/events", self.events),
            web.get("/models", self.models),
            web.post("/models/load", self.load),
            web.post("/models/unload", self.unload),
            web.post(r"/devices/{index:\d{1,4}}/recycle", self.recycle),
            web.get(SHARES_PATH, self.share),
            web.post("/files/pull", self.pull),
            web.get("/files/pulls/{id:.+}", self.pull_status),
            web.post("/files/cancel", self.cancel_pull),
            web.post("/files/delete", self.delete_files),
            web.get("/hub/{source:.+}", self.offer),
            web.get("/models/{id:.+}/endpoint", self.endpoint),
            web.get("/models/{id:.+}", self.model),
        ]

    async def about(self, _: web.Request) -> web.Response:
        return responses.json(
            {
                "name": "neuron",
                "version": cortex.__version__,
                "about": "One node of a cortex fleet: inference at /v1, the node itself at /discovery and /health.",
            }
        )

    async def discovery(self, _: web.Request) -> web.Response:
        return responses.json(self.backend.discovery)

    async def health(self, request: web.Request) -> web.Response:
        """For a caller without a key, only the status: it is what load balancers and containers check."""
        health = self.backend.health()
        if self.drain_gate.closed:
            health = msgspec.structs.replace(health, status="draining")
        if not self.access.admits(request):
            return responses.json({"status": health.status})
        return responses.json(health)

    async def version(self, _: web.Request) -> web.Response:
        discovery = self.backend.discovery
        engine = {"torch": version_of("torch"), "driver": discovery.driver, "cuda_version": discovery.cuda_version}
        return responses.json({"name": "neuron", **build_information(), **engine})

    async def models(self, _: web.Request) -> web.Response:
        return responses.json(ModelList(models=self.backend.models()))

    async def model(self, request: web.Request) -> web.Response:
        return responses.json(self.backend.model(request.match_info["id"]))

    async def endpoint(self, request: web.Request) -> web.Response:
        """Every model is served at its node's URL, with the host name that the client used."""
        model = self.backend.model(request.match_info["id"])
        dialects = self.backend.discovery.dialects
        base_url = f"{request.scheme}://{request.host}/v1"
        return responses.json(Endpoint(model_id=model.id, base_url=base_url, dialects=dialects))

    async def load(self, request: web.Request) -> web.Response:
        """Responds when the model is ready. With `?wait=false`, responds at once: 202 while the model loads."""
        load_request = _decode(await body_of(request), LoadRequest)
        wait = _flag(request, "wait", default=True)
        with self.drain_gate.enter():
            status = await self.drain_gate.wait_for(self.backend.load(load_request, wait=wait))
        return responses.json(status, status=200 if status.state is ModelState.READY else 202)

    async def share(self, request: web.Request) -> web.StreamResponse:
        """A node that leads a model has this one hold a part of it, for as long as its connection lasts."""
        with self.drain_gate.enter():  # rejects it while the node shuts down
            pass
        connection = await accepted(request)
        await self.backend.host_share(connection)
        return connection.response

    async def unload(self, request: web.Request) -> web.Response:
        unload_request = _decode(await body_of(request), UnloadRequest)
        return responses.json(await self.backend.unload(unload_request))

    async def pull(self, request: web.Request) -> web.Response:
        """Starts a download and responds at once; `/files/pulls/{model}` and `/health` show its progress."""
        files_request = _decode(await body_of(request), FilesRequest)
        with self.drain_gate.enter():
            return responses.json(self.backend.files.pull(files_request), status=202)

    async def pull_status(self, request: web.Request) -> web.Response:
        return responses.json(self.backend.files.pull_status(request.match_info["id"]))

    async def cancel_pull(self, request: web.Request) -> web.Response:
        files_request = _decode(await body_of(request), FilesRequest)
        return responses.json(await self.backend.files.cancel(files_request.model_id))

    async def delete_files(self, request: web.Request) -> web.Response:
        """Deletes a model's files from the cache, never while the model is in memory."""
        return responses.json(await self.backend.files.delete(_decode(await body_of(request), FilesRequest)))

    async def offer(self, request: web.Request) -> web.Response:
        """What a repository of the hub offers: its quantisations and their sizes. Nothing is downloaded."""
        return responses.json(await self.backend.files.offer(request.match_info["source"]))

    async def recycle(self, request: web.Request) -> web.Response:
        """Replaces the worker of a device without models. The gateway asks for it after many loads."""
        index = int(request.match_info["index"])
        devices = [device.index for device in self.backend.discovery.devices]
        if index not in devices:
            raise RouteNotFound(
                f"This node has no device {shorten(str(index))}; it has {', '.join(map(str, devices)) or 'none'}."
            )
        with self.drain_gate.enter():
            recycled = await self.backend.recycle(index)
        return responses.json(Recycled(device=index, recycled=recycled))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """A stream of changes; ends when the node shuts down."""
        changes = self.backend.subscribe()
        async with EventStream(request, keepalive=sse.COMMENT, keepalive_s=self.keepalive_s, headers={}) as stream:
            await stream.write(sse.COMMENT)
            async for change in changes:
                await stream.write(sse.frame(msgspec.json.encode(change), change.kind))
        await stream.response.write_eof()
        return stream.response


def _flag(request: web.Request, name: str, *, default: bool) -> bool:
    value = request.query.get(name)
    if value is None:
        return default
    if value not in ("true", "false", "1", "0"):
        raise InvalidValue(f"Invalid value for '{name}': use true or false.", param=name)
    return value in ("true", "1")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as problem:
        raise InvalidValue(f"Invalid body: {shorten(str(problem))}.", param=_field(problem)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise MalformedJSON(
            f"The body is not valid JSON: {shorten(str(problem))}. Send one JSON object in UTF-8."
        ) from None


def _field(problem: msgspec.ValidationError) -> str | None:
    """The field that the message names: `$.model_id` is `model_id`."""
    _, found, path = str(problem).rpartition("`$.")
    return path.rstrip("`") if found else None
