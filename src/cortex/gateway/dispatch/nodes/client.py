"""The control calls to one node. Reads have short timeouts; a load waits while the node responds to polls."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from cortex.gateway.config import Config, NeuronSection
from cortex.http.composed_body import Body
from cortex.http.limits import UpstreamLimits
from cortex.http.request import Headers
from cortex.http.ticker import Ticker
from cortex.http.tls import client_context
from cortex.http.upstream.faults import UpstreamFault
from cortex.http.upstream.pool import Pool, UpstreamResponse
from cortex.system import open_files
from cortex.wire.dialects.ollama.models import BLOBS_PREFIX
from cortex.wire.error_encoding import from_code
from cortex.wire.errors import CortexError, LoadFailed, ModelNotFound, UpstreamUnavailable
from cortex.wire.events import Usage
from cortex.wire.node.bench import BenchRequest, BenchStatus
from cortex.wire.node.groups import PreparedMember, PrepareMember
from cortex.wire.node.neighbours import Neighbour, key_hash, new_ticket
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
    ModelLog,
    Recycled,
    Suspended,
    UnloadRequest,
)
from cortex.wire.node.protocol import Discovery, Health, ModelState, ModelStatus, PullStatus

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_TIMEOUT_S = 5.0
"""Limit for calls that read state, and for polls of foreign servers: a busy one responds late but is not down."""
LOAD_CALL_TIMEOUT_S = 3600.0
"""A node may respond to a load only when the model is ready; polls show meanwhile that it is up."""
CONTROL_TIMEOUT_S = 30.0
DELETE_TIMEOUT_S = 120.0
"""Deleting hundreds of gigabytes takes a slow disk a while."""
UPLOAD_TIMEOUT_S = 3600.0
HUB_TIMEOUT_S = 60.0
"""A node tries several times to reach the hub."""
PREPARE_TIMEOUT_S = 300.0
"""A server may take long to print its version."""
INSPECTION_TIMEOUT_S = 300.0
"""The headers of a large model on a slow disk take a while."""
USAGE_TIMEOUT_S = 10.0
"""A node waits briefly for the end of the request whose usage is read."""
STATE_POLL_S = 0.25
MAX_KEPT = 256
"""Idle connections to a node."""
NOT_ADMITTED = (401, 403)
"""Statuses with which a node rejects the gateway itself, for its key or the name that it used for the node."""
_STATUS_ALONE = re.compile(rb'\{"status": ?"\w+"\}')
"""What `/health` of a neuron with keys reports to callers without one."""
_CHANGING = (ModelState.DOWNLOADING, ModelState.LOADING, ModelState.RECOVERING)


class ForeignModel(msgspec.Struct, frozen=True):
    """A model in the list of an OpenAI-compatible server. Servers name the context length differently."""

    id: str
    max_model_len: Any = None
    context_length: Any = None
    context_window: Any = None

    @property
    def context_tokens(self) -> int | None:
        candidates = (self.max_model_len, self.context_length, self.context_window)
        return next((value for value in candidates if type(value) is int and value > 0), None)


class _ForeignList(msgspec.Struct, frozen=True):
    data: tuple[ForeignModel, ...] = ()


class _Props(msgspec.Struct, frozen=True):
    chat_template: str = ""


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | int | None = None


class _ErrorEnvelope(msgspec.Struct, frozen=True):
    error: _ErrorBody | str
    """A string in the dialect of Ollama, which has the code in `code`."""
    code: str | int | None = None


def _error_in(body: bytes) -> _ErrorBody | None:
    try:
        found = msgspec.json.decode(body, type=_ErrorEnvelope)
        return _ErrorBody(found.error, found.code) if isinstance(found.error, str) else found.error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def error_from(node: str, status: int, body: bytes) -> CortexError:
    """The error in a node's response, with its own message. A body of another form becomes UpstreamUnavailable."""
    error = _error_in(body)
    if error is None:
        text = body[:200].decode("utf-8", "replace")
        return UpstreamUnavailable(f"Node {node} responded {status} with an unreadable error: {text!r}")
    if status in NOT_ADMITTED:
        return UpstreamUnavailable(f"Node {node} does not admit this gateway; check its key_env. {error.message}")
    if isinstance(error.code, str):
        return from_code(error.code, error.message)
    return UpstreamUnavailable(f"Node {node} responded {status}: {error.message}")


