"""What clients that are not operators see of an error.

Messages name nodes, files and models, for operators. Others get the same error without them.
"""

from __future__ import annotations

from cortex.wire import errors
from cortex.wire.errors import CortexError, LoadFailed

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
