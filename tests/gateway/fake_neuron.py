"""A small node for fault injection: it implements `wire.node.protocol` on a real socket and fails on demand."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from cortex.wire.events import Usage
from cortex.wire.model_names import is_uploaded
from cortex.wire.node import usage_report
from cortex.wire.node.bench import BenchRequest, BenchStatus
from cortex.wire.node.contexts import ContextSizes
from cortex.wire.node.headers import PRINCIPAL
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.orders import (
    AssembledFiles,
    AssembleRequest,
    DeletedFiles,
    FilesRequest,
    ForgetBlocksRequest,
    ForgetSizeRequest,
    ForgottenBlocks,
    HubRepository,
    LoadRequest,
    UnloadRequest,
)
from cortex.wire.node.protocol import (
    Capabilities,
    Device,
    DeviceHealth,
    Discovery,
    DiskUse,
    Health,
    HostKV,
    ModelLoad,
    ModelState,
    ModelStatus,
    Progress,
    PullStatus,
)

from .fake_responses import REPORTED, USAGE, stream_chat

GB = 1 << 30
JSON = {"content-type": "application/json"}


def opened_gate() -> asyncio.Event:
    """An event that nobody waits for. A test replaces it by one that it sets later."""
    gate = asyncio.Event()
    gate.set()
    return gate


Respond = Callable[["FakeNeuron", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One inference request as the node received it, and when its client disconnected, if it did."""

    path: str
    headers: dict[str, str]
    raw: bytes
    left_at: float | None = None
    ended: bool = False
    """Responded, or disconnected."""

    @property
    def body(self) -> dict[str, Any]:
        return msgspec.json.decode(self.raw, type=dict[str, Any])


