"""The seam between the request path and the ledger: who the caller is, and what a request may cost.

Everything here is called on the request path, on the loop's thread, and returns at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from cortex.http.request import Request
from cortex.wire.events import Usage

ANONYMOUS = "anonymous"
"""The principal of every request where there are no keys."""


class Estimate(NamedTuple):
    """The most that a request may cost, as far as its body says."""

    prompt_bytes: int
    completion_limit: int | None
    """Tokens of one choice; None where the client sets no limit."""
    num_choices: int = 1


class Hold(Protocol):
    """The place of one request in a budget, from admission until its cost is known."""

    @property
    def principal(self) -> str:
        """Who pays, as named in metrics and towards the node."""

    def settle(self, usage: Usage | None, *, model: str, node: str, request_id: str) -> None:
        """Record what was really used; None when the request ended without a response. Called exactly once."""


class Reservation(Hold, Protocol):
    """A hold as the process that keeps the ledger has it. Ends once, by `settle`, `settle_in_full` or `cancel`."""

    def check_model(self, model: str) -> None:
        """Raise ModelNotAllowed when the caller may not use `model`."""

    def settle_in_full(self, *, model: str, node: str) -> None:
        """Record the whole reservation as used: the request ran, and nobody can report what it cost."""

    def cancel(self) -> None:
        """The request was rejected after all; nothing is recorded."""


class Meter(Protocol):
    """Admits requests and records their cost."""

    def admit(self, request: Request, estimate: Estimate) -> Reservation:
        """Reserve what the request may cost. Raises InvalidAPIKey, RateLimitExceeded or InsufficientQuota."""

    def authenticate(self, request: Request) -> str:
        """The principal of a request, from its headers alone: the body may still be on its way. Raises InvalidAPIKey.

        Cheap, and bounded whatever the headers hold: it is the first check of every request.
        """

    def authenticate_operator(self, request: Request) -> str:
        """The principal of a request that changes the fleet. Raises InvalidAPIKey or OperatorOnly."""


class _OpenReservation:
    principal = ANONYMOUS

    def check_model(self, model: str) -> None:
        """Every model is allowed."""

    def settle(self, usage: Usage | None, **where: Any) -> None:
        """Nothing is recorded without keys."""

    def settle_in_full(self, **where: Any) -> None:
        """Nothing is recorded without keys."""

    def cancel(self) -> None:
        """Nothing is held."""


class OpenMeter:
    """No keys: every caller is admitted and none is billed."""

    _hold = _OpenReservation()

    def admit(self, request: Request, estimate: Estimate) -> Reservation:  # noqa: ARG002
        return self._hold

    def authenticate(self, request: Request) -> str:  # noqa: ARG002
        return self._hold.principal

    def authenticate_operator(self, request: Request) -> str:
        return self.authenticate(request)
