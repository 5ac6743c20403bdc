"""Talking to one node's control side. Reads are quick and bounded; loads wait as long as the node makes progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from cortex.gateway.config import GatewaySection, NeuronSection
from cortex.http.limits import UpstreamLimits
from cortex.http.request import Headers
from cortex.http.ticker import Ticker
from cortex.http.upstream.pool import Pool
from cortex.wire.errors import CortexError, LoadFailed, UpstreamUnavailable, from_code
from cortex.wire.events import Usage
from cortex.wire.node import (
    Discovery,
    Health,
    LoadRequest,
    ModelState,
    ModelStatus,
    Recycled,
    UnloadRequest,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_TIMEOUT_S = 2.0
LOAD_CALL_TIMEOUT_S = 3600.0
"""A node may hold the load call until the model is ready; polls tell meanwhile whether the node lives."""
SPENT_TIMEOUT_S = 4.0
"""A node waits a little for the end of the request it is asked about."""
WATCH_INTERVAL_S = 0.25
_CHANGING = (ModelState.DOWNLOADING, ModelState.LOADING, ModelState.RECOVERING)


class ForeignModel(msgspec.Struct, frozen=True):
    """What an OpenAI-compatible server says of a model. Beyond the id, every server has its own words."""

    id: str
    max_model_len: Any = None
    context_length: Any = None
    context_window: Any = None

    @property
    def context_tokens(self) -> int | None:
        said = (self.max_model_len, self.context_length, self.context_window)
        return next((value for value in said if type(value) is int and value > 0), None)


class _ForeignList(msgspec.Struct, frozen=True):
    data: tuple[ForeignModel, ...] = ()


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | int | None = None


class _ErrorEnvelope(msgspec.Struct, frozen=True):
    error: _ErrorBody


def told_message(body: bytes) -> str:
    """The message in an error body, or empty."""
    told = _told(body)
    return told.message if told else ""


def _told(body: bytes) -> _ErrorBody | None:
    try:
        return msgspec.json.decode(body, type=_ErrorEnvelope).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def error_from(node: str, status: int, body: bytes) -> CortexError:
    """The error a node's answer tells, in its own words; whatever it sent, something readable comes out."""
    told = _told(body)
    if told is None:
        text = body[:200].decode("utf-8", "replace")
        return UpstreamUnavailable(f"Node {node} answered {status} with something that is not our error: {text!r}")
    if isinstance(told.code, str):
        return from_code(told.code, told.message)
    return UpstreamUnavailable(f"Node {node} answered {status}: {told.message}")


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
    ) -> None:
        self.section = section
        self.name = section.name
        limits = UpstreamLimits(connect_s=connect_timeout_s, silence_s=idle_timeout_s)
        self.pool = Pool(section.endpoint.rstrip("/").removesuffix("/v1"), ticker, limits)
        self.headers: Headers = ((b"authorization", f"Bearer {key}".encode()),) if key else ()
        """What every call to this node carries."""

    @classmethod
    def of(cls, section: NeuronSection, ticker: Ticker, gateway: GatewaySection, env: Mapping[str, str]) -> NodeClient:
        """The node that `section` describes, with its key from `env`."""
        key = env.get(section.key_env) if section.key_env is not None else None
        if section.key_env is not None and not key:
            log.warning("node %s: the environment variable %s is not set", section.name, section.key_env)
        return cls(
            section,
            ticker,
            key=key,
            connect_timeout_s=gateway.connect_timeout_s,
            idle_timeout_s=gateway.idle_timeout_s,
        )

    async def discovery(self) -> Discovery:
        """Raises UpstreamFault or CortexError, as all calls here."""
        return await self._get(b"/discovery", Discovery)

    async def health(self) -> Health:
        return await self._get(b"/health", Health)

    async def foreign_models(self) -> tuple[ForeignModel, ...]:
        """What an OpenAI-compatible server offers."""
        return (await self._get(b"/v1/models", _ForeignList)).data

    async def load(self, request: LoadRequest) -> ModelStatus:
        """Ensure the model is ready on this node; returns when it is. Raises the node's reason when it cannot be.

        The node may answer at once and load on, or hold the answer until the end: both are followed.
        """
        status = await self._post(b"/models/load", request, ModelStatus, LOAD_CALL_TIMEOUT_S)
        while status.state in _CHANGING:
            await asyncio.sleep(WATCH_INTERVAL_S)
            status = await self._status(request.model_id)
        if status.state is not ModelState.READY:
            raise LoadFailed(status.reason or f"the node says the model is {status.state}")
        return status

    async def unload(self, request: UnloadRequest, *, timeout_s: float) -> ModelStatus:
        """Ensure the model is gone from this node's devices; returns when it is. With `sleep` it may sleep then."""
        status = await self._post(b"/models/unload", request, ModelStatus, timeout_s)
        while status.state is ModelState.UNLOADING:
            await asyncio.sleep(WATCH_INTERVAL_S)
            status = await self._status(request.model_id)
        absent = {ModelState.COLD, ModelState.FAILED} | ({ModelState.ASLEEP} if request.sleep else set())
        if status.state not in absent:
            raise LoadFailed(f"the node says the model is {status.state} after it was told to unload it")
        return status

    async def spent(self, request_id: str) -> Usage:
        """What was done for a request whose client has left."""
        return await self._get(f"/requests/{quote(request_id, safe='')}/usage".encode(), Usage, SPENT_TIMEOUT_S)

    async def recycle(self, device: int, *, timeout_s: float) -> bool:
        """Replace the worker of an empty device; False when the device is not empty after all."""
        return (await self._post(f"/devices/{device}/recycle".encode(), {}, Recycled, timeout_s)).recycled

    async def _status(self, model: str) -> ModelStatus:
        for status in (await self.health()).models:
            if status.id == model:
                return status
        return ModelStatus(id=model, state=ModelState.COLD)

    async def _get(self, target: bytes, kind: type[T], timeout_s: float = POLL_TIMEOUT_S) -> T:
        return await self._fetch(b"GET", target, b"", kind, timeout_s)

    async def _post(self, target: bytes, value: Any, kind: type[T], timeout_s: float) -> T:
        return await self._fetch(b"POST", target, msgspec.json.encode(value), kind, timeout_s)

    async def _fetch(self, method: bytes, target: bytes, body: bytes, kind: type[T], timeout_s: float) -> T:
        headers = [*self.headers, (b"content-type", b"application/json")]
        answer = await self.pool.fetch(method, target, headers, body, timeout_s=timeout_s)
        if answer.status >= 400:
            raise error_from(self.name, answer.status, answer.body)
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise UpstreamUnavailable(
                f"node {self.name} answered {target.decode()} with nonsense: {problem}"
            ) from problem
