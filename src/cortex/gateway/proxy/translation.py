"""Serves any dialect from a node that speaks only OpenAI chat.

The node's response is decoded into our events, which are encoded in the client's dialect.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from cortex.foreign.chat_response import ForeignResponse
from cortex.gateway.proxy.routes import InferenceRoute
from cortex.http.request import Headers
from cortex.http.upstream.faults import MalformedResponse, ResponseTooLarge
from cortex.wire.dialects.openai_chat.upstream_response import foreign_error
from cortex.wire.error_encoding import from_code
from cortex.wire.errors import CortexError
from cortex.wire.events import (
    AnyEvent,
    Failure,
    Finish,
    Logprobs,
    ReasoningDelta,
    Start,
    TextDelta,
    Timing,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from cortex.wire.node import headers as our_headers
from cortex.wire.requests import GenerateRequest
from cortex.wire.response import total_usage

MAX_STREAM_BYTES = 64 * 1024 * 1024
"""Limit of the text held of a translated stream, because some dialects repeat all of it in the last event."""
_EVENT_BYTES = 16
_CALL_BYTES = 256
_LOGPROB_BYTES = 64


class ChatTranslation:
    """Translates one response of a chat-only node for a client of `route`. Each attempt needs a new one."""

    def __init__(
        self,
        route: InferenceRoute,
        request: GenerateRequest,
        *,
        id: str,
        model: str,
        show: Callable[[CortexError], CortexError] = lambda error: error,
    ) -> None:
        """`show` redacts an error inside a stream for the client."""
        self._show = show
        self._route = route
        self._request = request
        self._id = id
        self._model = model
        self._created = int(time.time())
        self._response = ForeignResponse(is_stream=request.stream)
        self._encoder = route.codec.new_encoder(request, id=id, created=self._created, model=model)
        self._finishes: list[Finish] = []
        self._num_held_bytes = 0
        """Estimated bytes that decoder and encoder keep of a stream until its end."""
        self.gateway_s = 0.0
        """How long the request was held back here."""
        self._began_at = time.monotonic()
        self._first_at: float | None = None
        """When the first event arrived."""

    @property
    def usage(self) -> Usage | None:
        """The usage that the node reported; None when it reported none."""
        total = total_usage(self._finishes)
        return total if total.prompt_tokens or total.completion_tokens else None

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        """The head for the client: our status for the node's, and our content type."""
        self._response.head(status, headers)
        if status >= 400:
            return self._route.family.status(foreign_error(status, b"")), _JSON
        notes = our_headers.notes(self._request)
        extra = tuple((name.encode(), value.encode()) for name, value in notes.items())
        if self._request.stream:
            content_type = (b"content-type", self._route.codec.content_type.encode())
            return 200, (content_type, _NOT_CACHED, *extra)
        return 200, (*_JSON, *extra)

    def push(self, data: bytes) -> bytes:
        """Events for the client; nothing while a whole body is being collected."""
        try:
            return self._encode(self._response.feed(data))
        except CortexError as problem:
            raise MalformedResponse(problem.message) from problem

    def finish(self) -> bytes:
        """The end of the response. Raises `MalformedResponse` when the node's was not complete."""
        if (error := self._response.error) is not None:
            return msgspec.json.encode(self._route.family.envelope(error))
        try:
            events = self._response.finish()
            if self._request.stream:
                return self._encode(events)
            events = self._timed(events)
            self._collect_finishes(events)
            return self._route.codec.fold(events, self._request, id=self._id, created=self._created, model=self._model)
        except CortexError as problem:
            raise MalformedResponse(problem.message) from problem

    def _timed(self, events: list[AnyEvent]) -> list[AnyEvent]:
        """`events` with measured durations and those that the server reported. A whole response counts as decoded."""
        if not events:
            return events
        now = time.monotonic()
        first_at = self._first_at = self._first_at or (self._began_at if self._response.is_whole else now)
        measured = Timing(gateway_s=self.gateway_s, prefill_s=first_at - self._began_at, decode_s=now - first_at)
        return [
            msgspec.structs.replace(each, timing=measured.with_reported(each.timing))
            if isinstance(each, Finish)
            else each
            for each in events
        ]

    def _encode(self, events: list[AnyEvent]) -> bytes:
        events = self._timed(events)
        self._collect_finishes(events)
        self._num_held_bytes += sum(map(_held_bytes, events))
        if self._num_held_bytes > MAX_STREAM_BYTES:
            raise ResponseTooLarge(f"its stream has over {MAX_STREAM_BYTES} bytes of text, more than is translated")
        return b"".join(self._encoder.encode(self._shown(event)) for event in events)

    def _shown(self, event: AnyEvent) -> AnyEvent:
        if not isinstance(event, Failure):
            return event
        error = self._show(from_code(event.code, event.message))
        return Failure(code=event.code, message=error.message)

    def _collect_finishes(self, events: list[AnyEvent]) -> None:
        self._finishes += [event for event in events if isinstance(event, Finish)]


def _held_bytes(event: AnyEvent) -> int:
    """Estimated bytes that a dialect may keep of an event until the end of the response."""
    match event:
        case TextDelta(text=text) | ReasoningDelta(text=text) | ToolCallDelta(arguments=text):
            return _EVENT_BYTES + len(text)
        case Start() | ToolCallStart():
            return _CALL_BYTES
        case Logprobs(tokens=tokens):
            return _LOGPROB_BYTES * sum(1 + len(token.top) for token in tokens)
        case _:
            return _EVENT_BYTES


_JSON: Headers = ((b"content-type", b"application/json"),)
_NOT_CACHED = (b"cache-control", b"no-cache")
