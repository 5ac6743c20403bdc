"""Which request a line of the node's log belongs to."""

from __future__ import annotations

from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the request that the running task serves."""


def common_fields() -> dict[str, object]:
    """What every line has: the id of its request, where it belongs to one."""
    id = request_id.get()
    return {} if id == "-" else {"request_id": id}