@dataclass
class FakeNeuron:
    """A test may change every attribute while the node runs."""

    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    harnesses: tuple[str, ...] = ("torch",)
    num_reloads: int = 0
    """Models the node has, and the bytes each takes once loaded."""
    estimates: dict[str, int] = field(default_factory=dict)
    """Estimated bytes before the first load; `sizes` where absent."""
    total_bytes: int = 24 * GB
    free_disk_bytes: int = 500
    states: dict[str, ModelState] = field(default_factory=dict)
    load_gate: asyncio.Event = field(default_factory=opened_gate)
    """Loads wait for it."""
    unload_gate: asyncio.Event = field(default_factory=opened_gate)
    stream_gate: asyncio.Event = field(default_factory=opened_gate)
    """For a `respond` that waits in the middle of its stream."""
    can_sleep: bool = True
    has_host_memory: bool = False
    """Whether it has host memory for sleeping models."""
    load_faults: list[tuple[int, str, str]] = field(default_factory=list)
    """(status, code, message) for the next loads, in order."""
    loads: dict[str, ModelLoad] = field(default_factory=dict)
    sampling: dict[str, SamplingDefaults] = field(default_factory=dict)
    capabilities: dict[str, Capabilities] = field(default_factory=dict)
    """What models can do whose files it has read; the others are chat models once they are loaded."""
    contexts: dict[str, ContextSizes] = field(default_factory=dict)
    context_tokens: int = 32_768
    templates: dict[str, str] = field(default_factory=dict)
    """The chat templates of models whose files it has."""
    first_token_s: float | None = None
    """Reported with whole responses."""
    respond: Respond | None = None
    kv_host: HostKV | None = None
    """Of its models that are ready."""
    forgotten_bytes: int = 1
    """What a model counts as whose size was forgotten."""
    control_gate: asyncio.Event = field(default_factory=opened_gate)
    """It responds to control requests once this is set."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first control request has arrived."""
    dialects: tuple[str, ...] = ("openai_chat", "openai_completions", "openai_responses", "anthropic_messages")
    seen: list[Seen] = field(default_factory=list)
    load_requests: list[LoadRequest] = field(default_factory=list)
    unload_requests: list[UnloadRequest] = field(default_factory=list)
    pull_requests: list[FilesRequest] = field(default_factory=list)
    forget_requests: list[ForgetBlocksRequest] = field(default_factory=list)
    delete_requests: list[FilesRequest] = field(default_factory=list)
    quants_on_disk: dict[str, str] = field(default_factory=dict)
    """The quantisation of the files that it has of a model."""
    pull: PullStatus | None = None
    bench_requests: list[BenchRequest] = field(default_factory=list)
    bench: BenchStatus | None = None
    """The measurement; tests replace it to end it."""
    """The latest download; a test ends it by replacing it."""
    hub: dict[str, HubRepository] = field(default_factory=dict)
    """What the hub offers, by source."""
    costs: dict[str, Usage] = field(default_factory=dict)
    """Usage of requests whose clients disconnected, by the id that the client chose."""
    tls: ssl.SSLContext | None = None
    """Speaks HTTPS with it."""
    reason: str | None = None
    """Reported for failed models."""
    key: str | None = None
    """The key that callers must send."""
    num_recycles: int = 0
    polls: int = 0
    port: int = 0
    started: float = field(default_factory=time.monotonic)
    _runner: web.AppRunner | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}" if self.tls is None else f"https://localhost:{self.port}"

    def used_bytes(self) -> int:
        gone = (ModelState.COLD, ModelState.FAILED, ModelState.ASLEEP)
        return sum(self.sizes[m] for m, state in self.states.items() if state not in gone)

    def status(self, model: str) -> ModelStatus:
        state = self.states.get(model, ModelState.COLD)
        return ModelStatus(
            id=model,
            state=state,
            devices=(0,) if state in (ModelState.READY, ModelState.ASLEEP) else (),
            estimate_bytes=self.estimates.get(model, self.sizes[model]),
            measured_bytes=self.sizes[model] if state in (ModelState.READY, ModelState.ASLEEP) else None,
            kv_host=self.kv_host if state is ModelState.READY else None,
            host_bytes=self.sizes[model] // 2 if state is ModelState.ASLEEP else 0,
            disk_bytes=self.sizes[model] if model in self.quants_on_disk else None,
            contexts=self.contexts.get(model),
            least_bytes=self.contexts[model].sizes[0].num_bytes if model in self.contexts else None,
            context_tokens=self.context_tokens,
            max_input_tokens=self.context_tokens,
            max_output_tokens=8192,
            family="bert" if model in self.capabilities else None,
            capabilities=self.capabilities.get(model, Capabilities(tools=True, reasoning=True)),
            sampling=self.sampling.get(model, SamplingDefaults()),
            load=self.loads.get(model, ModelLoad()),
            reason=self.reason if state is ModelState.FAILED else None,
            state_age_s=1000.0,
            idle_s=1000.0,
            bench=self.bench.result if self.bench is not None and self.bench.model_id == model else None,
        )

    def health(self) -> Health:
        free = self.total_bytes - self.used_bytes()
        return Health(
            status="ok",
            uptime_s=time.monotonic() - self.started,
            num_reloads=self.num_reloads,
            devices=(DeviceHealth(index=0, total_bytes=self.total_bytes, free_bytes=free, worker="running"),),
            models=tuple(self.status(model) for model in self.sizes),
            disk=DiskUse(total_bytes=1000, free_bytes=self.free_disk_bytes, models_bytes=100),
            pulls=() if self.pull is None else (self.pull,),
        )

    def discovery(self) -> Discovery:
        device = Device(index=0, kind="cuda", name="Fake 3090", total_bytes=self.total_bytes)
        return Discovery(
            host=self.name,
            os="linux",
            version="0.1.0",
            devices=(device,),
            dialects=self.dialects,
            can_sleep=self.can_sleep,
            harnesses=self.harnesses,
        )

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        is_open = request.path == "/health" and "authorization" not in request.headers
        if self.key is not None and is_open:
            return web.json_response({"status": "ok"})
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            error = {"message": "This node needs a key.", "code": "invalid_api_key"}
            return web.json_response({"error": error}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 27, middlewares=[self._check_key])
        app.router.add_get("/discovery", self._discovery)
        app.router.add_get("/health", self._health)
        app.router.add_post("/models/load", self._load)
        app.router.add_post("/models/unload", self._unload)
        app.router.add_post("/models/forget-size", self._forget_size)
        app.router.add_get("/props", self._props)
        app.router.add_post("/kv/forget", self._forget_blocks)
        app.router.add_post("/files/pull", self._pull)
        app.router.add_get("/files/pulls/{id:.+}", self._pull_status)
        app.router.add_post("/files/cancel", self._cancel_pull)
        app.router.add_post("/bench", self._bench)
        app.router.add_get("/bench/{id:.+}", self._bench_status)
        app.router.add_post("/bench/cancel", self._cancel_bench)
        app.router.add_post("/files/delete", self._delete_files)
        app.router.add_get("/api/blobs/{digest}", self._find_upload)
        app.router.add_post("/api/blobs/{digest}", self._upload)
        app.router.add_post("/files/assemble", self._assemble)
        app.router.add_get("/hub/{source:.+}", self._hub)
        app.router.add_post("/devices/{index}/recycle", self._recycle)
        app.router.add_get("/requests/{id:.+}/usage", self._usage)
        app.router.add_get("/v1/models", self._foreign_models)
        app.router.add_post("/{path:v1/.*}", self._inference)
        app.router.add_post("/{path:api/.*}", self._inference)
        app.router.add_post("/{path:tokenize|detokenize|apply-template|embed|rerank|v2/rerank|score}", self._inference)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=self.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _pass_control_gate(self) -> None:
        self.asked.set()
        await self.control_gate.wait()

    async def _discovery(self, request: web.Request) -> web.Response:
        await self._pass_control_gate()
        return _json(self.discovery())

    async def _health(self, request: web.Request) -> web.Response:
        self.polls += 1
        await self._pass_control_gate()
        return _json(self.health())

    async def _foreign_models(self, request: web.Request) -> web.Response:
        await self._pass_control_gate()
        return _json({"object": "list", "data": [{"id": model, "object": "model"} for model in self.sizes]})

    async def _load(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=LoadRequest)
        self.load_requests.append(wanted)
        self.states[wanted.model_id] = ModelState.LOADING
        return await asyncio.shield(self._finish_load(wanted))  # it goes on without its caller

    async def _finish_load(self, wanted: LoadRequest) -> web.Response:
        await self.load_gate.wait()
        if self.states.get(wanted.model_id) is not ModelState.LOADING:
            return _json({"error": {"message": "unloaded while it was being loaded", "code": "load_cancelled"}}, 502)
        if self.load_faults:
            status, code, message = self.load_faults.pop(0)
            self.states[wanted.model_id] = ModelState.FAILED
            return _json({"error": {"message": message, "type": "server_error", "code": code}}, status)
        self.states[wanted.model_id] = ModelState.READY
        return _json(self.status(wanted.model_id))

    async def _unload(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=UnloadRequest)
        self.unload_requests.append(wanted)
        await self.unload_gate.wait()
        if wanted.model_id not in self.sizes:
            return _json({"error": {"message": "this node knows no such model", "code": "model_not_found"}}, 404)
        seen_tokens = wanted.seen_context_tokens
        if seen_tokens is not None and seen_tokens < self.context_tokens:
            return _json(self.status(wanted.model_id))
        falls_asleep = wanted.sleep and self.has_host_memory and self.states.get(wanted.model_id) is not None
        self.states[wanted.model_id] = ModelState.ASLEEP if falls_asleep else ModelState.COLD
        return _json(self.status(wanted.model_id))

    async def _forget_size(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=ForgetSizeRequest)
        self.estimates[wanted.model_id] = self.forgotten_bytes
        return _json(self.status(wanted.model_id))

    async def _props(self, request: web.Request) -> web.Response:
        template = self.templates.get(request.query["model"])
        if template is None:
            return _json({"error": {"message": "only its server knows", "code": "unsupported_modality"}}, 400)
        return _json({"chat_template": template})

    async def _forget_blocks(self, request: web.Request) -> web.Response:
        self.forget_requests.append(msgspec.json.decode(await request.read(), type=ForgetBlocksRequest))
        return _json(ForgottenBlocks(2, 3 * GB))

    async def _pull(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=FilesRequest)
        self.pull_requests.append(wanted)
        progress = Progress(stage="download", done_bytes=30, total_bytes=100, eta_s=7.0)
        self.pull = PullStatus(model_id=wanted.model_id, quant=wanted.quant, state="running", progress=progress)
        return _json(self.pull, 202)

    async def _pull_status(self, request: web.Request) -> web.Response:
        if self.pull is None or self.pull.model_id != request.match_info["id"]:
            return _json({"error": {"message": "no download", "code": "model_not_found"}}, 404)
        return _json(self.pull)

    async def _cancel_pull(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=FilesRequest)
        self.pull = PullStatus(model_id=wanted.model_id, state="cancelled")
        return _json(self.pull)

    async def _bench(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=BenchRequest)
        self.bench_requests.append(wanted)
        self.bench = BenchStatus(model_id=wanted.model_id, state="running", stage="8 streams")
        return _json(self.bench, 202)

    async def _bench_status(self, request: web.Request) -> web.Response:
        assert self.bench is not None
        assert self.bench.model_id == request.match_info["id"]
        return _json(self.bench)

    async def _cancel_bench(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=BenchRequest)
        self.bench = BenchStatus(model_id=wanted.model_id, state="cancelled")
        return _json(self.bench)

    async def _delete_files(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=FilesRequest)
        if self.states.get(wanted.model_id) is ModelState.READY:
            return _json({"error": {"message": f"{wanted.model_id} is in memory", "code": "model_in_use"}}, 409)
        if wanted.quant is not None and wanted.quant != self.quants_on_disk.get(wanted.model_id):
            return _json({"error": {"message": f"no files of {wanted.quant}", "code": "model_not_found"}}, 404)
        self.delete_requests.append(wanted)
        if is_uploaded(wanted.model_id):
            del self.sizes[wanted.model_id]
        return _json(DeletedFiles(model_id=wanted.model_id, freed_bytes=1234))

    async def _find_upload(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if request.match_info["digest"] in self.uploads else 404)

    async def _upload(self, request: web.Request) -> web.Response:
        self.uploads[request.match_info["digest"]] = await request.read()
        return web.Response(status=201)

    async def _assemble(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=AssembleRequest)
        self.sizes[wanted.repository] = sum(len(self.uploads[f"sha256:{each}"]) for each in wanted.files.values())
        return _json(AssembledFiles(repository=wanted.repository, num_bytes=self.sizes[wanted.repository]))

    async def _hub(self, request: web.Request) -> web.Response:
        found = self.hub.get(request.match_info["source"])
        if found is None:
            return _json({"error": {"message": "the hub has no such repository", "code": "model_not_found"}}, 404)
        return _json(found)

    async def _usage(self, request: web.Request) -> web.Response:
        attempts = {seen.headers.get("x-cortex-attempt-id"): seen.headers["x-request-id"] for seen in self.seen}
        cost = self.costs.get(attempts.get(request.match_info["id"], ""))
        if cost is None:
            return _json({"error": {"message": "unknown", "code": "route_not_found"}}, 404)
        return _json(cost)

    async def _recycle(self, request: web.Request) -> web.Response:
        self.num_recycles += 1
        return _json({"device": int(request.match_info["index"]), "recycled": self.used_bytes() == 0})

    async def _inference(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, {k.lower(): v for k, v in request.headers.items()}, await request.read())
        self.seen.append(seen)
        try:
            return await (self.respond or plain_response)(self, request, seen.body)
        except (asyncio.CancelledError, ConnectionResetError):
            seen.left_at = time.monotonic()
            raise
        finally:
            seen.ended = True


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def plain_response(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A short chat response, streamed or not, that names the node."""
    if not body.get("stream"):
        message = {"role": "assistant", "content": f"from {node.name}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        response = _json(
            {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
            | {"usage": USAGE}
        )
        if PRINCIPAL in request.headers:
            response.headers[usage_report.HEADER] = usage_report.header_value(REPORTED, node.first_token_s)
        return response
    chunks = [{"role": "assistant", "content": ""}, {"content": "from "}, {"content": node.name}]
    return await stream_chat(request, body, chunks)


StartNeuron = Callable[..., Awaitable[FakeNeuron]]
"""`(name, **attributes of FakeNeuron)`: starts a fake node."""
