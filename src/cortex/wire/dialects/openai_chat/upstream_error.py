"""Decodes the error of another server."""

from __future__ import annotations

import msgspec

from cortex.wire import errors
from cortex.wire.error_encoding import BY_CODE
from cortex.wire.errors import CortexError

_BY_STATUS: dict[int, type[CortexError]] = {
    400: errors.InvalidValue,
    404: errors.ModelNotFound,
    413: errors.BodyTooLarge,
    422: errors.InvalidValue,
    429: errors.RateLimitExceeded,
    503: errors.Overloaded,
    529: errors.Overloaded,
}


class _Body(msgspec.Struct):
    message: str = ""
    code: object = None


class _Envelope(msgspec.Struct):
    error: _Body


def foreign_error(status: int, body: bytes) -> CortexError:
    """A foreign server's error as ours. A rejected key is this gateway's misconfiguration, not the client's fault. Of
    errors of the request the code stays, because clients recognise a prompt that is too long by it."""
    kind = _BY_STATUS.get(status, errors.UpstreamUnavailable)
    try:
        error = msgspec.json.decode(body, type=_Envelope).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = _Body()
    if kind is errors.InvalidValue and isinstance(error.code, str):
        named = BY_CODE.get(error.code, kind)
        kind = named if named.status == kind.status else kind
    return kind(error.message or f"The node responded with status {status} and no message.")
