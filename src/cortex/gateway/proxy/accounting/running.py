"""The requests that have not ended: for operators and the owners of keys, who may cancel them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

Phase = Literal["wait", "prefill", "decode"]
"""Queued or waiting for a load; at a node before the first byte of the response; after that byte."""


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request at this moment."""

    id: bytes
    key_id: str | None
    """None on an open gateway."""
    key_name: str
    model: str
    node: str
    """Empty while it is at none."""
    dialect: str
    path: bytes
    stream: bool
    phase: Phase
    duration_s: float
    num_attempts: int
    request_class: str = "default"


class Cancellable(Protocol):
    def running(self) -> RunningRequest: ...

    def cancel(self, by: str) -> None:
        """End it at its node, and with an error for the client. `by` names who cancelled it."""


class RunningRequests:
    """All of a gateway. Used on the loop's thread only."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: dict[Cancellable, None] = {}
        """In the order of their arrival."""

    def add(self, request: Cancellable) -> None:
        self._requests[request] = None

    def discard(self, request: Cancellable) -> None:
        self._requests.pop(request, None)

    def __iter__(self) -> Iterator[tuple[Cancellable, RunningRequest]]:
        """Oldest first. Requests may end during iteration."""
        return ((request, request.running()) for request in tuple(self._requests))
