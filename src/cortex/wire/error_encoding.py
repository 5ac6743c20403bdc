"""Encodes an error: the status and body that a family of clients expects, and headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cortex.wire import errors
from cortex.wire.errors import CortexError, LoadFailed, Recovering
from cortex.wire.node.headers import PROMPT_TOKENS, RECOVERS
from cortex.wire.words import whole_seconds

_MESSAGES: dict[type[CortexError], str] = {
    CortexError: "The gateway could not handle this request. Send it again, or ask the operator.",
    errors.ModelNotFound: "There is no such model for this key; GET /v1/models lists those that it may use.",
    errors.Overloaded: "There is no room for this request now. Send it again later.",
    errors.Draining: "The model is out of service for a while. Send the request again later.",
    errors.Recovering: "The model is being recovered. Send the request again later.",
    errors.InsufficientCapacity: "There is not enough memory for this model. Use another one, or ask the operator.",
    errors.ModelUnsupported: "The model is not supported here. Use another one, or ask the operator.",
    LoadFailed: "The model could not be loaded. Use another one, or ask the operator.",
    errors.UpstreamUnavailable: "The model cannot be reached now. Send the request again later.",
    errors.UpstreamInterrupted: "The response was interrupted. Send the request again.",
    errors.GenerationFailed: "The response could not be generated. Send the request again, or ask the operator.",
}


def public(error: CortexError) -> CortexError:
    """`error` without what only operators may see; the same object if it is about the request alone."""
    kind = type(error)
    message = _MESSAGES.get(kind) or (_MESSAGES[LoadFailed] if isinstance(error, LoadFailed) else None)
    if kind is errors.UnsupportedModality and error.details.get("models"):
        message = "The model cannot do this; GET /v1/models lists what each can."
    if message is None:
        return error
    return kind(message, param=error.param, retry_after_s=error.retry_after_s)


BY_CODE: dict[str, type[CortexError]] = {
    cls.code: cls
    for name, cls in vars(errors).items()
    if not name.startswith("_") and isinstance(cls, type) and issubclass(cls, CortexError)
}


def from_code(code: str, message: str) -> CortexError:
    """The error of a `Failure` event or of another program's envelope; an unknown code is an internal error."""
    return BY_CODE.get(code, CortexError)(message)


def _status(error: CortexError) -> int:
    return error.status


def _envelope(error: CortexError) -> dict[str, Any]:
    # The message comes first, for people who read the body, and no detail replaces it.
    named = {"message": error.message, "type": error.openai_type, "code": error.code, "param": error.param}
    return {"error": {**named, **error.details, **named}}


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """The conventions of one vendor's API on all its routes, also if a request names no dialect."""

    name: str
    envelope: Callable[[CortexError], dict[str, Any]] = _envelope
    """The JSON body of an error, or its payload in a stream."""
    status: Callable[[CortexError], int] = _status
    """The HTTP status of an error."""
    prefix: str | None = None
    """The prefix of paths that only this vendor has."""
    header: bytes | None = None
    """A header that its clients send with every request, also to paths that other vendors have."""
    id_header: bytes | None = None
    """The header in which its clients look for the id of a request."""
    declares_bodies: bool = True
    """Whether its clients send the Content-Type of a body."""
    reports_durations: bool = False
    """Whether its responses say how long the request waited."""


OPENAI = Family("openai")
"""Also the family of routes that are no vendor's."""


def headers(error: CortexError) -> dict[str, str]:
    """`Retry-After` in whole seconds, at least one, for errors with a delay; `Allow` for a method that is not allowed;
    the size of a prompt over a budget; a mark that the model is recovering."""
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
