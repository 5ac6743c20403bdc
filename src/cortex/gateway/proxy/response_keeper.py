"""The interface through which a request stores its response; the implementation is above this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cortex.http.observer import Outcome
from cortex.http.request import Headers
from cortex.wire.dialects.openai_responses.kept import KeptResponse


class ResponseKeeper(Protocol):
    """Keeps the response to a request, for later requests that refer to it."""

    @property
    def kept(self) -> KeptResponse | None:
        """Fields about the stored response for the request to the node; None if the response is not stored."""

    @property
    def headers(self) -> Headers:
        """Headers for the client."""

    @property
    def capture(self) -> Callable[[bytes], None] | None:
        """Receives what the client receives; see `Relay`."""

    def ended(self, status: int, outcome: Outcome) -> None:
        """The response has ended; called once, last."""
