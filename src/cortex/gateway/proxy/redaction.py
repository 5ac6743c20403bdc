"""Redacts errors: only operators see nodes, files and other clients' models.

The log has the full text. On an open gateway every client counts as an operator.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from cortex.foreign.chat_response import MAX_ERROR_BYTES
from cortex.foreign.shown_error import ABOUT_REQUESTS, shown_error, shown_text
from cortex.gateway.ledger.keys import KeySection, may_use
from cortex.gateway.proxy.routes import JSON_HEADERS
from cortex.http.event_boundary import EventBoundary
from cortex.http.request import Headers
from cortex.http.upstream.faults import ResponseTooLarge
from cortex.wire import errors, sse
from cortex.wire.dialects.registry import client_field
from cortex.wire.error_encoding import Family, public
from cortex.wire.errors import CortexError, UpstreamInterrupted, shorten

log = logging.getLogger(__name__)

_ERROR_FIELD = b'"error"'
_OF_REQUESTS = (304, 400, 404, 413, 415, 422)
_EVENTS = re.compile(rb".+?(?:\r?\n\r?\n|\r\r|\Z)", re.DOTALL)


class _ErrorEvent(msgspec.Struct, frozen=True):
    error: Any = None


def shown_to(key: KeySection | None, error: CortexError) -> CortexError:
    """`error` as the owner of `key` (None: a client of an open gateway) may see it."""
    if key is None or key.operator or _names_only_models_of(key, error):
        return error
    shown = public(error)
    if shown is not error:
        log.info("error shown to the key %s without details: %s: %s", key.name, error.code, error.message)
    return shown


def _names_only_models_of(key: KeySection, error: CortexError) -> bool:
    """Whether it suggests models, and all of them belong to the key."""
    suggestions = error.details.get("near_misses", error.details.get("models"))
    return isinstance(suggestions, list) and all(may_use(key, model) for model in suggestions)


class ErrorRedaction:
    """Rewrites an error response of a node for the owner of `key`. A translation of the relay.

    A node that rejects the gateway's key is reported as unavailable, so that the client does not blame its own key.
    """

    def __init__(self, key: KeySection | None, family: Family, read: Callable[[int, bytes], CortexError]) -> None:
        """`read` makes an error of a node's status and body."""
        self._key = key
        self._family = family
        self._read = read
        self._status = 500
        self._body = bytearray()

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        self._status = status
        if status == errors.InvalidAPIKey.status:
            return self._family.status(self._read(status, b"")), headers
        return status, headers

    def push(self, data: bytes) -> bytes:
        self._body += data
        if len(self._body) > MAX_ERROR_BYTES:
            raise ResponseTooLarge(f"its error response (status {self._status}) is over {MAX_ERROR_BYTES} bytes")
        return b""

    def finish(self) -> bytes:
        body = bytes(self._body)
        error = self._read(self._status, body)
        shown = shown_to(self._key, error)
        is_unchanged = shown is error and self._status != errors.InvalidAPIKey.status
        return body if is_unchanged else msgspec.json.encode(self._family.envelope(shown))


class ForeignRedaction(ErrorRedaction):
    """Rewrites an error of a foreign server: clients get its kind, and of one about their request the text."""

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        self._status = status
        kept = (pair for pair in headers if pair[0] == b"retry-after")
        return self._family.status(self._read(status, b"")), (*JSON_HEADERS, *kept)

    def finish(self) -> bytes:
        return msgspec.json.encode(self._family.envelope(self._read(self._status, bytes(self._body))))


class StreamRedaction:
    """Rewrites error events inside the stream of a foreign server for the owner of `key`. A translation of the relay.

    Neurons do this themselves, so that their streams are relayed unread.
    """

    def __init__(self, key: KeySection, encode: Callable[[CortexError], bytes]) -> None:
        """`encode` makes an error event in the dialect of the stream."""
        self._key = key
        self._encode = encode
        self._boundary = EventBoundary()

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        return status, headers

    def push(self, data: bytes) -> bytes:
        return self._redacted(self._boundary.push(data))

    def finish(self) -> bytes:
        return self._redacted(self._boundary.flush())

    def _redacted(self, events: bytes) -> bytes:
        if _ERROR_FIELD not in events:  # generated text cannot have it: its quotes are escaped
            return events
        return b"".join(self._redacted_event(event) for event in _EVENTS.findall(events))

    def _redacted_event(self, event: bytes) -> bytes:
        frames = sse.Parser().feed(event) if _ERROR_FIELD in event else []
        for frame in frames:
            try:
                error = msgspec.json.decode(frame.data, type=_ErrorEvent).error
            except msgspec.MsgspecError:
                return event
            if error is not None:
                found = UpstreamInterrupted(f"The node reported: {error}")
                return self._encode(shown_to(self._key, found))
        return event


def is_of_account(status: int) -> bool:
    """Whether a foreign server's response with this status is about this gateway's account there, or about where it is,
    and not about the request."""
    return 300 <= status < 500 and status not in _OF_REQUESTS


def shown_of_foreign(
    key: KeySection, model: str, name: str, others: Iterable[str], dialect: str | None, status: int, body: bytes
) -> CortexError:
    """What the owner of `key` sees of an error that `is_of_account` or of `ABOUT_REQUESTS`. `model`: what the server
    was sent for the client's `name`; `others`: the models that it has; `dialect`: of the client, if the request was
    translated to chat."""
    if body:
        log.info("error shown to the key %s without details: status %d: %s", key.name, status, shorten(repr(body)))
    if status in ABOUT_REQUESTS:
        hidden = [other for other in others if not may_use(key, other)]
        error = shown_error(status, body, model, name, hidden)
        error.param = error.param if dialect is None else client_field(dialect, error.param)
        return error
    if status == errors.RateLimitExceeded.status:
        return errors.RateLimitExceeded("The model's server takes no more requests now. Send the request again later.")
    return public(errors.UpstreamUnavailable(""))


def shown_of_stream(key: KeySection | None, model: str, name: str, error: CortexError) -> CortexError:
    """What the owner of `key` sees of an error inside a foreign server's stream."""
    shown = shown_to(key, error)
    return shown.in_words(shown_text(shown.message, model, name)) if hides_details(key) else shown


def hides_details(key: KeySection | None) -> bool:
    """Whether the owner of `key` must not see the details that errors have for operators."""
    return key is not None and not key.operator


def hides_errors_of(key: KeySection | None, status: int) -> bool:
    """Whether a node's response with this status may name what the owner of `key` must not see.

    Other errors are about the request itself.
    """
    return hides_details(key) and (status == 404 or status >= 500)
