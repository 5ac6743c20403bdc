"""What a client may see of an error.

Messages name nodes, files and models, for operators. A client with another key gets the same error without them; the
log has the full text. On an open gateway every client counts as an operator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from cortex.gateway.ledger.keys import KeySection, may_use
from cortex.http.request import Headers
from cortex.wire import errors
from cortex.wire.errors import CortexError, Family

log = logging.getLogger(__name__)

_PUBLIC: dict[type[CortexError], str] = {
    CortexError: "The gateway could not handle this request. Send it again, or ask the operator.",
    errors.ModelNotFound: "There is no such model for this key; GET /v1/models lists those that it may use.",
    errors.Overloaded: "There is no room for this request now. Send it again later.",
    errors.Recovering: "The model is being recovered. Send the request again later.",
    errors.InsufficientCapacity: "There is not enough memory for this model. Use another one, or ask the operator.",
    errors.LoadFailed: "The model could not be loaded. Use another one, or ask the operator.",
    errors.UpstreamUnavailable: "The model cannot be reached now. Send the request again later.",
    errors.UpstreamInterrupted: "The response was interrupted. Send the request again.",
    errors.GenerationFailed: "The response could not be generated. Send the request again, or ask the operator.",
}


def shown_to(key: KeySection | None, error: CortexError) -> CortexError:
    """`error` as the owner of `key` may see it; None: a client of an open gateway."""
    message = _PUBLIC.get(type(error))
    if key is None or key.operator or message is None or _names_only_models_of(key, error):
        return error
    log.info("error shown to the key %s without details: %s: %s", key.name, error.code, error.message)
    return type(error)(message, param=error.param, retry_after_s=error.retry_after_s)


def _names_only_models_of(key: KeySection, error: CortexError) -> bool:
    """Whether it is the catalogue's error for an unknown name, whose suggestions are all models of the key."""
    suggestions = error.details.get("near_misses")
    return isinstance(suggestions, list) and all(may_use(key, model) for model in suggestions)


class ErrorRedaction:
    """Rewrites an error response of a node for the owner of `key`. A translation of the relay."""

    def __init__(self, key: KeySection, family: Family, read: Callable[[int, bytes], CortexError]) -> None:
        """`read` makes an error of a node's status and body."""
        self._key = key
        self._family = family
        self._read = read
        self._status = 500
        self._body = bytearray()

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        self._status = status
        return status, headers

    def push(self, data: bytes) -> bytes:
        self._body += data
        return b""

    def finish(self) -> bytes:
        body = bytes(self._body)
        error = self._read(self._status, body)
        shown = shown_to(self._key, error)
        return body if shown is error else msgspec.json.encode(errors.envelope(shown, self._family))


def hides_errors_of(key: KeySection | None, status: int) -> bool:
    """Whether a node's response with this status may name what the owner of `key` must not see.

    Other errors are about the request itself.
    """
    return key is not None and not key.operator and (status == 404 or status >= 500)
