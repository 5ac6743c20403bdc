"""The facts of a request that a gateway needs before it is parsed, read by each dialect for gateway and parser
alike."""

from __future__ import annotations

import msgspec

from cortex.wire.fields.body import Fields
from cortex.wire.fields.request_class import RequestClass


class RequestSummary(msgspec.Struct, frozen=True, array_like=True):
    """The facts of a body, without the conversation."""

    model: str
    """As the client wrote it."""
    stream: bool
    completion_limit: int | None
    """The client's limit on generated tokens for one choice; None when it sets none, 0 when nothing is generated."""
    num_choices: int
    """How many completions are generated for the request."""
    store: bool | None = None
    """This and the next fields belong to the Responses API."""
    previous_response_id: str | None = None
    background: bool = False
    loads_only: bool = False
    """This and the next fields belong to Ollama's API. Whether the request has no prompt and only loads the model."""
    unloads: bool = False
    """Whether the model is to be unloaded after the response."""
    has_pictures: bool = False
    picture_bytes: int = 0
    """How much of the body is pictures, which count as tokens instead."""
    picture_tokens: int = 0
    """About the most tokens that they take."""
    conversation_id: str | None = None
    """The conversation that the request continues (Responses API)."""
    keep_alive_s: float | None = None
    """How long the model should stay loaded after the response (Ollama's API); negative: forever."""
    context_tokens: int | None = None
    """The requested context of the model (Ollama's API)."""
    cache_salt: bytes = b""
    """The client's salt for cached prefixes, as JSON; empty: none."""
    asked_class: RequestClass | None = None
    """None: that of its key."""


def model_only(fields: Fields) -> RequestSummary:
    """The summary of a request that generates nothing. Raises MissingModel or InvalidValue."""
    return RequestSummary(fields.model(), False, 0, 1)
