"""Encodes an error for the clients of each dialect: status, body and headers."""

from __future__ import annotations

from typing import Any

from cortex.wire.errors import CortexError, Family, Recovering
from cortex.wire.node.headers import PROMPT_TOKENS, RECOVERS
from cortex.wire.words import whole_seconds


def status(error: CortexError, family: Family) -> int:
    """The HTTP status of this error for clients of `family`."""
    if family is Family.ANTHROPIC and error.anthropic_status is not None:
        return error.anthropic_status
    return error.status


def envelope(error: CortexError, family: Family) -> dict[str, Any]:
    """The JSON body, or in-stream error payload, that clients of `family` expect."""
    if family is Family.ANTHROPIC:
        return {"type": "error", "error": {"type": error.anthropic_type, "message": error.message}}
    if family is Family.OLLAMA:
        return {"error": error.message, "code": error.code}
    return {
        "error": {
            **error.details,
            "message": error.message,
            "type": error.openai_type,
            "code": error.code,
            "param": error.param,
        }
    }


def headers(error: CortexError) -> dict[str, str]:
    """`Retry-After` in whole seconds, at least one, for an error that has a time to wait. `Allow` for a method that is
    not allowed. The size of a prompt that is over a budget. That the model recovers from a fault."""
    found: dict[str, str] = {}
    if error.retry_after_s is not None:
        found["retry-after"] = str(max(1, whole_seconds(error.retry_after_s)))
    if allowed_methods := error.details.get("allowed_methods"):
        found["allow"] = ", ".join(allowed_methods)
    if prompt_tokens := error.details.get("prompt_tokens"):
        found[PROMPT_TOKENS] = str(prompt_tokens)
    if isinstance(error, Recovering):
        found[RECOVERS] = "true"
    return found