def _blob(digest: str) -> bytes:
    return f"{BLOBS_PREFIX}sha256:{digest}".encode()


def num_kept(num_files: int, num_nodes: int) -> int:
    """How many idle connections per node a process with a limit of `num_files` keeps: half of its reserve in all."""
    return max(1, min(MAX_KEPT, open_files.reserve(num_files) // 2 // max(1, num_nodes)))


class NodeClient:
    """One node: its connections and its control calls. Owned by the server, used from its loop only."""

    def __init__(
        self,
        section: NeuronSection,
        ticker: Ticker,
        *,
        key: str | None,
        connect_timeout_s: float,
        idle_timeout_s: float,
        poll_timeout_s: float = READ_TIMEOUT_S,
        num_kept: int = MAX_KEPT,
        tls: ssl.SSLContext | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self.section = section
        self.name = section.name
        self._key, self._ca_file = key, ca_file
        self._poll_timeout_s = poll_timeout_s
        limits = UpstreamLimits(connect_s=connect_timeout_s, silence_s=idle_timeout_s, num_kept=num_kept)
        if section.kind != "neuron":  # a foreign server may be too busy for polls
            limits = dataclasses.replace(limits, silence_when_down_s=idle_timeout_s)
            self._poll_timeout_s = max(poll_timeout_s, READ_TIMEOUT_S)
        self.pool = Pool(section.endpoint.rstrip("/").removesuffix("/v1"), ticker, limits, tls=tls)
        self.headers: Headers = ((b"authorization", f"Bearer {key}".encode()),) if key else ()
        """Sent with every call to this node."""
        self.served_needs: set[tuple[str, str]] = set()
        """Requests that a foreign server has served without an error: model and need."""

    @classmethod
    def of(
        cls, section: NeuronSection, ticker: Ticker, config: Config, directory: Path, env: Mapping[str, str]
    ) -> NodeClient:
        """The node that `section` of `config` describes, with its key from `env`. Relative paths start at `directory`.

        Raises SettingsError when its `ca_file` cannot be used.
        """
        variable = config.key_variable(section)
        key = env.get(variable, "").strip() if variable is not None else None
        if variable is not None and not key:
            log.warning("node %s has no key: the environment variable %s is not set", section.name, variable)
        is_secure = section.endpoint.startswith("https:")
        return cls(
            section,
            ticker,
            key=key,
            connect_timeout_s=config.gateway.connect_timeout_s,
            idle_timeout_s=config.gateway.idle_timeout_s,
            poll_timeout_s=config.gateway.poll_timeout_s,
            num_kept=num_kept(open_files.limit(), len(config.neurons)),
            tls=client_context(config.ca_file(section, directory)) if is_secure else None,
            ca_file=config.ca_file(section, directory) if is_secure else None,
        )

    def as_neighbour(self, repository: str) -> Neighbour:
        """How another node reaches this one for the files of a repository. Raises OSError if its `ca_file` is gone."""
        return Neighbour(
            name=self.name,
            url=self.section.endpoint.rstrip("/").removesuffix("/v1"),
            ticket=new_ticket(key_hash(self._key), repository, time.time()) if self._key else None,
            authority=None if self._ca_file is None else self._ca_file.read_text(),
        )

    async def discovery(self) -> Discovery:
        """Raises CortexError, as all calls do: UpstreamUnavailable if there is no response."""
        return await self._get(b"/discovery", Discovery, self._poll_timeout_s)

    async def health(self, since: str | None = None) -> Health:
        """`since`: the revision of an earlier report; the response may be only what has changed since."""
        query = "" if since is None else f"?since={quote(since, safe='')}"
        return await self._get(f"/health{query}".encode(), Health, self._poll_timeout_s)

    async def foreign_models(self) -> tuple[ForeignModel, ...]:
        """The models of an OpenAI-compatible server."""
        return (await self._get(b"/v1/models", _ForeignList, self._poll_timeout_s)).data

    async def load(self, request: LoadRequest) -> ModelStatus:
        """Ensure the model is ready on this node; returns when it is. Raises the node's error when it cannot be.

        The node may respond at once and continue to load, or respond at the end.
        """
        status = await self._post(b"/models/load", request, ModelStatus, LOAD_CALL_TIMEOUT_S)
        while status.state in _CHANGING:
            await asyncio.sleep(STATE_POLL_S)
            status = await self.model_status(request.model_id)
        if status.state is not ModelState.READY:
            reason = status.reason or f"{request.model_id} is {status.state} after the load"
            raise from_code(status.reason_code or LoadFailed.code, reason)
        return status

    async def unload(self, request: UnloadRequest, *, timeout_s: float) -> ModelStatus:
        """Ensure the model is gone from this node's devices; returns when it is. With `sleep` it may be asleep then."""
        try:
            status = await self._post(b"/models/unload", request, ModelStatus, timeout_s)
        except ModelNotFound:  # the node rejected its load, or has forgotten it since
            return ModelStatus(id=request.model_id, state=ModelState.COLD)
        while status.state is ModelState.UNLOADING:
            await asyncio.sleep(STATE_POLL_S)
            status = await self.model_status(request.model_id)
        absent = {ModelState.COLD, ModelState.FAILED} | ({ModelState.ASLEEP} if request.sleep else set())
        if status.state not in absent:
            raise LoadFailed(f"{request.model_id} is {status.state} after the unload")
        return status

    async def prepare_member(self, request: PrepareMember) -> PreparedMember:
        """Make the node choose the ports of a group member and hold them for its load."""
        return await self._post(b"/groups/prepare", request, PreparedMember, PREPARE_TIMEOUT_S)

    async def inspect(self, request: LoadRequest) -> ModelStatus:
        """Make the node list the model and read its files, without a load. Raises the node's error if it must not."""
        return await self._post(b"/models/inspect", request, ModelStatus, INSPECTION_TIMEOUT_S)

    async def request_usage(self, attempt_id: str) -> Usage:
        """The usage of a request whose client disconnected."""
        return await self._get(f"/requests/{quote(attempt_id, safe='')}/usage".encode(), Usage, USAGE_TIMEOUT_S)

    async def model_log(self, model: str, after: int) -> ModelLog:
        """What the server that runs the model wrote after its first `after` lines."""
        return await self._get(f"/models/{quote(model)}/log?after={after}".encode(), ModelLog)

    async def chat_template(self, model: str) -> str:
        """Read from its files, without a load. Raises where the node does not know it."""
        return (await self._get(f"/props?model={quote(model, safe='')}".encode(), _Props)).chat_template

    async def forget_size(self, model: str) -> ModelStatus:
        """Discard the node's measured size of the model, so that it estimates again."""
        return await self._post(
            b"/models/forget-size", ForgetSizeRequest(model_id=model), ModelStatus, CONTROL_TIMEOUT_S
        )

    async def recycle(self, device: int, *, timeout_s: float) -> bool:
        """Replace the worker of an empty device; False when the device is not empty after all."""
        return (await self._post(f"/devices/{device}/recycle".encode(), {}, Recycled, timeout_s)).recycled

    async def suspend(self) -> Suspended:
        """Make the node suspend itself; returns when it has begun to. Raises ModelInUse while it is busy."""
        return await self._post(b"/suspend", {}, Suspended, CONTROL_TIMEOUT_S)

    async def pull(self, request: FilesRequest) -> PullStatus:
        """Start to download a model's files, or join the download in progress; returns at once."""
        return await self._post(b"/files/pull", request, PullStatus, CONTROL_TIMEOUT_S)

    async def pull_status(self, model: str) -> PullStatus:
        return await self._get(f"/files/pulls/{quote(model)}".encode(), PullStatus)

    async def cancel_pull(self, model: str) -> PullStatus:
        """Returns when the download has ended."""
        return await self._post(b"/files/cancel", FilesRequest(model_id=model), PullStatus, CONTROL_TIMEOUT_S)

    async def bench(self, request: BenchRequest) -> BenchStatus:
        """Start to measure a model, or join the measurement in progress; returns at once."""
        return await self._post(b"/bench", request, BenchStatus, CONTROL_TIMEOUT_S)

    async def bench_status(self, model: str) -> BenchStatus:
        return await self._get(f"/bench/{quote(model)}".encode(), BenchStatus)

    async def cancel_bench(self, model: str) -> BenchStatus:
        """Returns when the measurement has ended."""
        return await self._post(b"/bench/cancel", BenchRequest(model_id=model), BenchStatus, CONTROL_TIMEOUT_S)

    async def forget_blocks(self, request: ForgetBlocksRequest) -> ForgottenBlocks:
        return await self._post(b"/kv/forget", request, ForgottenBlocks, DELETE_TIMEOUT_S)

    async def delete_files(self, request: FilesRequest) -> DeletedFiles:
        return await self._post(b"/files/delete", request, DeletedFiles, DELETE_TIMEOUT_S)

    async def has_upload(self, digest: str) -> bool:
        response = await self._send(b"GET", _blob(digest), self.headers, timeout_s=CONTROL_TIMEOUT_S)
        return response.status == 200

    async def upload(self, digest: str, body: Body) -> None:
        """Store a file on the node for `assemble`."""
        response = await self._send(b"POST", _blob(digest), self.headers, body, timeout_s=UPLOAD_TIMEOUT_S)
        if response.status >= 400:
            raise error_from(self.name, response.status, response.body)

    async def assemble(self, request: AssembleRequest) -> AssembledFiles:
        """Make a repository of uploaded files on the node."""
        return await self._post(b"/files/assemble", request, AssembledFiles, INSPECTION_TIMEOUT_S)

    async def hub_repository(self, source: str) -> HubRepository:
        """What a repository of the hub offers, as the node sees it."""
        return await self._get(f"/hub/{quote(source)}".encode(), HubRepository, HUB_TIMEOUT_S)

    async def model_status(self, model: str) -> ModelStatus:
        for status in (await self._get(b"/health", Health)).models:
            if status.id == model:
                return status
        return ModelStatus(id=model, state=ModelState.COLD)

    async def _send(
        self, method: bytes, target: bytes, headers: Headers, body: Body = b"", *, timeout_s: float
    ) -> UpstreamResponse:
        try:
            return await self.pool.fetch(method, target, headers, body, timeout_s=timeout_s)
        except UpstreamFault as fault:
            raise UpstreamUnavailable(str(fault)) from fault

    async def _get(self, target: bytes, kind: type[T], timeout_s: float | None = None) -> T:
        return await self._fetch(b"GET", target, b"", kind, timeout_s or READ_TIMEOUT_S)

    async def _post(self, target: bytes, value: Any, kind: type[T], timeout_s: float) -> T:
        return await self._fetch(b"POST", target, msgspec.json.encode(value), kind, timeout_s)

    async def _fetch(self, method: bytes, target: bytes, body: bytes, kind: type[T], timeout_s: float) -> T:
        headers = [*self.headers, (b"content-type", b"application/json")]
        response = await self._send(method, target, headers, body, timeout_s=timeout_s)
        if response.status >= 400:
            raise error_from(self.name, response.status, response.body)
        try:
            return msgspec.json.decode(response.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            if not self.headers and _STATUS_ALONE.fullmatch(response.body):
                why = "it needs a key: set its `key_env`, or `node_key_env` of [gateway], to a variable with one"
            else:
                path = target.partition(b"?")[0].decode()
                why = f"its response to {path} is unreadable: {problem}"
            raise UpstreamUnavailable(why) from problem
