"""Counting and listing tokens, through the same conversion as inference and without loading any weights."""

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
        asked = await parsed(anthropic_messages.parse, body)
        return responses.json({"input_tokens": len(await self._render(asked))})

    async def tokenize(self, request: web.Request) -> web.Response:
        """`prompt` (or `text`) as it is, or `messages` through the model's template."""
        body = await body_of(request)
        fields = await parsed(wire_body.parse, body)
        if "messages" in fields:
            asked = await parsed(openai_chat.parse, body)
            ids = await self._render(asked)
        else:
            model = fields.model()
            name = "prompt" if "prompt" in fields else "text"
            prompt = fields.required_text(name)
            self.backend.model(model)
            text = await self.backend.text(model)
            ids = tuple(await asyncio.to_thread(text.encode, prompt))
            asked = GenerateRequest(model=model, prompt=prompt)
        status = self.backend.model(asked.model)
        return responses.json({"count": len(ids), "max_model_len": status.context_tokens, "tokens": ids})

    async def _render(self, asked: GenerateRequest) -> tuple[int, ...]:
        self.backend.model(asked.model)
        text = await self.backend.text(asked.model)
        rendered = await asyncio.to_thread(text.render, asked)
        return rendered.ids
