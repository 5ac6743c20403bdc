"""`/v1/models`, in a form that both vendors' SDKs read, with additional fields of our own."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cortex.http.server.server import Response
from cortex.neuron.api import responses
from cortex.neuron.api.calls import ApiCall, Route
from cortex.neuron.node.node import Node
from cortex.wire.model_list import model_list
from cortex.wire.node.protocol import ModelState, ModelStatus


@dataclass(frozen=True, slots=True)
class ModelRoutes:
    backend: Node
    created: int = field(default_factory=lambda: int(time.time()))
    """The SDKs require a date; the start of the node is the best one known."""

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/models", self.list),
            Route("GET", "/v1/models/{id:.+}", self.entry),
        ]

    async def list(self, call: ApiCall) -> Response:
        return responses.json(model_list([self._body(status) for status in self.backend.models()], call.query))

    async def entry(self, call: ApiCall) -> Response:
        return responses.json(self._body(self.backend.model(call.values["id"])))

    def _body(self, status: ModelStatus) -> dict[str, Any]:
        return {
            "id": status.id,
            "object": "model",
            "type": "model",
            "display_name": status.id,
            "created": self.created,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z"),
            "owned_by": "neuron",
            "loaded": status.state is ModelState.READY,
            "state": status.state.value,
            "max_model_len": status.context_tokens,
            "limit": {
                "context": status.context_tokens,
                "input": status.max_input_tokens,
                "output": status.max_output_tokens,
                **({} if status.context_shortage is None else {"full_context": status.full_context_tokens}),
            },
            "capabilities": status.capabilities,
        }
