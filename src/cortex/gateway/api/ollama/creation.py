"""Ollama's routes that make models: `/api/create`, `/api/copy`, and the files that a model may be made of
(`/api/blobs/…`). For operators. What is made is an entry of the catalogue; files go to a node."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from cortex.fleet.catalogue import Alias, Catalogue, ModelSpec, Resolution
from cortex.fleet.topology import Fleet
from cortex.gateway.api.files import FileRoutes
from cortex.gateway.api.ollama import listing
from cortex.gateway.api.parts import ApiRoute, ApiServices
from cortex.gateway.created_models import CreatedModels
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.proxy.routes import json_response
from cortex.http.head import stream_headers
from cortex.http.routing import Route, spooled
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.dialects.ollama import lines, modelfile, models
from cortex.wire.dialects.ollama.go_template import SUPPORTED, TemplateProblem, to_jinja
from cortex.wire.errors import CortexError, InvalidValue, ModelNotFound, UpstreamUnavailable, shorten
from cortex.wire.fields import body as wire_body
from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.model_names import UPLOADED, check_name, is_uploaded, plain_name
from cortex.wire.node.load_options import ENGINE, is_path
from cortex.wire.node.orders import AssembleRequest, FilesRequest
from cortex.wire.preset import Preset

log = logging.getLogger(__name__)

Change = Callable[[str, ModelSpec | Alias | None], Awaitable[None]]

PREFIX = "/api/"


class CreationRoutes:
    """Remembers only the node that gets the next upload."""

    def __init__(
        self,
        api: ApiServices,
        files: FileRoutes,
        created: CreatedModels,
        change: Change,
    ) -> None:
        """`change` adds or removes an entry of the catalogue and puts that in force."""
        self._api = api
        self._files = files
        self._created_models = created
        self._change = change
        self._upload_node = ""

    def routes(self) -> list[ApiRoute]:
        return [
            Route("POST", f"{PREFIX}create", self._create),
            Route("POST", f"{PREFIX}copy", self._copy),
            *(Route("GET", path, self._find_upload) for path in models.BLOBS),
            *(Route("POST", path, self._upload, spooled) for path in models.BLOBS),
            Route("GET", "/fleet/created", self._show_created),
            Route("DELETE", "/fleet/created/{name:.+}", self._delete),
        ]

    async def delete(self, name: str) -> bool:
        """Remove a created model and the files that were uploaded for it alone; models made from it stay. False if no
        created model has this name."""
        created = self._created_models.read()
        if name not in created.ids and name not in created.aliases:
            return False
        spec = next((each for each in created.models if each.id == name), None)
        heirs = [alias for alias, target in created.alias_targets.items() if target == name]
        if spec is not None and heirs:
            await self._change(heirs[0], _renamed(created, spec, heirs[0]))
            for alias in heirs[1:]:
                entry = created.aliases[alias]
                assert isinstance(entry, Alias)
                await self._change(alias, msgspec.structs.replace(entry, model=heirs[0]))
        elif spec is not None:
            await self._delete_uploads(spec, created)
        await self._change(name, None)
        return True

    def _show_created(self, exchange: Exchange) -> Response:
        self._api.authenticate_operator(exchange.request)
        created = self._created_models.read()
        return json_response({"models": sorted((*created.ids, *created.aliases))})

    async def _delete(self, exchange: Exchange, name: str) -> Response:
        self._api.authenticate_operator(exchange.request)
        if not await self.delete(name):
            raise ModelNotFound(f"No model {shorten(name)} was created here.", param="model")
        return json_response({"model": name})

    async def _find_upload(self, exchange: Exchange, digest: str) -> Response:
        self._api.authenticate_operator(exchange.request)
        found = await self._node_with([digest])
        if found is None or self._upload_node not in ("", found.name):  # a model's files are on one node
            raise ModelNotFound("The node that takes uploads does not have this one.")
        self._upload_node = found.name
        return Response(200, (), b"")

    async def _upload(self, exchange: Exchange, digest: str) -> Response:
        """Store a file on a node: all files of a model on the same one."""
        self._api.authenticate_operator(exchange.request)
        node = self._api.dispatcher.fleet.node(self._upload_node)
        if node is None or not (node.healthy and node.takes_orders):
            self._upload_node = self._files.roomiest_node()
        client = self._api.nodes[self._upload_node]
        await self._api.awaken(client.name)
        try:
            await client.upload(digest, exchange.request.upload or exchange.request.body)
        except CortexError:  # its disk may be full
            self._upload_node = ""
            raise
        return Response(201, (), b"")

    async def _node_with(self, digests: list[str]) -> NodeClient | None:
        """The node that has all these uploads, if there is one."""
        places = [node.name for node in self._api.dispatcher.fleet.nodes if node.healthy and node.takes_orders]
        for name in sorted(places, key=lambda place: place != self._upload_node):
            try:
                if all([await self._api.nodes[name].has_upload(digest) for digest in digests]):
                    return self._api.nodes[name]
            except UpstreamUnavailable as fault:
                log.debug("%s cannot list its uploads: %s", name, fault)
        return None

    async def _copy(self, exchange: Exchange) -> Response:
        self._api.authenticate_operator(exchange.request)
        fields = wire_body.parse(exchange.request.body)
        source, name = (plain_name(fields.text(key) or "") for key in ("source", "destination"))
        if not source or not name or len(name) > MAX_MODEL_NAME:
            raise InvalidValue("Give 'source' and 'destination', the names of a model and of its copy.")
        check_name(name, "destination")
        self._api.dispatcher.resolve(source)
        await self._make(modelfile.Creation(name=name, source=source))
        return Response(200, (), b"")

    async def _create(self, exchange: Exchange) -> Response:
        self._api.authenticate_operator(exchange.request)
        creation = modelfile.read_creation(exchange.request.body)
        streams = wire_body.parse(exchange.request.body).flag("stream") is not False
        chosen = await self._make(creation)
        statuses = [*creation.notes, f"using {chosen}", "success"]
        if not streams:
            return json_response({"status": "success", "using": chosen, "notes": creation.notes})
        body = b"".join(msgspec.json.encode({"status": status}) + b"\n" for status in statuses)
        return Response(200, stream_headers(lines.CONTENT_TYPE), body)

    async def _make(self, creation: modelfile.Creation) -> str:
        """Make an entry of the catalogue; returns what its source stands for."""
        created = self._created_models.read()
        self._check_is_free(creation.name, created)
        entry = await self._entry_of_files(creation) if creation.files else await self._entry_of_source(creation)
        await self._change(creation.name, entry)
        before = next((each for each in created.models if each.id == creation.name), None)
        if before is not None and not (isinstance(entry, ModelSpec) and entry.source == before.source):
            with suppress(CortexError):  # it is still in memory
                await self._delete_uploads(before, created)
        return entry.model if isinstance(entry, Alias) else entry.source or entry.id

    def _check_is_free(self, name: str, created: Catalogue) -> None:
        """Raises InvalidValue for a name that is a pattern, or that of a model which was not created."""
        if not {*"*?["}.isdisjoint(name):
            raise InvalidValue(f"{shorten(name)} is a pattern; give a name without *, ? and [.", param="model")
        catalogue = self._api.dispatcher.catalogue
        is_configured = name in (*catalogue.ids, *catalogue.aliases) and name not in (*created.ids, *created.aliases)
        if is_configured or (name in self._api.dispatcher.fleet.live_models() and name not in created.ids):
            raise InvalidValue(f"There is a model {shorten(name)} already; choose another name.", param="model")

    async def _entry_of_files(self, creation: modelfile.Creation) -> ModelSpec:
        """A model of uploaded files, which a node makes a repository of."""
        client = await self._node_with(list(creation.files.values()))
        if client is None:
            raise InvalidValue("No node has all these files: send each to /api/blobs/sha256:… first.", param="files")
        repository = _repository_for(creation)
        await client.assemble(AssembleRequest(repository=repository, files=creation.files))
        template = await self._template_of_files(creation, client, repository)
        files = FilesRequest(model_id=repository, source=repository)
        entry = created_entry(creation, None, files, None, template)
        assert isinstance(entry, ModelSpec)
        return entry if self._files.are_shared else msgspec.structs.replace(entry, only_on=(client.name,))

    async def _template_of_files(self, creation: modelfile.Creation, client: NodeClient, repository: str) -> str | None:
        """As `_converted`. Deletes the files and raises InvalidValue if TEMPLATE cannot be converted."""
        if not creation.template:
            return None
        try:
            return _converted(creation.template, await client.chat_template(repository))
        except CortexError:
            if not any(each.source == repository for each in self._created_models.read().models):
                await client.delete_files(FilesRequest(model_id=repository))
            raise

    async def _entry_of_source(self, creation: modelfile.Creation) -> ModelSpec | Alias:
        """A model made from one in the fleet, one on the hub, or a path on a node."""
        fleet, source = self._api.dispatcher.fleet, creation.source
        try:
            base = None if is_path(source) else self._api.dispatcher.resolve(source)
        except ModelNotFound:
            base = None
        if base is not None:
            described = listing.described(fleet, base.spec, 0.0, self._api.dispatcher.now)
            named = None if described.is_loaded else base.spec.context_tokens
            context_tokens = min(filter(None, (described.context_tokens, named)), default=None)
            template = None
            if creation.template:
                own = base.spec.chat_template or await chat_template(
                    fleet, self._api.nodes, listing.files_of(fleet, base.spec)
                )
                template = _converted(creation.template, own)
            return created_entry(creation, base, None, context_tokens, template)
        files = None if is_path(source) else self._files.source_of(plain_name(source))
        template = _converted(creation.template, "") if creation.template else None
        return created_entry(creation, None, files, None, template)

    async def _delete_uploads(self, spec: ModelSpec, created: Catalogue) -> None:
        """Delete the files that were uploaded for `spec`, unless another model has them. Raises ModelInUse."""
        source = spec.source or ""
        if is_uploaded(source) and not any(each.source == source for each in created.models if each != spec):
            for node in self._api.dispatcher.fleet.listing(source):
                await self._files.delete(node.name, source, None)


async def chat_template(fleet: Fleet, nodes: Mapping[str, NodeClient], model: str) -> str:
    """The chat template of a model, from the first node that knows it. Empty if none does: only a server knows it, or
    no node has the files."""
    for node in fleet.listing(model):
        if node.healthy and node.takes_orders:
            try:
                return await nodes[node.name].chat_template(model)
            except CortexError as problem:
                log.debug("%s has no chat template of %s: %s", node.name, model, problem)
    return ""


def _converted(template: str, own_template: str) -> str | None:
    """A TEMPLATE as a chat template. None if it matches the model's own template, which also supports tools. Raises
    InvalidValue."""
    if modelfile.foreign_markers(template, own_template) == ():
        return None
    try:
        return to_jinja(template)
    except TemplateProblem as problem:
        raise InvalidValue(
            f"This TEMPLATE cannot be converted: {problem}. Supported are {SUPPORTED}. Without TEMPLATE, the model is "
            "prompted with the template of its files.",
            param="template",
        ) from problem


def _repository_for(creation: modelfile.Creation) -> str:
    """The repository's name, which is the same for the same files."""
    listed = "".join(f"{path}\0{digest}\n" for path, digest in sorted(creation.files.items()))
    slug = re.sub(r"[^A-Za-z0-9]+", "-", creation.name).strip("-")[:64] or "model"
    return f"{UPLOADED}/{slug}-{hashlib.sha256(listed.encode()).hexdigest()[:8]}"


