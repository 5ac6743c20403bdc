"""The error tree: every error that a client or an operator can see.

A class has its status and its names for machines; a message says what happened and what to do. Errors are raised
anywhere and encoded once, at the boundary (`error_encoding.py` and the folders of dialects). No program sends a
plain-text error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

MAX_ECHO = 200
"""Characters of a client's own text that an error repeats."""
MAX_MESSAGE = 4000
"""Characters of a whole error message."""


def shorten(text: str, limit: int = MAX_ECHO) -> str:
    """`text` if it has at most `limit` characters, else its start and an ellipsis, together `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _encodable(text: str) -> str:
    """`text` with `?` for lone surrogates, which stand for header bytes that are not UTF-8 and cannot be encoded."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class CortexError(Exception):
    """An internal error. The request was valid and may be sent again later."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    openai_type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        # Capped and encodable here, once for the encoders of all dialects.
        self.message = _encodable(shorten(message, MAX_MESSAGE))
        super().__init__(self.message)
        self.param = None if param is None else _encodable(shorten(param))
        self.retry_after_s = retry_after_s if retry_after_s is not None else (1.0 if self.retryable else None)
        self.details = dict(details or {})
        """Machine-readable facts added to the OpenAI envelope, such as the per-device table."""

    def in_words(self, message: str) -> Self:
        """The same error with another message."""
        return type(self)(message, param=self.param, retry_after_s=self.retry_after_s, details=self.details)


class _InvalidRequest(CortexError):
    """The client must change something before it sends the request again."""

    status = 400
    openai_type = "invalid_request_error"


class MalformedJSON(_InvalidRequest):
    """The body is not JSON, or not a JSON object."""

    code = "malformed_json"


class UnsupportedMediaType(_InvalidRequest):
    """The header of the request says that its body is not JSON."""

    status = 415
    code = "unsupported_media_type"


class MissingModel(_InvalidRequest):
    """The body names no model."""

    code = "missing_model"


class InvalidValue(_InvalidRequest):
    """A field has an unsupported or invalid value; `param` names the field."""

    code = "invalid_value"


class ResponseNotFound(_InvalidRequest):
    """There is no stored response with this id for the client's key."""

    status = 404
    code = "response_not_found"


class ConversationNotFound(ResponseNotFound):
    """There is no conversation with this id for the client's key."""

    code = "conversation_not_found"


class ItemNotFound(ResponseNotFound):
    """A request refers to an item that is not stored."""

    code = "item_not_found"


class PreviousResponseNotFound(_InvalidRequest):
    """A request continues a response that is not stored."""

    code = "previous_response_not_found"


class ContextLengthExceeded(_InvalidRequest):
    """The prompt is longer than the model's context."""

    code = "context_length_exceeded"


class PromptTooLongForMemory(ContextLengthExceeded):
    """The prompt fits the model but not the memory of the node that serves it."""

    code = "prompt_too_long_for_memory"


class PreparationLimitExceeded(_InvalidRequest):
    """Rendering, tokenising or compiling the grammar of this request took more time or memory than the node allows."""

    code = "preparation_limit_exceeded"


class BodyTooLarge(_InvalidRequest):
    """The request body is over the configured limit."""

    status = 413
    code = "body_too_large"


class MalformedHTTP(_InvalidRequest):
    """The bytes are not an HTTP/1.1 request, or its length is ambiguous."""

    code = "malformed_http"


class HeadersTooLarge(_InvalidRequest):
    """The request line and headers are over the limit."""

    status = 431
    code = "headers_too_large"


class RequestTimeout(_InvalidRequest):
    """The client did not finish sending its request in time."""

    status = 408
    code = "request_timeout"


class InvalidAPIKey(_InvalidRequest):
    """The key is missing or unknown."""

    status = 401
    code = "invalid_api_key"


class ModelNotAllowed(_InvalidRequest):
    """The key is valid but not allowed to use this model."""

    status = 403
    code = "model_not_allowed"


