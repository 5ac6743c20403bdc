"""The node's own routes: discovery, health, models, and loading and unloading them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import msgspec

import cortex
from cortex.http.server.server import Response
from cortex.http.ticker import Ticker
from cortex.neuron.api import responses
from cortex.neuron.api.access import NodeAccess
from cortex.neuron.api.calls import ApiCall, Route
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.stream import EventStream
from cortex.neuron.node.node import Node
from cortex.system.build import build_information, version_of
from cortex.wire import llama_cpp, sse
from cortex.wire.dialects.ollama.models import RUNNING, is_for_ollama
from cortex.wire.errors import InvalidValue, RouteNotFound, shorten
from cortex.wire.fields.body import decode
from cortex.wire.model_names import check_name
from cortex.wire.node.bench import BenchRequest
from cortex.wire.node.groups import PrepareMember
from cortex.wire.node.orders import (
    AssembleRequest,
    FilesRequest,
    ForgetSizeRequest,
    LoadRequest,
    Recycled,
    Suspended,
    UnloadRequest,
)
from cortex.wire.node.protocol import Endpoint, Health, ModelList, ModelState, ModelStatus

MAX_GONE = 1024
"""Beyond this many delisted models, callers get the whole report once."""


class ReportRevisions:
    """The statuses of the latest report, each with the revision that changed it. Belongs to the daemon's loop."""

    def __init__(self, max_gone: int = MAX_GONE) -> None:
        self._max_gone = max_gone
        self._begin()

    def report(self, health: Health, since: str | None) -> Health:
        """The changes of `health`, which has all models, since a revision; all of it if the revision is unknown."""
        self._update({status.id: status for status in health.models})
        known = None if since is None else self._number(since)
        revision = f"{self._epoch}.{self._latest}"
        if known is None:
            return msgspec.structs.replace(health, revision=revision)
        return msgspec.structs.replace(
            health,
            models=tuple(status for status, number in self._statuses.values() if number > known),
            revision=revision,
            since=since,
            gone=tuple(model for model, number in self._gone.items() if number > known),
        )

    def _begin(self) -> None:
        self._epoch = secrets.token_hex(8)
        """Different in every process, so that revisions of an earlier process are not accepted."""
        self._latest = 0
        self._statuses: dict[str, tuple[ModelStatus, int]] = {}
        self._gone: dict[str, int] = {}

    def _update(self, statuses: dict[str, ModelStatus]) -> None:
        gone = self._statuses.keys() - statuses.keys()
        if len(self._gone) + len(gone) > self._max_gone:
            self._begin()
            gone = set()
        number = self._latest + 1
        changed = {
            model: (status, number)
            for model, status in statuses.items()
            if (known := self._statuses.get(model)) is None or (known[0] is not status and known[0] != status)
        }
        if not changed and not gone:
            return
        self._latest = number
        self._statuses.update(changed)
        for model in gone:
            del self._statuses[model]
            self._gone[model] = number
        for model in changed:
            self._gone.pop(model, None)

    def _number(self, revision: str) -> int | None:
        epoch, _, number = revision.partition(".")
        if epoch != self._epoch or not number.isascii() or not number.isdecimal() or len(number) > 18:
            return None
        return int(number) if int(number) <= self._latest else None


