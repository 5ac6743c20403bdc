"""Who asks, and what it costs them: the seam between the request path and the books.

Everything here is called on the request path, on the loop's thread, and returns at once.
"""

from __future__ import annotations

from typing import Any, Protocol

from cortex.gateway.http.request import Request
from cortex.wire.events import Usage


class Hold(Protocol):
    """Room that one request has in a budget, from admission until its cost is known."""

    @property
    def principal(self) -> str:
        """Who pays, as named in metrics and towards the node."""

    def settle(self, usage: Usage | None, *, model: str, node: str, request_id: str) -> None:
        """Book what was really used; None when the request ended without an answer. Called exactly once."""


class Meter(Protocol):
    """Admits requests and books their cost."""

    def admit(self, request: Request, *, model: str, prompt_bytes: int, completion_limit: int | None) -> Hold:
        """Reserve what the request may cost.

        Raises InvalidAPIKey, ModelNotAllowed, RateLimitExceeded or InsufficientQuota.
        """

    def authenticate(self, request: Request) -> str:
        """The principal of a request that costs nothing. Raises InvalidAPIKey."""

    def authenticate_operator(self, request: Request) -> str:
        """The principal of a request that changes the fleet. Raises InvalidAPIKey or OperatorOnly."""


class _OpenHold:
    principal = "anonymous"

    def settle(self, usage: Usage | None, **where: Any) -> None:
        """Nothing is booked without keys."""


class OpenMeter:
    """No keys: everybody is welcome and nobody is billed."""

    _hold = _OpenHold()

    def admit(self, request: Request, **estimate: Any) -> Hold:  # noqa: ARG002
        return self._hold

    def authenticate(self, request: Request) -> str:  # noqa: ARG002
        return self._hold.principal

    def authenticate_operator(self, request: Request) -> str:
        return self.authenticate(request)
