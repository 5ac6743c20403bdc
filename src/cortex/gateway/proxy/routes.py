"""The inference routes with their dialects, and how errors are encoded for their clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from cortex.fleet.topology import Abilities
from cortex.gateway.dispatch.leases import RequestKind
from cortex.http.head import stream_headers
from cortex.http.observer import Keepalive
from cortex.http.request import Headers
from cortex.http.routing import Route
from cortex.http.server.server import Response
from cortex.wire import error_encoding, sse
from cortex.wire.dialects.dialect import Dialect
from cortex.wire.dialects.registry import DIALECTS, family
from cortex.wire.error_encoding import Family
from cortex.wire.errors import CortexError
from cortex.wire.events import AnyEvent, Finish, Start, Usage
from cortex.wire.opaque.routes import PATHS as OPAQUE_PATHS
from cortex.wire.pooling.parse import MODEL_OPTIONAL
from cortex.wire.pooling.parse import ROUTES as POOLING_ROUTES
from cortex.wire.requests import GenerateRequest

UPSTREAM_PATH = b"/upstream/{model}"
JSON_HEADERS = ((b"content-type", b"application/json"),)

HttpHandler = Callable[..., None]
"""Gets the exchange, and the parameters of the path by name. It responds in every case, now or later, or raises
CortexError."""
HttpRoute = Route[HttpHandler]


@dataclass(frozen=True, slots=True, eq=False)
class InferenceRoute:
    """One inference path."""

    path: bytes
    dialect: str
    need: RequestKind = "response"
    """What it needs from a node."""
    target: bytes = b""
    """The path at a node, if different."""
    # Values that every request reads are computed once.
    generates: bool = field(init=False)
    """Whether it generates text. Only such responses may be streamed."""
    runs_model: bool = field(init=False)
    """Whether it needs a loaded model. Then it may wait for a load, and is retried at another node."""
    uses_tokens: bool = field(init=False)
    """Whether its requests are charged."""
    codec: Dialect = field(init=False)
    family: Family = field(init=False)
    reports_durations: bool = field(init=False)
    """Whether its responses report how long the request waited."""
    is_upstream: bool = field(init=False)
    """Whether its requests name their model in the path."""
    may_lack_model: bool = field(init=False)
    """Whether its clients need not name a model."""
    span_name: str = field(init=False)
    """The span name of its requests."""

    def __post_init__(self) -> None:
        codec = DIALECTS[self.dialect]
        object.__setattr__(self, "generates", self.need == "response")
        object.__setattr__(self, "runs_model", self.need != "count")
        object.__setattr__(self, "uses_tokens", self.need != "count")
        object.__setattr__(self, "codec", codec)
        object.__setattr__(self, "family", codec.family)
        object.__setattr__(self, "reports_durations", self.family.reports_durations)
        object.__setattr__(self, "is_upstream", self.path == UPSTREAM_PATH)
        object.__setattr__(self, "may_lack_model", self.path.decode() in MODEL_OPTIONAL)
        object.__setattr__(self, "span_name", f"POST {self.path.decode()}")

    def silence_s(self, idle_timeout_s: float, whole_silence_s: float, *, is_stream: bool) -> float:
        """How long a node that responds to polls may be silent in a response."""
        return max(idle_timeout_s, whole_silence_s) if self.runs_model and not is_stream else idle_timeout_s

    def outlasts_polls(self, abilities: Abilities) -> bool:
        """Whether a node may miss polls while it serves such a request: a foreign speech or image server may handle one
        request at a time."""
        return self.need == "relay" and not abilities.takes_orders

    def id_headers(self, request_id: bytes) -> Headers:
        """The request's id under the names that clients of this path know."""
        ours, theirs = (b"x-request-id", request_id), self.family.id_header
        return (ours,) if theirs is None else ((theirs, request_id), ours)

    def state_reply(self, model: str, *, unloads: bool) -> bytes:
        """The response to a request without a prompt, which loads a model or unloads it."""
        now = int(time.time())
        request = GenerateRequest(model=model, loads_only=True, keep_alive_s=0 if unloads else None)
        events: list[AnyEvent] = [Start(id="", model=model, created=now), Finish(reason="stop", usage=Usage())]
        return self.codec.fold(events, request, id="", created=now, model=model)


