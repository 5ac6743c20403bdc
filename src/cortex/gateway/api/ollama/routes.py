"""Ollama's routes besides inference: version, listings, pull and delete."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from cortex.fleet.catalogue import Alias
from cortex.gateway.api.files import FileRoutes
from cortex.gateway.api.jobs import Job
from cortex.gateway.api.ollama import listing
from cortex.gateway.api.ollama.creation import PREFIX, CreationRoutes, chat_template
from cortex.gateway.api.parts import ApiRoute, ApiServices, listing_key
from cortex.gateway.ledger import keys
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.proxy.admission import resolve_listed
from cortex.gateway.proxy.routes import error_response, json_response
from cortex.http.head import stream_headers
from cortex.http.request import Request
from cortex.http.routing import Route
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.dialects.ollama import lines, models
from cortex.wire.errors import (
    CortexError,
    LoadFailed,
    ModelNotFound,
    NotImplementedHere,
    shorten,
)
from cortex.wire.fields import body as wire_body
from cortex.wire.model_names import split_quant
from cortex.wire.preset import Preset

POLL_S = 0.25


class OllamaRoutes:
    """Owns one task per pull that a client follows."""

    def __init__(
        self,
        api: ApiServices,
        files: FileRoutes,
        open_paths: Sequence[bytes],
        creations: CreationRoutes,
    ) -> None:
        """`open_paths` need no key."""
        self._creations = creations
        self._open_paths = open_paths
        self._api = api
        self._files = files
        self._created = time.time()

    def routes(self) -> list[ApiRoute]:
        return [
            *(Route("GET", f"{PREFIX}{name}", partial(self._list, name=name)) for name in ("version", "tags", "ps")),
            Route("POST", f"{PREFIX}show", self._show),
            Route("POST", f"{PREFIX}pull", self._pull),
            Route("DELETE", f"{PREFIX}delete", self._delete),
            *(Route("", path, partial(_reject, path)) for path in (f"{PREFIX}{name}" for name in models.ABSENT)),
        ]

    def _key(self, request: Request) -> KeySection | None:
        return listing_key(self._api.metering.meter, request, self._open_paths)

    def _list(self, exchange: Exchange, name: str) -> Response:
        return json_response(self._listing(name, self._key(exchange.request)))

    def _listing(self, name: str, key: KeySection | None) -> dict[str, Any]:
        if name == "version":
            return {"version": models.VERSION}
        fleet, now = self._api.dispatcher.fleet, self._api.dispatcher.now
        found = listing.listed(fleet, self._created, now, partial(keys.may_use, key))
        return models.tags(found) if name == "tags" else models.loaded(found)

    async def _show(self, exchange: Exchange) -> Response:
        name = models.read_name(exchange.request.body)
        resolution = resolve_listed(self._api.dispatcher, self._key(exchange.request), name, "/api/tags")
        spec = resolution.spec
        files = listing.files_of(self._api.dispatcher.fleet, spec)
        template = spec.chat_template or await chat_template(self._api.dispatcher.fleet, self._api.nodes, files)
        described = listing.described(self._api.dispatcher.fleet, spec, self._created, self._api.dispatcher.now, name)
        alias = self._api.dispatcher.catalogue.aliases.get(resolution.alias or "")
        license = alias.license if isinstance(alias, Alias) else None
        described = dataclasses.replace(
            described,
            template=template,
            source=spec.id if resolution.alias is not None else spec.source or "",
            preset=resolution.preset or Preset(),
            license=license or spec.license or "",
        )
        return json_response(models.show(described))

    async def _delete(self, exchange: Exchange) -> Response:
        """Deletes a model's files, or only the quantisation in its name, from every node that has them."""
        self._api.authenticate_operator(exchange.request)
        name = models.read_name(exchange.request.body)
        if await self._creations.delete(name):
            return Response(200, (), b"")
        resolution = self._api.dispatcher.resolve(name)
        if resolution.alias is not None:
            raise ModelNotFound(
                f"{shorten(name)} is an alias: delete {resolution.model_id}, if that is what you mean.", param="model"
            )
        quant = None if name == resolution.model_id else split_quant(name)[1]
        nodes = [
            node.name
            for node in self._api.dispatcher.fleet.nodes
            if (held := node.residencies.get(resolution.model_id)) is not None and held.status.disk_bytes
        ]
        if not nodes:
            raise ModelNotFound(f"No node has files of {shorten(name)} in its cache.", param="model")
        absent: list[ModelNotFound] = []
        for node in nodes:
            try:
                await self._files.delete(node, resolution.model_id, quant)
            except ModelNotFound as error:  # it has another quantisation
                absent.append(error)
        if len(absent) == len(nodes):
            raise absent[0]
        return Response(200, (), b"")

    def _pull(self, exchange: Exchange) -> None:
        by = self._api.authenticate_operator(exchange.request)
        name = models.read_name(exchange.request.body)
        fields = wire_body.parse(exchange.request.body)
        job = self._files.pull(name, by)
        is_whole = fields.flag("stream") is False
        following = _wait_for(exchange, job) if is_whole else _follow(exchange, job, models.digest(name, None))
        self._api.tasks.start(following, f"follow {job.id}")


async def _wait_for(exchange: Exchange, job: Job) -> None:
    ended = asyncio.Event()
    job.on_end(ended.set)
    await ended.wait()
    error = _error(job)
    response = json_response({"status": "success"}) if error is None else error_response(error, lines.OLLAMA)
    exchange.respond(*response)


async def _follow(exchange: Exchange, job: Job, digest: str) -> None:
    """Sends the progress of a job, line by line, to its end. The job continues if the client disconnects."""
    ended = asyncio.Event()
    job.on_end(ended.set)
    exchange.start(200, stream_headers(lines.CONTENT_TYPE))
    shown: dict[str, Any] = {}
    while not ended.is_set() and not exchange.closed:
        line = models.pull_progress(digest, job.read_stage()[1])
        if line != shown and not exchange.paused:
            shown = line
            exchange.write(msgspec.json.encode(line) + b"\n")
        try:
            async with asyncio.timeout(POLL_S):
                await ended.wait()
        except TimeoutError:
            pass
    if not exchange.closed:
        exchange.write(models.pull_end(_error(job)))
        exchange.finish()


def _error(job: Job) -> CortexError | None:
    if job.state == "done":
        return None
    return job.error or LoadFailed(f"The download was {job.state}.")


def _reject(path: str, _: Exchange) -> Response | None:
    raise NotImplementedHere(models.absence(path))