def _renamed(created: Catalogue, spec: ModelSpec, alias: str) -> ModelSpec:
    """The created model `spec` under the name of an alias of it."""
    entry = created.aliases[alias]
    assert isinstance(entry, Alias)
    preset = Preset(**{name: getattr(entry, name) for name in Preset.__struct_fields__})
    source = spec.source or spec.id
    return msgspec.structs.replace(
        spec, id=alias, source=source, preset=preset.over(spec.preset), license=entry.license
    )


def created_entry(
    creation: modelfile.Creation,
    base: Resolution | None,
    files: FilesRequest | None,
    context_tokens: int | None,
    chat_template: str | None,
) -> ModelSpec | Alias:
    """The catalogue entry: another name for an existing model, or a model of its own if there is none or it is loaded
    differently. `base`: the existing model, with `context_tokens`. `files`: those on the hub. `chat_template` replaces
    that of the files."""
    preset = creation.preset if base is None or base.preset is None else creation.preset.over(base.preset)
    wanted = creation.context_tokens
    is_longer = wanted is not None and (context_tokens is None or wanted > context_tokens)
    is_itself = base is not None and base.model_id == creation.name
    if chat_template and base is not None and base.spec.harness not in (None, ENGINE):
        raise InvalidValue(
            f"{base.model_id} is run by {base.spec.harness}, which has a template of its own: leave TEMPLATE out.",
            param="template",
        )
    if base is not None and not (creation.quant or chat_template or is_longer or is_itself):
        fields = {name: getattr(preset, name) for name in Preset.__struct_fields__}
        return Alias(model=base.model_id, license=creation.license, **fields)
    options: dict[str, Any] = {"source": creation.source}
    if files is not None:
        options = {"source": files.source or files.model_id, "quant": files.quant}
    elif base is not None:
        options = base.spec.shared_with(ModelSpec)
        options["source"] = base.spec.source or base.model_id
    options |= {"quant": creation.quant} if creation.quant else {}
    options |= {"context_tokens": wanted} if wanted is not None else {}
    options |= {"chat_template": chat_template} if chat_template else {}
    return ModelSpec(id=creation.name, preset=preset, license=creation.license, **options)