@dataclass(frozen=True, slots=True)
class Control:
    """Reads return what the node knows; none of them waits for a device."""

    backend: Node
    drain_gate: DrainGate
    access: NodeAccess
    ticker: Ticker
    keepalive_s: float
    scheme: str
    """The scheme of the URLs that clients use."""
    revisions: ReportRevisions = field(default_factory=ReportRevisions)

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/", self.about),
            Route("GET", "/discovery", self.discovery),
            Route("GET", "/health", self.health),
            Route("GET", "/version", self.version),
            Route("GET", "/events", self.events),
            Route("GET", "/models", self.models),
            Route("POST", "/models/load", self.load),
            Route("POST", "/models/inspect", self.inspect),
            Route("POST", "/groups/prepare", self.prepare_member),
            Route("POST", "/models/unload", self.unload),
            Route("POST", "/models/forget-size", self.forget_size),
            Route("POST", r"/devices/{index:\d{1,4}}/recycle", self.recycle),
            Route("POST", "/suspend", self.suspend),
            Route("POST", "/files/pull", self.pull),
            Route("GET", "/files/pulls/{id:.+}", self.pull_status),
            Route("POST", "/files/cancel", self.cancel_pull),
            Route("POST", "/files/delete", self.delete_files),
            Route("POST", "/files/assemble", self.assemble_files),
            Route("POST", "/bench", self.bench),
            Route("POST", "/bench/cancel", self.cancel_bench),
            Route("GET", "/bench/{id:.+}", self.bench_status),
            Route("GET", "/hub/{source:.+}", self.offer),
            Route("GET", "/models/{id:.+}/endpoint", self.endpoint),
            Route("GET", "/models/{id:.+}/log", self.log),
            Route("GET", "/models/{id:.+}", self.model),
        ]

    async def about(self, call: ApiCall) -> Response:
        if is_for_ollama(call.request.text(b"host"), call.request.text(b"user-agent")):
            return Response(200, ((b"content-type", b"text/plain; charset=utf-8"),), RUNNING.encode())
        return responses.json(
            {
                "name": "neuron",
                "version": cortex.__version__,
                "about": "One node of a cortex fleet: inference at /v1, the node itself at /discovery and /health.",
            }
        )

    async def discovery(self, _: ApiCall) -> Response:
        return responses.json(self.backend.discovery)

    async def health(self, call: ApiCall) -> Response:
        """For a caller without a key, only the status, for load balancers and container checks. With `?since=REVISION`,
        only the models that have changed since that report."""
        health = self.backend.health()
        if self.drain_gate.closed:
            health = msgspec.structs.replace(health, status="draining")
        if not self.access.admits(call.request):
            return responses.json({"status": health.status})
        return responses.json(self.revisions.report(health, call.query("since")))

    async def version(self, _: ApiCall) -> Response:
        discovery = self.backend.discovery
        engine = {"torch": version_of("torch"), "driver": discovery.driver, "cuda_version": discovery.cuda_version}
        return responses.json({"name": "neuron", **build_information(), **engine})

    async def models(self, _: ApiCall) -> Response:
        """For gateways, and as llama.cpp lists models."""
        found = self.backend.models()
        listed = llama_cpp.model_list(llama_cpp.entry(status.id, (status,), 0) for status in found)
        return responses.json(msgspec.to_builtins(ModelList(models=found)) | listed)

    async def model(self, call: ApiCall) -> Response:
        return responses.json(self.backend.model(call.values["id"]))

    async def endpoint(self, call: ApiCall) -> Response:
        """Every model is served at its node's URL, with the host name that the client used."""
        model = self.backend.model(call.values["id"])
        dialects = self.backend.discovery.dialects
        base_url = f"{self.scheme}://{call.request.text(b'host') or ''}/v1"
        return responses.json(Endpoint(model_id=model.id, base_url=base_url, dialects=dialects))

    async def log(self, call: ApiCall) -> Response:
        """The output of the server that runs a model; with `?after=N`, what followed its first N lines."""
        upstream = self.backend.upstream(call.values["id"])
        if upstream is None:
            raise InvalidValue(
                f"{shorten(call.values['id'])} is run by the built-in engine, which writes to the log of the node."
            )
        after = call.query("after") or "0"
        if not (after.isascii() and after.isdigit() and len(after) <= 18):
            raise InvalidValue("Invalid value for 'after': use a number.", param="after")
        return responses.json(upstream.log(int(after)))

    async def load(self, call: ApiCall) -> Response:
        """Responds when the model is ready. With `?wait=false`, responds at once: 202 while the model loads."""
        load_request = decode(_with_model_id(call.request.body), LoadRequest)
        check_name(load_request.model_id, "model_id")
        wait = _flag(call, "wait", default=True)
        with self.drain_gate.enter():
            status = await self.drain_gate.wait_for(self.backend.load(load_request, wait=wait))
        return responses.json(status, status=200 if status.state is ModelState.READY else 202)

    async def inspect(self, call: ApiCall) -> Response:
        """Lists a model with the options of a load, and responds when its files have been read. Loads nothing."""
        load_request = decode(_with_model_id(call.request.body), LoadRequest)
        check_name(load_request.model_id, "model_id")
        return responses.json(await self.backend.inspect(load_request))

    async def prepare_member(self, call: ApiCall) -> Response:
        """Chooses the ports of a member of a group that will be loaded here."""
        return responses.json(await self.backend.prepare_member(decode(call.request.body, PrepareMember)))

    async def unload(self, call: ApiCall) -> Response:
        unload_request = decode(_with_model_id(call.request.body), UnloadRequest)
        return responses.json(await self.backend.unload(unload_request))

    async def forget_size(self, call: ApiCall) -> Response:
        """Discards the measured size of the model."""
        order = decode(_with_model_id(call.request.body), ForgetSizeRequest)
        return responses.json(self.backend.forget_size(order.model_id))

    async def pull(self, call: ApiCall) -> Response:
        """Starts a download and responds at once; `/files/pulls/{model}` and `/health` show its progress."""
        files_request = decode(call.request.body, FilesRequest)
        check_name(files_request.model_id, "model_id")
        with self.drain_gate.enter():
            return responses.json(self.backend.files.pull(files_request), status=202)

    async def pull_status(self, call: ApiCall) -> Response:
        return responses.json(self.backend.files.pull_status(call.values["id"]))

    async def cancel_pull(self, call: ApiCall) -> Response:
        files_request = decode(call.request.body, FilesRequest)
        return responses.json(await self.backend.files.cancel(files_request.model_id))

    async def delete_files(self, call: ApiCall) -> Response:
        """Deletes a model's files from the cache, never while the model is in memory."""
        return responses.json(await self.backend.files.delete(decode(call.request.body, FilesRequest)))

    async def assemble_files(self, call: ApiCall) -> Response:
        """Makes a model of files that were uploaded."""
        return responses.json(await self.backend.files.assemble(decode(call.request.body, AssembleRequest)))

    async def bench(self, call: ApiCall) -> Response:
        """Starts to measure a model that is ready, and responds at once; `/bench/{model}` shows the progress."""
        bench_request = decode(call.request.body, BenchRequest)
        with self.drain_gate.enter():
            return responses.json(self.backend.benches.start(bench_request), status=202)

    async def bench_status(self, call: ApiCall) -> Response:
        return responses.json(self.backend.benches.status(call.values["id"]))

    async def cancel_bench(self, call: ApiCall) -> Response:
        bench_request = decode(call.request.body, BenchRequest)
        return responses.json(await self.backend.benches.cancel(bench_request.model_id))

    async def offer(self, call: ApiCall) -> Response:
        """The quantisations of a hub repository, with sizes. Nothing is downloaded."""
        return responses.json(await self.backend.files.offer(call.values["source"]))

    async def recycle(self, call: ApiCall) -> Response:
        """Replaces the worker of a device without models. The gateway asks for it after many loads."""
        index = int(call.values["index"])
        devices = [device.index for device in self.backend.discovery.devices]
        if index not in devices:
            raise RouteNotFound(
                f"This node has no device {shorten(str(index))}; it has {', '.join(map(str, devices)) or 'none'}."
            )
        with self.drain_gate.enter():
            recycled = await self.backend.recycle(index)
        return responses.json(Recycled(device=index, recycled=recycled))

    async def suspend(self, call: ApiCall) -> Response:
        """Suspends this host if nothing runs on it, by order of a gateway that can wake it."""
        del call
        return responses.json(Suspended(command=self.backend.suspend()), status=202)

    async def events(self, call: ApiCall) -> None:
        """A stream of changes; ends when the node shuts down."""
        changes = self.backend.subscribe()
        stream = EventStream(call.exchange, self.ticker, keepalive=sse.COMMENT, keepalive_s=self.keepalive_s)
        async with stream:
            await stream.write(sse.COMMENT)
            async for change in changes:
                await stream.write(sse.frame(msgspec.json.encode(change), change.kind))


def _flag(call: ApiCall, name: str, *, default: bool) -> bool:
    value = call.query(name)
    if value is None:
        return default
    if value not in ("true", "false", "1", "0"):
        raise InvalidValue(f"Invalid value for '{name}': use true or false.", param=name)
    return value in ("true", "1")


def _with_model_id(body: bytes) -> bytes:
    """`model_id` for the `model` of llama.cpp's clients."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if not isinstance(fields, dict) or "model_id" in fields or "model" not in fields:
        return body
    return msgspec.json.encode({"model_id": fields.pop("model"), **fields})
