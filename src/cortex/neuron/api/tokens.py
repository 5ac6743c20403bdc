"""Counts and lists tokens as inference would see them, without loading any weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from cortex.neuron.api import responses
from cortex.neuron.api.backend import Backend
from cortex.neuron.api.bodies import body_of, messages_body_of, parsed
from cortex.wire import anthropic_messages, openai_chat
from cortex.wire import body as wire_body
from cortex.wire.requests import GenerateRequest


@dataclass(frozen=True, slots=True)
class Tokens:
    backend: Backend
    strip_billing_header: bool

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/tokenize", self.tokenize), web.post("/v1/messages/count_tokens", self.count)]

    async def count(self, request: web.Request) -> web.Response:
        body = await messages_body_of(request, strip_billing=self.strip_billing_header)
        parsed_request = await parsed(anthropic_messages.parse, body)
        return responses.json({"input_tokens": len(await self._render(parsed_request))})

    async def tokenize(self, request: web.Request) -> web.Response:
        """`prompt` (or `text`) as it is, or `messages` through the model's template."""
        body = await body_of(request)
        fields = await parsed(wire_body.parse, body)
        if "messages" in fields:
            parsed_request = await parsed(openai_chat.parse, body)
            ids = await self._render(parsed_request)
        else:
            model = fields.model()
            name = "prompt" if "prompt" in fields else "text"
            prompt = fields.required_text(name)
            self.backend.model(model)
            text = await self.backend.text(model)
            ids = tuple(await asyncio.to_thread(text.encode, prompt))
            parsed_request = GenerateRequest(model=model, prompt=prompt)
        status = self.backend.model(parsed_request.model)
        return responses.json({"count": len(ids), "max_model_len": status.context_tokens, "tokens": ids})

    async def _render(self, parsed_request: GenerateRequest) -> tuple[int, ...]:
        self.backend.model(parsed_request.model)
        text = await self.backend.text(parsed_request.model)
        rendered = await asyncio.to_thread(text.render, parsed_request)
        return rendered.ids
