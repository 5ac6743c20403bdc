"""Counts and lists tokens as inference would see them, without loading any weights."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cortex.http.server.server import Response
from cortex.neuron.api import responses
from cortex.neuron.api.bodies import client_of, principal_of, strips_billing, tenant_of
from cortex.neuron.api.calls import ApiCall, Route
from cortex.neuron.api.inference.tasks import check_pictures
from cortex.neuron.node.node import Node
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.parsing.cost import is_parsed_elsewhere
from cortex.parsing.functions import ParsedText
from cortex.parsing.parser import BodyParser
from cortex.wire import llama_cpp
from cortex.wire.errors import BodyTooLarge
from cortex.wire.fields import body as wire_body
from cortex.wire.packed_request import PackedRequest

MAX_DETOKENIZED = 1 << 16
"""Token ids that are turned into text at once, on the loop's thread."""
MAX_DETOKENIZED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Tokens:
    backend: Node
    strip_billing_header: bool
    parser: BodyParser

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/tokenize", self.tokenize),
            Route("POST", "/detokenize", self.detokenize),
            Route("POST", "/apply-template", self.apply_template),
            Route("GET", "/props", self.props),
            Route("POST", "/v1/messages/count_tokens", self.count),
            Route("POST", "/v1/responses/input_tokens", self.count_responses),
        ]

    async def count(self, call: ApiCall) -> Response:
        request = call.request
        strip_billing = strips_billing(request, self.strip_billing_header)
        counted = await self.parser.parse(
            "anthropic_messages",
            request.body,
            client_of(request),
            tenant=tenant_of(request),
            strip_billing=strip_billing,
            generates=False,
        )
        check_pictures(self.backend, counted.head, is_of_gateway=bool(principal_of(request)))
        num_tokens = await self.backend.texts.count_tokens(counted, principal=principal_of(request))
        return responses.json({"input_tokens": num_tokens})

    async def count_responses(self, call: ApiCall) -> Response:
        request = call.request
        counted = await self.parser.parse(
            "openai_responses", request.body, client_of(request), tenant=tenant_of(request)
        )
        check_pictures(self.backend, counted.head, is_of_gateway=bool(principal_of(request)))
        num_tokens = await self.backend.texts.count_tokens(counted, principal=principal_of(request))
        return responses.json({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def tokenize(self, call: ApiCall) -> Response:
        """`prompt` (`text`, or `content` as llama.cpp names it) as it is, or `messages` through the model's
        template. `add_special`: with the begin and end tokens of the model; `parse_special: false`: control tokens in
        it are text. `with_pieces`: each token with its text, for a body that is not large."""
        request = call.request
        parsed = await self.parser.parse_tokenize(request.body, client_of(request), tenant_of(request))
        principal = principal_of(request)
        if isinstance(parsed, PackedRequest):
            model = parsed.head.model
            check_pictures(self.backend, parsed.head, is_of_gateway=bool(principal))
            prepared = await self.backend.texts.prepare(parsed, principal=principal, in_context=False)
            ids: Sequence[int] = prepared.prompts[0].ids
        else:
            model = parsed.model
            ids = await self._encoded(parsed, principal)
        served = self.backend.served(model)
        tokens: Sequence[object] = ids
        if not is_parsed_elsewhere(request.body) and wire_body.parse(request.body).flag("with_pieces"):
            text = await self.backend.texts.text(model)
            tokens = [{"id": id, "piece": _piece(text.tokenizer.token_bytes(id))} for id in ids]
        return responses.json({"count": len(ids), "max_model_len": served.context_tokens, "tokens": tokens})

    async def _encoded(self, parsed: ParsedText, principal: str) -> Sequence[int]:
        model, text = parsed.model, parsed.text
        if parsed.parses_special and not parsed.adds_special:
            return await self.backend.texts.encode(model, text, principal=principal)
        literal = () if parsed.parses_special else (((0, len(text)),),)
        texts = TextsToEncode((text,), adds_special=parsed.adds_special, literal=literal)
        found = await self.backend.texts.encode_texts(model, texts, principal=principal)
        return array("I", found.ids).tolist()

    async def detokenize(self, call: ApiCall) -> Response:
        """The text of token ids, as a continuation. Control tokens are spelled out."""
        if len(call.request.body) > MAX_DETOKENIZED_BYTES:
            raise BodyTooLarge(f"The body has over {MAX_DETOKENIZED_BYTES} bytes; send fewer tokens at once.")
        fields = wire_body.parse(call.request.body)
        text = await self.backend.texts.text(fields.model())
        ids = fields.integers("tokens", low=0, high=text.vocab_size - 1, most=MAX_DETOKENIZED)
        return responses.json({"content": text.decode(ids)})

    async def apply_template(self, call: ApiCall) -> Response:
        """The prompt that the model would get for a conversation, as text."""
        request = call.request
        parsed = await self.parser.parse("openai_chat", request.body, client_of(request), tenant=tenant_of(request))
        principal = principal_of(request)
        prepared = await self.backend.texts.prepare(parsed, principal=principal, in_context=False, with_text=True)
        return responses.json({"prompt": prepared.prompts[0].text})

    async def props(self, call: ApiCall) -> Response:
        name = call.query("model")
        if not name:
            return responses.json(llama_cpp.router_props())
        status = self.backend.model(name)
        text = await self.backend.texts.text(name)
        return responses.json(llama_cpp.props(status, template=text.template.source))


def _piece(spelling: bytes) -> str | list[int]:
    """Text, or its bytes where those of one token are not text."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return list(spelling)
