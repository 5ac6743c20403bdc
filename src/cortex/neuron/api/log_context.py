"""Log fields of the current task's request."""

from __future__ import annotations

from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the request that the current task serves."""

stream_failure: ContextVar[str] = ContextVar("stream_failure", default="")
"""Why its response ended early although the status, sent before, is 200. Empty if it did not."""


def common_fields() -> dict[str, object]:
    """Fields of every log line: the request id, if the line belongs to a request."""
    id = request_id.get()
    return {} if id == "-" else {"request_id": id}
