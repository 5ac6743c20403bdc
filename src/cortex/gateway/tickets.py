"""What a request holds while it runs (a lease) or waits (a ticket)."""

from __future__ import annotations

from collections.abc import Callable

from cortex.fleet.catalogue import Resolution
from cortex.fleet.decision import Origin
from cortex.wire.errors import CortexError


class Lease:
    """The right to send one request to a model on a node; counted there until released."""

    __slots__ = ("model", "node")

    def __init__(self, node: str, model: str) -> None:
        self.node = node
        self.model = model


class Ticket:
    """A place in the queue of a model. `deliver` is called exactly once, with a lease or the reason why there is none,
    unless the ticket is cancelled first."""

    __slots__ = ("deliver", "origin", "prompt", "resolution", "since")

    def __init__(
        self,
        resolution: Resolution,
        prompt: Callable[[], bytes],
        deliver: Callable[[Lease | CortexError], None],
        since: float,
        *,
        origin: Origin | None = None,
    ) -> None:
        self.resolution = resolution
        self.prompt = prompt
        self.deliver = deliver
        self.since = since
        self.origin: Origin = origin or ("background" if resolution.background else "request")
