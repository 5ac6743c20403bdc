"""Ollama's routes besides inference: version, listings, pull, create, copy and delete."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from cortex.fleet.catalogue import Alias, ModelSpec, Resolution
from cortex.gateway.api.files import FileRoutes
from cortex.gateway.api.jobs import Job
from cortex.gateway.api.ollama import listing
from cortex.gateway.api.parts import ApiRoute, DeferredResponses, listing_key
from cortex.gateway.created_models import CreatedModels
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.dispatch.view import DispatchView
from cortex.gateway.ledger import keys
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.proxy.admission import resolve_listed
from cortex.gateway.proxy.routes import error_response, json_response
from cortex.http.head import stream_headers
from cortex.http.request import Request
from cortex.http.routing import Route, path_of
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.http.upstream.faults import UpstreamFault
from cortex.wire.dialects.ollama import lines, modelfile, models
from cortex.wire.errors import (
    CortexError,
    Family,
    InvalidValue,
    LoadFailed,
    ModelNotFound,
    NotImplementedHere,
    shorten,
)
from cortex.wire.fields import body as wire_body
from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.model_names import check_name, plain_name, split_quant
from cortex.wire.node.load_options import is_path
from cortex.wire.node.orders import FilesRequest
from cortex.wire.preset import Preset

log = logging.getLogger(__name__)

Change = Callable[[str, ModelSpec | Alias | None], Awaitable[None]]

PREFIX = "/api/"
POLL_S = 0.25


class OllamaRoutes:
    """Owns one task per pull that a client follows."""

    def __init__(
        self,
        dispatcher: DispatchView,
        nodes: Mapping[str, NodeClient],
        files: FileRoutes,
        metering: Metering,
        deferred: DeferredResponses,
        open_paths: Sequence[bytes],
        created: CreatedModels,
        change: Change,
    ) -> None:
        """`open_paths` need no key. `change` makes an entry of the catalogue, or removes one, and puts it in force."""
        self._created_models = created
        self._change = change
        self._open_paths = open_paths
        self._dispatcher = dispatcher
        self._nodes = nodes
        self._files = files
        self._metering = metering
        self._deferred = deferred
        self._created = time.time()
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> list[ApiRoute]:
        return [
            *(Route("GET", f"{PREFIX}{name}", partial(self._list, name=name)) for name in ("version", "tags", "ps")),
            Route("POST", f"{PREFIX}show", self._show_model),
            Route("POST", f"{PREFIX}pull", self._begin_pull),
            Route("DELETE", f"{PREFIX}delete", self._begin_delete),
            Route("POST", f"{PREFIX}create", self._begin_create),
            Route("POST", f"{PREFIX}copy", self._begin_copy),
            *(Route("", f"{PREFIX}{name}", _reject) for name in models.ABSENT),
            Route("", models.BLOBS, _reject),
        ]

    def _key(self, request: Request) -> KeySection | None:
        return listing_key(self._metering.meter, request, self._open_paths)

    def _list(self, exchange: Exchange, name: str) -> Response:
        return json_response(self._listing(name, self._key(exchange.request)))

    def _show_model(self, exchange: Exchange) -> None:
        name = models.read_name(exchange.request.body)
        resolution = resolve_listed(self._dispatcher, self._key(exchange.request), name, "/api/tags")
        self._deferred.respond(exchange, self._show(resolution, name))

    def _begin_pull(self, exchange: Exchange) -> None:
        self._pull(exchange, self._metering.meter.authenticate_operator(exchange.request))

    def _begin_delete(self, exchange: Exchange) -> None:
        self._metering.meter.authenticate_operator(exchange.request)
        self._deferred.respond(exchange, self._delete(models.read_name(exchange.request.body)))

    async def close(self) -> None:
        """Stop following; nodes finish their downloads without us."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listing(self, name: str, key: KeySection | None) -> dict[str, Any]:
        if name == "version":
            return {"version": models.VERSION}
        fleet, now = self._dispatcher.fleet, self._dispatcher.now
        found = listing.listed(fleet, self._created, now, partial(keys.may_use, key))
        return models.tags(found) if name == "tags" else models.loaded(found)

    async def _show(self, resolution: Resolution, name: str) -> Response:
        spec = resolution.spec
        template = await self._template(spec.id)
        described = listing.described(self._dispatcher.fleet, spec, self._created, self._dispatcher.now, name)
        alias = self._dispatcher.catalogue.aliases.get(resolution.alias or "")
        license = alias.license if isinstance(alias, Alias) else None
        described = dataclasses.replace(
            described,
            template=template,
            source=spec.id if resolution.alias is not None else spec.source or "",
            preset=resolution.preset or Preset(),
            license=license or spec.license or "",
        )
        return json_response(models.show(described))

    def _begin_create(self, exchange: Exchange) -> None:
        self._metering.meter.authenticate_operator(exchange.request)
        creation = modelfile.read_creation(exchange.request.body)
        streams = wire_body.parse(exchange.request.body).flag("stream") is not False
        self._deferred.respond(exchange, self._create(creation, streams=streams))

    def _begin_copy(self, exchange: Exchange) -> None:
        self._metering.meter.authenticate_operator(exchange.request)
        fields = wire_body.parse(exchange.request.body)
        source, name = (plain_name(fields.text(key) or "") for key in ("source", "destination"))
        if not source or not name or len(name) > MAX_MODEL_NAME:
            raise InvalidValue("Give 'source' and 'destination', the names of a model and of its copy.")
        check_name(name, "destination")
        self._dispatcher.resolve(source)
        self._deferred.respond(exchange, self._copy(modelfile.Creation(name=name, source=source)))

    async def _copy(self, creation: modelfile.Creation) -> Response:
        await self._make(creation)
        return Response(200, (), b"")

    async def _create(self, creation: modelfile.Creation, *, streams: bool) -> Response:
        chosen = await self._make(creation)
        statuses = [*creation.notes, f"using {chosen}", "success"]
        if not streams:
            return json_response({"status": "success", "using": chosen, "notes": creation.notes})
        body = b"".join(msgspec.json.encode({"status": status}) + b"\n" for status in statuses)
        return Response(200, stream_headers(lines.CONTENT_TYPE), body)

    async def _make(self, creation: modelfile.Creation) -> str:
        """Make an entry of the catalogue; returns what its source stands for."""
        name, catalogue = creation.name, self._dispatcher.catalogue
        if not {*"*?["}.isdisjoint(name):
            raise InvalidValue(f"{shorten(name)} is a pattern; give a name without *, ? and [.", param="model")
        own = self._created_models.read()
        is_configured = name in (*catalogue.ids, *catalogue.aliases) and name not in (*own.ids, *own.aliases)
        if is_configured or (name in self._dispatcher.fleet.live_models() and name not in own.ids):
            raise InvalidValue(f"There is a model {shorten(name)} already; choose another name.", param="model")
        base, context_tokens = None, None
        if not is_path(creation.source):
            try:
                base = self._dispatcher.resolve(creation.source)
            except ModelNotFound:
                pass
            else:
                described = listing.described(self._dispatcher.fleet, base.spec, 0.0, self._dispatcher.now)
                named = None if described.is_loaded else base.spec.context_tokens
                context_tokens = min(filter(None, (described.context_tokens, named)), default=None)
                await self._check_template(creation, base.model_id)
        is_absent = base is None and not is_path(creation.source)
        files = self._files.source_of(plain_name(creation.source)) if is_absent else None
        if creation.template and base is None:
            raise InvalidValue(
                f"No node has {shorten(creation.source)}, so TEMPLATE cannot be compared with that of its files, which "
                "is used: pull it first, or leave the template out.",
                param="template",
            )
        entry = created_entry(creation, base, files, context_tokens)
        await self._change(name, entry)
        return entry.model if isinstance(entry, Alias) else entry.source or entry.id

    async def _check_template(self, creation: modelfile.Creation, model: str) -> None:
        """Raises InvalidValue for a template of another shape than that of the model's files, which is used."""
        if not creation.template:
            return
        markers = modelfile.foreign_markers(creation.template, await self._template(model))
        if markers is None or markers:
            what = f"writes {', '.join(markers)}, which it does not" if markers else "marks no turns"
            raise InvalidValue(
                f"{model} is prompted with the template of its files, and this TEMPLATE {what}: leave it out.",
                param="template",
            )

    async def _template(self, model: str) -> str:
        """The chat template, from the first node that knows it; empty where none does: only a server knows it, or the
        files are not there."""
        for node in self._dispatcher.fleet.listing(model):
            if node.healthy and node.takes_orders:
                try:
                    return await self._nodes[node.name].chat_template(model)
                except (UpstreamFault, CortexError) as problem:
                    log.debug("%s has no chat template of %s: %s", node.name, model, problem)
        return ""

    async def _delete(self, name: str) -> Response:
        """Deletes the files of a model, or the quantisation that `name` has, from every node that has them."""
        created = self._created_models.read()
        if name in created.ids or name in created.aliases:  # files that it shares with others stay
            await self._change(name, None)
            return Response(200, (), b"")
        resolution = self._dispatcher.resolve(name)
        if resolution.alias is not None:
            raise ModelNotFound(
                f"{shorten(name)} is an alias: delete {resolution.model_id}, if that is what you mean.", param="model"
            )
        quant = None if name == resolution.model_id else split_quant(name)[1]
        nodes = [
            node.name
            for node in self._dispatcher.fleet.nodes
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

    def _pull(self, exchange: Exchange, by: str) -> None:
        name = models.read_name(exchange.request.body)
        fields = wire_body.parse(exchange.request.body)
        job = self._files.pull(name, by)
        is_whole = fields.flag("stream") is False
        following = _wait_for(exchange, job) if is_whole else _follow(exchange, job, models.digest(name, None))
        task = asyncio.create_task(following, name=f"follow {job.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def created_entry(
    creation: modelfile.Creation, base: Resolution | None, files: FilesRequest | None, context_tokens: int | None
) -> ModelSpec | Alias:
    """The entry of the catalogue: another name for a model that is here, or a model of its own where it is not, or is
    loaded in another way. `base`: the model that is here, with `context_tokens`. `files`: those of the hub."""
    preset = creation.preset if base is None or base.preset is None else creation.preset.over(base.preset)
    wanted = creation.context_tokens
    is_longer = wanted is not None and (context_tokens is None or wanted > context_tokens)
    is_itself = base is not None and base.model_id == creation.name
    if base is not None and not creation.quant and not is_longer and not is_itself:
        fields = {name: getattr(preset, name) for name in Preset.__struct_fields__}
        return Alias(model=base.model_id, license=creation.license, **fields)
    options: dict[str, Any] = {"source": creation.source}
    if files is not None:
        options = {"source": files.source or files.model_id, "quant": files.quant}
    elif base is not None:
        options = base.spec.shared_with(ModelSpec.__struct_fields__)
        options["source"] = base.spec.source or base.model_id
    options |= {"quant": creation.quant} if creation.quant else {}
    options |= {"context_tokens": wanted} if wanted is not None else {}
    return ModelSpec(id=creation.name, preset=preset, license=creation.license, **options)


async def _wait_for(exchange: Exchange, job: Job) -> None:
    ended = asyncio.Event()
    job.on_end(ended.set)
    await ended.wait()
    error = _error(job)
    response = json_response({"status": "success"}) if error is None else error_response(error, Family.OLLAMA)
    exchange.respond(*response)


async def _follow(exchange: Exchange, job: Job, digest: str) -> None:
    """Sends the progress of a job, line by line, to its end. The job goes on if the client disconnects."""
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


def _reject(exchange: Exchange, digest: str = "") -> Response | None:  # noqa: ARG001 - the path has it
    raise NotImplementedHere(models.absence(path_of(exchange.request)))
