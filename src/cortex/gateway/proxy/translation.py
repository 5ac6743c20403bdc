"""Serving any dialect from a node that speaks only OpenAI chat.

Its answer is decoded into our events and told in the client's dialect.
"""

from __future__ import annotations

import time

import msgspec

from cortex.gateway.dispatch.node_client import error_message
from cortex.gateway.proxy.routes import Route
from cortex.http.request import Headers
from cortex.http.upstream.faults import MalformedResponse
from cortex.wire import errors, openai_chat, sse
from cortex.wire import headers as our_headers
from cortex.wire.errors import CortexError
from cortex.wire.events import AnyEvent, Finish, Usage
from cortex.wire.requests import GenerateRequest
from cortex.wire.response import total_usage

_BY_STATUS: dict[int, type[CortexError]] = {
    400: errors.InvalidValue,
    404: errors.ModelNotFound,
    413: errors.BodyTooLarge,
    422: errors.UnsupportedModality,
    429: errors.RateLimitExceeded,
    503: errors.Overloaded,
    529: errors.Overloaded,
}


def foreign_error(status: int, body: bytes) -> CortexError:
    """What a foreign server's refusal means here. A refused key is our misconfiguration, not the client's."""
    kind = _BY_STATUS.get(status, errors.UpstreamUnavailable)
    return kind(error_message(body) or f"The node answered {status} without saying why.")


class ChatTranslation:
    """One answer of a chat-only node, on its way to a client of `route`. Used for one attempt, then thrown away."""

    def __init__(self, route: Route, request: GenerateRequest, *, id: str, model: str) -> None:
        self._route = route
        self._request = request
        self._id = id
        self._model = model
        self._created = int(time.time())
        self._status = 200
        self._decoder: openai_chat.ResponseDecoder | None = None
        self._encoder = route.codec.Encoder(request, id=id, created=self._created, model=model)
        self._body = bytearray()
        self._finishes: list[Finish] = []

    @property
    def usage(self) -> Usage | None:
        """What the node said it used, once it did; None where it said nothing that can be believed."""
        total = total_usage(self._finishes)
        return total if total.prompt_tokens or total.completion_tokens else None

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        """The head the client gets: our status for the node's, our content type."""
        del headers  # a foreign server's headers speak of its own dialect
        self._status = status
        if status >= 400:
            return errors.status(foreign_error(status, b""), self._route.family), _JSON
        dropped = self._request.dropped_tools
        told: Headers = ((our_headers.DROPPED_TOOLS.encode(), our_headers.listed(dropped).encode()),) if dropped else ()
        if self._request.stream:
            self._decoder = openai_chat.ResponseDecoder()
            return 200, (*_EVENT_STREAM, *told)
        return 200, (*_JSON, *told)

    def push(self, data: bytes) -> bytes:
        """What the client gets for these bytes: nothing while a whole body is being collected."""
        if self._decoder is None:
            self._body += data
            return b""
        try:
            return self._encode(self._decoder.feed(data))
        except CortexError as problem:
            raise MalformedResponse(problem.message) from problem

    def finish(self) -> bytes:
        """The rest of the answer. Raises `MalformedResponse` when the node's was not complete."""
        if self._status >= 400:
            error = foreign_error(self._status, bytes(self._body))
            return msgspec.json.encode(errors.envelope(error, self._route.family))
        try:
            if self._decoder is not None:
                return self._encode(self._decoder.finish())
            events = openai_chat.unfold(bytes(self._body))
            self._note(events)
            return self._route.codec.fold(events, self._request, id=self._id, created=self._created, model=self._model)
        except CortexError as problem:
            raise MalformedResponse(problem.message) from problem

    def _encode(self, events: list[AnyEvent]) -> bytes:
        self._note(events)
        return b"".join(map(self._encoder.encode, events))

    def _note(self, events: list[AnyEvent]) -> None:
        self._finishes += [event for event in events if isinstance(event, Finish)]


_JSON: Headers = ((b"content-type", b"application/json"),)
_EVENT_STREAM: Headers = ((b"content-type", sse.CONTENT_TYPE.encode()), (b"cache-control", b"no-cache"))
