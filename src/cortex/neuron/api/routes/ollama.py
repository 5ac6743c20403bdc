"""Ollama's routes besides chat and generate: listings, files and embeddings."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from cortex.foreign.embeddings import OllamaEmbeddings
from cortex.http.request import Request
from cortex.http.routing import spooled
from cortex.http.server.server import Response
from cortex.http.ticker import Ticker
from cortex.neuron.api import responses
from cortex.neuron.api.bodies import client_of
from cortex.neuron.api.calls import ApiCall, Route
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.stream import EventStream
from cortex.neuron.node.node import Node
from cortex.parsing.parser import BodyParser
from cortex.wire.dialects.ollama import embeddings, lines, models
from cortex.wire.error_encoding import from_code
from cortex.wire.errors import CortexError, LoadFailed, ModelNotFound, NotImplementedHere
from cortex.wire.fields import body as wire_body
from cortex.wire.model_names import split_quant
from cortex.wire.node.orders import FilesRequest
from cortex.wire.node.protocol import ModelStatus, PullStatus

POLL_S = 0.25

Serve = Callable[[ApiCall], Awaitable[Response | None]]


@dataclass(frozen=True, slots=True)
class OllamaRoutes:
    """Reads return what the node knows; none of them waits for a device."""

    backend: Node
    drain_gate: DrainGate
    ticker: Ticker
    keepalive_s: float
    parser: BodyParser
    serve: Serve
    """Serves a call by its path."""
    created: float = field(default_factory=time.time)

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/api/version", self.version),
            Route("GET", "/api/tags", self.tags),
            Route("GET", "/api/ps", self.loaded),
            Route("POST", "/api/show", self.show),
            Route("POST", "/api/pull", self.pull),
            Route("DELETE", "/api/delete", self.delete),
            *(Route("POST", path, partial(self.embed, path=path)) for path in (embeddings.PATH, embeddings.OLD_PATH)),
            *(
                Route("POST", path, partial(self.absent, path=path))
                for path in (f"/api/{name}" for name in (*models.CREATING, *models.ABSENT))
            ),
            *(Route("GET", path, self.find_upload) for path in models.BLOBS),
            *(Route("POST", path, self.upload, spooled) for path in models.BLOBS),
        ]

    async def version(self, _: ApiCall) -> Response:
        return responses.json({"version": models.VERSION})

    async def tags(self, _: ApiCall) -> Response:
        return responses.json(models.tags(self._models()))

    async def loaded(self, _: ApiCall) -> Response:
        return responses.json(models.loaded(self._models()))

    async def show(self, call: ApiCall) -> Response:
        status = self.backend.model(models.read_name(call.request.body))
        try:
            template = (await self.backend.texts.text(status.id)).template.source
        except CortexError:  # only a server knows it, or its files are not there
            template = ""
        return responses.json(models.show(dataclasses.replace(self._described(status), template=template)))

    async def absent(self, _: ApiCall, path: str) -> Response:
        raise NotImplementedHere(models.absence(path))

    async def find_upload(self, call: ApiCall) -> Response:
        if not await self.backend.files.has_upload(call.values["digest"]):
            raise ModelNotFound("This node has no such upload.")
        return Response(200, (), b"")

    async def upload(self, call: ApiCall) -> Response:
        """Keeps a file for a model that a gateway makes of it."""
        with self.drain_gate.enter():
            await self.backend.files.upload(call.values["digest"], call.request.upload or call.request.body)
        return Response(201, (), b"")

    async def delete(self, call: ApiCall) -> Response:
        name = models.read_name(call.request.body)
        model, quant = split_quant(name)
        self.backend.model(model)  # raises ModelNotFound
        await self.backend.files.delete(FilesRequest(model_id=model, quant=quant))
        return Response(200, (), b"")

    async def pull(self, call: ApiCall) -> Response | None:
        """Starts a download, or joins one, and follows it to its end. It continues if the client disconnects."""
        model, quant = split_quant(models.read_name(call.request.body))
        fields = wire_body.parse(call.request.body)
        digest = models.digest(model, quant)
        with self.drain_gate.enter():
            status = self.backend.files.pull(FilesRequest(model_id=model, quant=quant))
            if fields.flag("stream") is False:
                _check(await self._ended(model, status))
                return responses.json({"status": "success"})
            stream = EventStream(
                call.exchange,
                self.ticker,
                keepalive=lines.KEEPALIVE,
                keepalive_s=self.keepalive_s,
                content_type=lines.CONTENT_TYPE,
            )
            async with stream:
                shown: dict[str, Any] = {}
                while status.state == "running":
                    if (line := models.pull_progress(digest, status.progress)) != shown:
                        shown = line
                        await stream.write(msgspec.json.encode(line) + b"\n")
                    await asyncio.sleep(POLL_S)
                    status = self.backend.files.pull_status(model)
                await stream.write(models.pull_end(_error(status)))
        return None

    async def embed(self, call: ApiCall, path: str) -> Response | None:
        began_s = time.monotonic()
        request = call.request
        body = await self.parser.run(embeddings.embed_request, None, body=request.body, client=client_of(request))
        inner = ApiCall(call.exchange, {})
        inner.translate = lambda model: OllamaEmbeddings(path, model, began_s, inner.load_s)
        headers = (*(header for header in request.headers if header[0] != b"content-type"), *responses.JSON)
        inner.request = Request(
            b"POST", embeddings.TARGET.encode(), b"", headers, body, request.client, request.keeps_alive
        )
        response = await self.serve(inner)
        if response is None or response.status != 200:
            return response
        total_s = time.monotonic() - began_s
        written, _ = embeddings.response_body(response.body, path, load_s=inner.load_s, total_s=total_s)
        return Response(200, response.headers, written)

    async def _ended(self, model: str, status: PullStatus) -> PullStatus:
        while status.state == "running":
            await asyncio.sleep(POLL_S)
            status = self.backend.files.pull_status(model)
        return status

    def _models(self) -> list[models.OllamaModel]:
        return [self._described(status) for status in self.backend.models()]

    def _described(self, status: ModelStatus) -> models.OllamaModel:
        is_on_cpu = self.backend.discovery.devices[0].kind == "cpu"
        return models.from_status(status, self.created, vram_bytes=0 if is_on_cpu else None)


def _error(status: PullStatus) -> LoadFailed | None:
    if status.state == "done":
        return None
    error = from_code(status.code or LoadFailed.code, status.reason or f"The download was {status.state}.")
    return error if isinstance(error, LoadFailed) else LoadFailed(error.message)


def _check(status: PullStatus) -> None:
    if (error := _error(status)) is not None:
        raise error
