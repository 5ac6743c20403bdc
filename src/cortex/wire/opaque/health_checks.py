"""Requests that ask the server of a model only whether it works."""

from __future__ import annotations

from cortex.wire.errors import ModelNotReady

HEALTH_CHECKS = frozenset(
    {"/health", "/healthz", "/health/live", "/health/ready", "/livez", "/readyz", "/ping", "/v1/health"}
)
"""Paths below `/upstream/{model}` at which servers say whether they work. To `GET` one is no work for the model: it is
charged to no key, takes the place of no request, and loads nothing."""


def not_ready(model: str) -> ModelNotReady:
    """The response to a check of a model that has no server now."""
    return ModelNotReady(f"{model} is not loaded, and a health check does not load it; send it a request, or load it.")
