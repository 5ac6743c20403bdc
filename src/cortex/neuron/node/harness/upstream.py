"""The server that takes the requests of a model as text, where its harness is not the built-in engine."""

from __future__ import annotations

from typing import Any, Protocol

from cortex.http.upstream.pool import Pool
from cortex.wire.node.model_log import ModelLog


class Upstream(Protocol):
    """Speaks OpenAI chat, or whatever its routes say."""

    @property
    def harness(self) -> str: ...

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of every request, in place of those of the client; among them the name of the model."""

    @property
    def stripped_fields(self) -> tuple[str, ...]:
        """Fields that no request has."""

    def log(self, after: int) -> ModelLog:
        """The lines that its servers wrote after the first `after` ones, as far as they are kept."""

    def pool(self) -> Pool:
        """Takes requests that have a slot (`Node.generate`). Raises Recovering where the server has just ended."""

    def check_route(self, path: str) -> None:
        """Raises UnsupportedModality for a path that the server does not have."""

    async def end_if_hung(self, reason: str) -> None:
        """A response is overdue. Unless another one goes on, or the server responds to a health check, it is ended, as
        one that has crashed."""

    async def check_lost(self) -> None:
        """For a request that failed: raises Recovering where the server has ended, or ends in a moment from now."""

    def produced(self, request_id: str) -> None:
        """The response has begun."""

    def finished(self, request_id: str, prompt_tokens: int, completion_tokens: int) -> None:
        """The response is complete: the slot is free."""
