"""What a request holds while it runs (a lease) or waits (a ticket)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cortex.fleet.decision import Origin
from cortex.wire.errors import CortexError
from cortex.wire.node import Dialect

Need = Literal["answer", "count", "embeddings"]
"""What a request wants of a node: a generated answer, a count of tokens, or embeddings."""

NO_NODES: frozenset[str] = frozenset()


class Lease:
    """The right to send one request to a model on a node; counted there until released."""

    __slots__ = ("dialects", "has_alternatives", "has_lifecycle", "model", "node", "waited_s")

    def __init__(
        self,
        node: str,
        model: str,
        dialects: tuple[Dialect, ...] = (),
        *,
        has_lifecycle: bool = True,
        has_alternatives: bool = False,
        waited_s: float = 0.0,
    ) -> None:
        self.node = node
        self.model = model
        self.dialects = dialects
        """What the node speaks."""
        self.has_lifecycle = has_lifecycle
        """The node can be told to load the model, should it be gone."""
        self.has_alternatives = has_alternatives
        """Another node could have taken the request just as well."""
        self.waited_s = waited_s
        """How long the request stood in the queue for it."""


class PendingRequest:
    """A request for a lease. `deliver` is called exactly once, with a lease or the reason why there is none, unless
    the ticket is cancelled first."""

    __slots__ = ("deliver", "excluded", "model", "need", "number", "origin", "prompt", "since")

    def __init__(
        self,
        model: str,
        prompt: Callable[[], bytes],
        deliver: Callable[[Lease | CortexError], None],
        since: float,
        *,
        origin: Origin = "request",
        need: Need = "answer",
        excluded: frozenset[str] = NO_NODES,
        number: int = 0,
    ) -> None:
        self.model = model
        self.prompt = prompt
        """The start of the conversation, for prefix affinity."""
        self.deliver = deliver
        self.since = since
        self.origin = origin
        self.need = need
        self.excluded = excluded
        """Nodes that have just failed the request: taken only when it has to wait anyway."""
        self.number = number
        """Of the admission it belongs to."""