class OperatorOnly(_InvalidRequest):
    """The key is valid, but the request needs the key of an operator."""

    status = 403
    code = "operator_only"


class ManagedByFile(_InvalidRequest):
    """The key or group is in the configuration file of the gateway, which only its operator edits."""

    status = 409
    code = "managed_by_file"


class CrossSiteRequest(_InvalidRequest):
    """A web page of another site made a browser send the request."""

    status = 403
    code = "cross_site_request"


class ModelNotFound(_InvalidRequest):
    """There is no model or alias of that name; the message lists similar names."""

    status = 404
    code = "model_not_found"


class NodeNotFound(_InvalidRequest):
    """The fleet has no node of that name; the message lists those that it has. Only operators name nodes."""

    status = 404
    code = "node_not_found"


class GroupClaimed(_InvalidRequest):
    """Another gateway is starting the model on these nodes, or has started it."""

    status = 409
    code = "group_claimed"


class ModelInUse(_InvalidRequest):
    """The order would disturb a model that is in use: it is in memory, pinned, or changing."""

    status = 409
    code = "model_in_use"


class RouteNotFound(_InvalidRequest):
    """There is no such path."""

    status = 404
    code = "route_not_found"


class MethodNotAllowed(RouteNotFound):
    """The path does not accept this method; `details` has those that it accepts as `allowed_methods`."""

    status = 405
    code = "method_not_allowed"


class NotImplementedHere(RouteNotFound):
    """A route that other servers have and this one does not."""

    status = 501
    code = "not_implemented"


class RateLimitExceeded(CortexError):
    """Too many requests per minute; `Retry-After` says when to try again."""

    status = 429
    code = "rate_limit_exceeded"
    openai_type = "requests"
    retryable = True


class InsufficientQuota(CortexError):
    """A budget of the key or its group has too little left; `Retry-After` says when that changes by itself."""

    status = 429
    code = "insufficient_quota"
    openai_type = "insufficient_quota"


class TemplateRenderFailed(_InvalidRequest):
    """The model's chat template rejected this conversation."""

    code = "template_render_failed"


class UnsupportedModality(_InvalidRequest):
    """The model does not support a kind of input or output: pictures, tools, embeddings."""

    code = "unsupported_modality"


class Overloaded(CortexError):
    """The queue is full, or the wait was too long."""

    status = 503
    code = "overloaded"
    openai_type = "server_error"
    retryable = True


class Recovering(Overloaded):
    """The model's device failed and is being recovered, or the model is being loaded again."""

    code = "recovering"


class ModelNotReady(Overloaded):
    """The model of a health check is not loaded."""

    code = "model_not_ready"


class DatabaseUnavailable(Overloaded):
    """The request needs the gateway's database, which is unavailable now."""

    code = "database_unavailable"


class ShuttingDown(Overloaded):
    """The program is shutting down and accepts no new requests."""

    code = "shutting_down"


class Draining(Overloaded):
    """Every node that could serve the model is drained or shutting down; `details` has the reason for each."""

    code = "draining"


class InsufficientCapacity(CortexError):
    """The model fits on no node; `details` has needed and available memory for each device."""

    status = 507
    code = "insufficient_capacity"


class LoadFailed(CortexError):
    """The node could not load the model; the message is the node's reason."""

    status = 502
    code = "load_failed"


class ModelUnsupported(LoadFailed):
    """No retry helps: the model's family or format, or an option of the load, is not supported by the node."""

    status = 422
    code = "model_unsupported"
    openai_type = "invalid_request_error"


class UnloadedWhileLoading(LoadFailed):
    """The load was cancelled, which is not a failure: the model may be loaded again at once."""

    code = "load_cancelled"


class HubUnavailable(LoadFailed):
    """The hub cannot be reached and the node's cache does not hold the model. A later load may succeed."""

    code = "hub_unavailable"


class SourceNotFound(LoadFailed):
    """The hub has no such repository, revision or quantisation, or denies access to it."""

    code = "source_not_found"