_GENERATING = {name: InferenceRoute(codec.path.encode(), name) for name, codec in DIALECTS.items()}
CHAT, RESPONSES = _GENERATING["openai_chat"], _GENERATING["openai_responses"]
COUNT_TOKENS = InferenceRoute(b"/v1/messages/count_tokens", "anthropic_messages", need="count")
INPUT_TOKENS = InferenceRoute(b"/v1/responses/input_tokens", "openai_responses", need="count")
TOKENIZE = InferenceRoute(b"/tokenize", "openai_chat", need="count")
DETOKENIZE = InferenceRoute(b"/detokenize", "openai_chat", need="count")
APPLY_TEMPLATE = InferenceRoute(b"/apply-template", "openai_chat", need="count")
OLLAMA_EMBED = InferenceRoute(b"/api/embed", "ollama_chat", need="embeddings", target=b"/v1/embeddings")
OLLAMA_EMBEDDINGS = InferenceRoute(b"/api/embeddings", "ollama_chat", need="embeddings", target=b"/v1/embeddings")
POOLING = tuple(
    InferenceRoute(path.encode(), "openai_chat", need="embeddings" if "embed" in path else "rerank")
    for path in POOLING_ROUTES
)
"""Embeddings, rerank and scores; their errors are those of OpenAI."""

OPAQUE = {path.encode(): InferenceRoute(path.encode(), "openai_chat", need="relay") for path in OPAQUE_PATHS}
"""Speech and images; their errors are those of OpenAI."""
UPSTREAM = InferenceRoute(UPSTREAM_PATH, "openai_chat", need="relay")

ROUTES: dict[bytes, InferenceRoute] = {
    route.path: route
    for route in (
        *_GENERATING.values(),
        INPUT_TOKENS,
        COUNT_TOKENS,
        TOKENIZE,
        DETOKENIZE,
        APPLY_TEMPLATE,
        *POOLING,
        OLLAMA_EMBED,
        OLLAMA_EMBEDDINGS,
    )
}


@lru_cache(maxsize=16)
def keepalive(dialect: str, interval_s: float) -> Keepalive:
    """The keepalive for streams in this dialect."""
    codec = DIALECTS[dialect]
    return Keepalive(codec.keepalive, interval_s, stream_headers(codec.content_type))


def loading_note(route: InferenceRoute, model: str, text: str, *, as_reasoning: bool) -> bytes:
    """A note for a streaming client while its model loads: reasoning, if the dialect permits a chunk before the node's,
    else an SSE comment. Empty if the dialect has neither."""
    codec = route.codec
    if as_reasoning and codec.loading_chunk is not None:
        return codec.loading_chunk(model, text, time.time())
    return sse.comment(" ".join(text.splitlines())) if codec.content_type == sse.CONTENT_TYPE else b""


def family_of(path: bytes, header: Callable[[bytes], bytes | None] | None = None) -> Family:
    """The clients that send requests to `path`. `header` reads the headers of the request."""
    return family(path.decode("latin-1"), header)


def rejection_response(error: CortexError, path: bytes) -> Response:
    """The response to a request for `path` that was rejected before it was complete."""
    return error_response(error, family_of(path))


def json_response(value: object, status: int = 200) -> Response:
    """A response with `value` as its JSON body."""
    return Response(status, JSON_HEADERS, msgspec.json.encode(value))


def error_response(error: CortexError, family: Family) -> Response:
    """The response for `error`, in the format of `family`."""
    extra = tuple((name.encode(), value.encode()) for name, value in error_encoding.headers(error).items())
    body = msgspec.json.encode(family.envelope(error))
    return Response(family.status(error), (*JSON_HEADERS, *extra), body)
