"""The request id of log lines."""

from __future__ import annotations

from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the request that the current task serves."""


def common_fields() -> dict[str, object]:
    """Fields of every log line: the request id, if the line belongs to a request."""
    id = request_id.get()
    return {} if id == "-" else {"request_id": id}