class FilesDamaged(LoadFailed):
    """The model's files on the node are truncated, incomplete or corrupt. Only other files help."""

    code = "files_damaged"


class SourceNotAllowed(LoadFailed):
    """The source is a path that requests may not name on this node: it is outside of the model roots."""

    code = "source_not_allowed"


class DiskFull(LoadFailed):
    """The model does not fit on the node's disk."""

    status = 507
    code = "disk_full"


class UpstreamUnavailable(CortexError):
    """The node failed or rejected the connection before its first byte, and no retry is left."""

    status = 502
    code = "upstream_unavailable"
    retryable = True


class UpstreamInterrupted(CortexError):
    """The node failed after its first byte; sent inside the stream."""

    status = 502
    code = "upstream_interrupted"
    retryable = True


class RequestCancelled(_InvalidRequest):
    """An authorised user cancelled the request. Clients do not retry this status automatically."""

    status = 499
    code = "request_cancelled"


class GenerationFailed(CortexError):
    """The engine ended this request: NaN in its output, or an internal fault."""

    code = "generation_failed"


def prompt_too_long(
    num_tokens: int, context_tokens: int, max_prompt_tokens: int | None = None
) -> ContextLengthExceeded:
    """The error for a prompt of at least `num_tokens` tokens, where the response needs one token of the context.

    Clients recognise an overflow by its words as well as by its code, and shorten the conversation. OpenAI's clients
    look for "maximum context length is", Anthropic's for "prompt is too long". The message passes through streams and
    gateways, which translate between the dialects, so it has both.
    """
    largest = context_tokens - 1
    limit = f"This model's maximum context length is {context_tokens} tokens, and the response needs at least one."
    if max_prompt_tokens is not None and max_prompt_tokens < largest:
        largest = max_prompt_tokens
        limit = (
            f"This model's maximum context length is {largest} tokens on this node (limits.max_prompt_tokens in "
            "neuron.toml)."
        )
    return ContextLengthExceeded(
        f"prompt is too long: {num_tokens} tokens > {largest} maximum. {limit} Shorten the conversation.",
        details={"prompt_tokens": num_tokens, "max_prompt_tokens": largest, "context_tokens": context_tokens},
    )


def prompt_too_large(num_characters: int, max_characters: int) -> ContextLengthExceeded:
    """The error for a prompt with too much text to tokenise, worded like `prompt_too_long`, so that clients shorten the
    conversation."""
    return ContextLengthExceeded(
        f"prompt is too long: {num_characters} characters > {max_characters} maximum on this node "
        "(text.max_prompt_mb in neuron.toml). Shorten the conversation.",
        details={"prompt_characters": num_characters, "max_prompt_characters": max_characters},
    )


def prompt_too_long_for_memory(num_tokens: int, reason: str) -> PromptTooLongForMemory:
    """The error for a prompt that ran out of memory alone, worded so that clients recognise an overflow. The length
    that would fit is unknown."""
    return PromptTooLongForMemory(
        f"prompt is too long: {num_tokens} tokens do not fit the device's memory, so this model's maximum context "
        f"length is less than {num_tokens} tokens on this node. Shorten the conversation. ({reason})",
        details={"prompt_tokens": num_tokens},
    )


def text_too_long(index: int, num_tokens: int, context_tokens: int, field: str) -> ContextLengthExceeded:
    """The error for a text in `field` that is too long for an embedding or rerank model, in words that clients
    recognise: OpenAI's look for "maximum context length is", Ollama's for "input length exceeds"."""
    return ContextLengthExceeded(
        f"the input length exceeds the context length: text {index} has {num_tokens} tokens. This model's maximum "
        f"context length is {context_tokens} tokens. Send shorter texts, or have them cut off: "
        "'truncate_prompt_tokens' of -1, or 'truncate' of true on the routes of Ollama and TEI.",
        param=field,
        details={"prompt_tokens": num_tokens, "max_prompt_tokens": context_tokens, "context_tokens": context_tokens},
    )
