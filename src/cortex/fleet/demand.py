"""Tracks which clients use a model since its load and which wait for one, to tell whether an eviction would harm
others.

If one client uses several models in turn, as a pipeline of speech and text does, evicting its last model for its next
one harms no one. With two such clients, every request would swap.
"""

from __future__ import annotations

import math
from collections import Counter

_MAX_USERS = 8
"""Beyond this number of clients a model counts as shared."""
_OVERLAP_S = 60.0
"""A client with concurrent requests for two models counts as several clients for this long."""
_TOLERANCE_S = 2.0
"""Tolerance between a time that a node reports and the one that this gateway observed."""

_ASKED_S = 600.0
"""How long a requested context counts, and the minimum interval between reloads of a model for one."""
_KEPT_S = 3600.0
"""Longer than any model's residency."""

Target = tuple[str, str]
"""A node and a model."""
SOMEBODY = ""
"""An unknown client."""


class _Use:
    """The demand for a model that this gateway has loaded."""

    __slots__ = ("last_at", "loaded_at", "running", "users")

    def __init__(self, users: set[str]) -> None:
        self.users = users
        self.running: dict[str, int] = {}
        """Number of requests of each client."""
        self.loaded_at: float | None = None
        """None until its load has ended."""
        self.last_at = 0.0


class Demand:
    """Owned by the dispatcher, on the loop's thread; decisions read it through the fleet. Times are on the dispatcher's
    clock."""

    def __init__(self) -> None:
        self._uses: dict[Target, _Use] = {}
        self._waiting: dict[str, Counter[str]] = {}
        """By model: the clients that wait for it."""
        self._overlaps: dict[tuple[str, str, str], float] = {}
        """By client and ordered pair of models: when a request for one last had to wait while the client had one for
        the other."""
        self.kept_until: dict[str, float] = {}
        """By model: when the longest `keep_alive` of its requests ends."""
        self._contexts: dict[str, tuple[int, float]] = {}
        """By model: the longest requested context, and when it was last requested."""
        self._reloads: dict[str, float] = {}
        """By model: when it was last reloaded for such a request."""

    # Requests

    def waits(self, client: str, model: str, now: float) -> None:
        """A request waits for the model."""
        running = {target[1] for target, use in self._uses.items() if client in use.running}
        awaited = {other for other, clients in self._waiting.items() if client in clients}
        for other in (running | awaited) - {model}:
            self._overlaps[_pair(client, model, other)] = now
        self._waiting.setdefault(model, Counter())[client] += 1

    def awaits(self, client: str, model: str) -> bool:
        return client in self._waiting.get(model, ())

    def waits_no_more(self, client: str, model: str) -> None:
        clients = self._waiting[model]
        clients[client] -= 1
        if clients[client] <= 0:
            del clients[client]
        if not clients:
            del self._waiting[model]

    def runs(self, client: str, target: Target) -> None:
        """A request was sent to the model. On the path of every request."""
        if (use := self._uses.get(target)) is not None:
            if client not in use.users:
                use.users.add(client if len(use.users) < _MAX_USERS else SOMEBODY)
            use.running[client] = use.running.get(client, 0) + 1

    def ended(self, client: str, target: Target, now: float) -> None:
        """That request has ended."""
        if (use := self._uses.get(target)) is not None:
            use.last_at = now
            if (remaining := use.running.get(client, 0) - 1) > 0:
                use.running[client] = remaining
            else:
                use.running.pop(client, None)

    def asks(self, model: str, context_tokens: int, now: float) -> None:
        """A request asks for a context of this length."""
        self._contexts[model] = (max(context_tokens, self.wanted_context(model)), now)

    def wanted_context(self, model: str) -> int:
        """The context that recent requests need; 0 if none names one."""
        return self._contexts.get(model, (0, 0.0))[0]

    def may_reload(self, model: str, now: float) -> bool:
        """Whether the model may be reloaded for a longer context, which is limited in frequency."""
        return now - self._reloads.get(model, -math.inf) >= _ASKED_S

    def reloads(self, model: str, now: float) -> None:
        """The model is reloaded for a longer context."""
        self._reloads[model] = now

    def reload_unneeded(self, model: str) -> None:
        """It was not: it already had more."""
        self._reloads.pop(model, None)

    # Loads

    def load_began(self, target: Target, *, for_requests: bool) -> None:
        """This gateway has ordered a load, for waiting requests or for an operator."""
        self._uses[target] = _Use(set() if for_requests else {SOMEBODY})
        if not for_requests:
            self._reloads.pop(target[1], None)  # what limited the context then may be gone

    def load_ended(self, target: Target, now: float) -> None:
        if (use := self._uses.get(target)) is not None:
            use.loaded_at = now

    def gone(self, target: Target) -> None:
        """The model was unloaded, or its load has failed."""
        self._uses.pop(target, None)

    def forget_old(self, now: float) -> None:
        """Drop expired entries."""
        self._contexts = {model: asked for model, asked in self._contexts.items() if now - asked[1] < _ASKED_S}
        self._reloads = {model: at for model, at in self._reloads.items() if now - at < _ASKED_S}
        self._overlaps = {key: at for key, at in self._overlaps.items() if now - at < _OVERLAP_S}
        for target in [each for each, use in self._uses.items() if now - (use.loaded_at or now) > _KEPT_S]:
            del self._uses[target]

    # Decisions

    def is_shared(self, target: Target, newcomer: str, *, ready_since: float, last_used: float, now: float) -> bool:
        """Whether clients other than those that wait for `newcomer` use or await the model. `ready_since` and
        `last_used` are the node's. A model that this gateway did not load, or that others use too, counts as shared."""
        use = self._uses.get(target)
        if use is None or (use.loaded_at is not None and use.loaded_at < ready_since - _TOLERANCE_S):
            return True
        if last_used > max(use.last_at, ready_since) + _TOLERANCE_S:
            return True
        waiting, clients = self._waiting.get(newcomer, ()), use.users.union(self._waiting.get(target[1], ()))
        return any(
            client == SOMEBODY
            or client not in waiting
            or now - self._overlaps.get(_pair(client, target[1], newcomer), -math.inf) < _OVERLAP_S
            for client in clients
        )


def _pair(client: str, one: str, other: str) -> tuple[str, str, str]:
    return (client, one, other) if one < other else (client, other, one)
