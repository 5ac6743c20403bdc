"""The trace span of an inference request, with its phases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from cortex.http.request import Request, loggable
from cortex.neuron.api.log_context import request_id
from cortex.neuron.api.metrics import RequestWatch
from cortex.telemetry.spans import (
    CACHED_TOKENS,
    INPUT_TOKENS,
    MODEL,
    OPERATION,
    OUTPUT_TOKENS,
    PROVIDER,
    PROVIDER_NAME,
    Span,
    Tracer,
)
from cortex.telemetry.tracing import UNTRACED
from cortex.wire.errors import CortexError
from cortex.wire.response import total_usage


@contextmanager
def traced(tracer: Tracer, http: Request, watch: RequestWatch) -> Iterator[None]:
    """Continues the caller's trace with a span, which records the observations of `watch` at its end."""
    span = tracer.begin(f"POST {loggable(http.path)}", http.header(b"traceparent"))
    error: str | None = None
    try:
        yield
        error = watch.error_code
    except CortexError as problem:
        error = problem.code
        raise
    except asyncio.CancelledError:
        error = "client_disconnected"
        raise
    except Exception:
        error = CortexError.code
        raise
    finally:
        if span is not UNTRACED:
            _end(span, watch, error)


def _end(span: Span, watch: RequestWatch, error: str | None) -> None:
    attributes: dict[str, str | int | float] = {
        "cortex.request_id": request_id.get(),
        PROVIDER: PROVIDER_NAME,
        MODEL: watch.model,
        OPERATION: watch.operation,
    }
    if watch.finishes:
        timing = watch.finishes[-1].timing
        began_s = 0.0
        for name, took_s in (("prepare", timing.queue_s), ("prefill", timing.prefill_s), ("decode", timing.decode_s)):
            span.phase(name, began_s, began_s + took_s)
            began_s += took_s
        usage = total_usage(watch.finishes)
        attributes[INPUT_TOKENS] = usage.prompt_tokens
        attributes[OUTPUT_TOKENS] = usage.completion_tokens
        attributes[CACHED_TOKENS] = usage.cached_tokens
        attributes["cortex.drafted_tokens"] = usage.drafted_tokens
        attributes["cortex.accepted_draft_tokens"] = usage.accepted_draft_tokens
    span.end(attributes, error=error)
