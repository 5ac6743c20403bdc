"""Counts and lists tokens as inference would see them, without loading any weights."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.http.server.server import Response
from cortex.neuron.api import responses
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.bodies import client_of, principal_of, strips_billing
from cortex.neuron.api.routing import ApiCall, Route
from cortex.parsing.parser import BodyParser
from cortex.wire.packed_request import PackedRequest


@dataclass(frozen=True, slots=True)
class Tokens:
    backend: Backend
    strip_billing_header: bool
    parser: BodyParser

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/tokenize", self.tokenize),
            Route("POST", "/v1/messages/count_tokens", self.count),
            Route("POST", "/v1/responses/input_tokens", self.count_responses),
        ]

    async def count(self, call: ApiCall) -> Response:
        request = call.request
        strip_billing = strips_billing(request, self.strip_billing_header)
        counted = await self.parser.parse(
            "anthropic_messages", request.body, client_of(request), strip_billing=strip_billing
        )
        num_tokens = await self.backend.texts.count_tokens(counted, principal=principal_of(request))
        return responses.json({"input_tokens": num_tokens})

    async def count_responses(self, call: ApiCall) -> Response:
        request = call.request
        counted = await self.parser.parse("openai_responses", request.body, client_of(request))
        num_tokens = await self.backend.texts.count_tokens(counted, principal=principal_of(request))
        return responses.json({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def tokenize(self, call: ApiCall) -> Response:
        """`prompt` (or `text`) as it is, or `messages` through the model's template."""
        request = call.request
        parsed = await self.parser.parse_tokenize(request.body, client_of(request))
        principal = principal_of(request)
        if isinstance(parsed, PackedRequest):
            model = parsed.head.model
            prepared = await self.backend.texts.prepare(parsed, principal=principal, in_context=False)
            ids = prepared.prompts[0].ids
        else:
            model = parsed.model
            ids = await self.backend.texts.encode(model, parsed.text, principal=principal)
        served = self.backend.served(model)
        return responses.json({"count": len(ids), "max_model_len": served.context_tokens, "tokens": ids})
