"""The error tree: everything that can go wrong in a way a client or an operator should read.

A class knows how it looks on each dialect; a message says what happened and what to do next.
Raised anywhere, encoded once at the boundary (`envelope`). No plain-text error leaves a program.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

MAX_ECHO = 200
"""Characters of a client's own text that an error repeats."""
MAX_MESSAGE = 4000
"""Characters of a whole error message, whatever it was made of."""


def shorten(text: str, limit: int = MAX_ECHO) -> str:
    """`text` as an error may repeat it: whole when it is short, else its start and an ellipsis, `limit` in all."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class Family(StrEnum):
    """The two shapes in which clients read errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class CortexError(Exception):
    """Something went wrong inside; the client did nothing wrong and may try again later."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    openai_type: ClassVar[str] = "server_error"
    anthropic_type: ClassVar[str] = "api_error"
    anthropic_status: ClassVar[int | None] = None
    """Where Anthropic clients expect another status than OpenAI's (529 for overloaded)."""
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        # Capped here, where every error comes by: no encoder of a dialect can forget to.
        self.message = shorten(message, MAX_MESSAGE)
        super().__init__(self.message)
        self.param = None if param is None else shorten(param)
        self.retry_after_s = retry_after_s if retry_after_s is not None else (1.0 if self.retryable else None)
        self.details = dict(details or {})
        """Machine-readable facts added to the OpenAI envelope, such as the per-device table."""


class _InvalidRequest(CortexError):
    """The request cannot be served as it is, now or later."""

    status = 400
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class MalformedJSON(_InvalidRequest):
    """The body is not JSON, or not a JSON object."""

    code = "malformed_json"


class MissingModel(_InvalidRequest):
    """The body names no model."""

    code = "missing_model"


class InvalidValue(_InvalidRequest):
    """A field has a value that cannot be honoured; `param` names it."""

    code = "invalid_value"


class ContextLengthExceeded(_InvalidRequest):
    """The prompt is longer than the model's context."""

    code = "context_length_exceeded"


class PromptTooLongForMemory(_InvalidRequest):
    """The prompt fits the model but not the memory of the node that serves it."""

    status = 413
    code = "prompt_too_long_for_memory"


class BodyTooLarge(_InvalidRequest):
    """The request body is over the configured limit."""

    status = 413
    code = "body_too_large"
    anthropic_type = "request_too_large"


class MalformedHTTP(_InvalidRequest):
    """The bytes are not an HTTP/1.1 request, or one whose extent is open to interpretation."""

    code = "malformed_http"


class HeadersTooLarge(_InvalidRequest):
    """The request line and headers are over the limit."""

    status = 431
    code = "headers_too_large"


class RequestTimeout(_InvalidRequest):
    """The client began a request and did not finish sending it."""

    status = 408
    code = "request_timeout"


class InvalidAPIKey(CortexError):
    """No key, or one that nobody issued."""

    status = 401
    code = "invalid_api_key"
    openai_type = "invalid_request_error"
    anthropic_type = "authentication_error"


class ModelNotAllowed(CortexError):
    """The key is good but not for this model."""

    status = 403
    code = "model_not_allowed"
    openai_type = "invalid_request_error"
    anthropic_type = "permission_error"


class OperatorOnly(CortexError):
    """The key is good, but only an operator's may do that."""

    status = 403
    code = "operator_only"
    openai_type = "invalid_request_error"
    anthropic_type = "permission_error"


class ModelNotFound(CortexError):
    """No model or alias of that name; the message carries near misses."""

    status = 404
    code = "model_not_found"
    openai_type = "invalid_request_error"
    anthropic_type = "not_found_error"


class RouteNotFound(CortexError):
    """No such path, or not with that method."""

    status = 404
    code = "route_not_found"
    openai_type = "invalid_request_error"
    anthropic_type = "not_found_error"


class MethodNotAllowed(RouteNotFound):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class RateLimitExceeded(CortexError):
    """Too many requests in the window; `Retry-After` says when there is room again."""

    status = 429
    code = "rate_limit_exceeded"
    openai_type = "requests"
    anthropic_type = "rate_limit_error"
    retryable = True


class InsufficientQuota(CortexError):
    """The key's token budget is spent."""

    status = 429
    code = "insufficient_quota"
    openai_type = "insufficient_quota"
    anthropic_type = "rate_limit_error"


class TemplateRenderFailed(CortexError):
    """The model's own chat template refused this conversation."""

    status = 422
    code = "template_render_failed"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class UnsupportedModality(CortexError):
    """The model cannot do that: images, tools, embeddings."""

    status = 422
    code = "unsupported_modality"
    openai_type = "invalid_request_error"
    anthropic_type = "invalid_request_error"


class Overloaded(CortexError):
    """The queue is full, or the wait was too long."""

    status = 503
    code = "overloaded"
    openai_type = "server_error"
    anthropic_type = "overloaded_error"
    anthropic_status = 529
    retryable = True


class Recovering(Overloaded):
    """The model's device failed and is coming back by itself."""

    code = "recovering"


class ShuttingDown(Overloaded):
    """The program is going down and takes no new work."""

    code = "shutting_down"


class InsufficientCapacity(CortexError):
    """The model fits nowhere; `details` has need and have for each device."""

    status = 507
    code = "insufficient_capacity"


class LoadFailed(CortexError):
    """The node could not load the model; the message is the node's own reason."""

    status = 502
    code = "load_failed"


class UpstreamUnavailable(CortexError):
    """The node died or refused before its first byte, and retries are spent."""

    status = 502
    code = "upstream_unavailable"
    retryable = True


class UpstreamInterrupted(CortexError):
    """The node died after its first byte; sent inside the stream."""

    status = 502
    code = "upstream_interrupted"
    retryable = True


class GenerationFailed(CortexError):
    """The engine ended this request: unhealthy numbers or an internal fault."""

    code = "generation_failed"


def _tree(root: type[CortexError]) -> list[type[CortexError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


BY_CODE: dict[str, type[CortexError]] = {
    cls.code: cls for cls in _tree(CortexError) if not cls.__name__.startswith("_")
}


def from_code(code: str, message: str) -> CortexError:
    """The error a `Failure` event or another program's envelope tells of; an unknown code is an internal error."""
    return BY_CODE.get(code, CortexError)(message)


def status(error: CortexError, family: Family) -> int:
    """The HTTP status this error has for clients of `family`."""
    if family is Family.ANTHROPIC and error.anthropic_status is not None:
        return error.anthropic_status
    return error.status


def envelope(error: CortexError, family: Family) -> dict[str, Any]:
    """The JSON body, or in-stream error payload, that clients of `family` expect."""
    if family is Family.ANTHROPIC:
        return {"type": "error", "error": {"type": error.anthropic_type, "message": error.message}}
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
    """`Retry-After` in whole seconds, at least one, where waiting helps."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, round(error.retry_after_s)))}
