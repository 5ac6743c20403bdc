"""Errors as Anthropic's clients expect them: the type follows from the status."""

from __future__ import annotations

from typing import Any, Final

from cortex.wire.error_encoding import Family
from cortex.wire.errors import CortexError, Overloaded

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "not_found_error",
    503: "overloaded_error",
}


def _envelope(error: CortexError) -> dict[str, Any]:
    other = "invalid_request_error" if error.status < 500 else "api_error"
    return {"type": "error", "error": {"type": _TYPES.get(error.status, other), "message": error.message}}


def _status(error: CortexError) -> int:
    return 529 if error.status == Overloaded.status else error.status


ANTHROPIC = Family(
    "anthropic", _envelope, _status, prefix="/v1/messages", header=b"anthropic-version", id_header=b"request-id"
)
