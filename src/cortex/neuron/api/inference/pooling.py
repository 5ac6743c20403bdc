"""The routes for embeddings, rerank and scores, in each API's format."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from msgspec import structs

from cortex.http.server.server import Response
from cortex.neuron.api import bodies, responses
from cortex.neuron.api.calls import ApiCall, Handler, Route
from cortex.neuron.api.inference.routes import Inference
from cortex.neuron.api.inference.session import ready
from cortex.neuron.api.inference.tasks import check_task
from cortex.neuron.api.inference.tracing import traced
from cortex.neuron.api.metrics import RequestWatch
from cortex.neuron.engine.request import EngineRequest, PooledTexts, StepOutput
from cortex.neuron.models.pooling.config import NormalizeStep, PoolingConfig
from cortex.neuron.text.tokenizer.encoder import TextsToEncode
from cortex.neuron.tokenizer_process.protocol import packed
from cortex.parsing.functions import parse_pooling
from cortex.wire.errors import CortexError, InsufficientQuota, InvalidValue, LoadFailed, shorten, text_too_long
from cortex.wire.events import Usage
from cortex.wire.fields.body import check_content_type
from cortex.wire.fields.request_class import level_of
from cortex.wire.node import headers as our_headers
from cortex.wire.node import usage_report
from cortex.wire.pooling.parse import MODEL_OPTIONAL, ROUTES, names_model, only_model, with_model
from cortex.wire.pooling.request import PoolingRequest
from cortex.wire.pooling.response import embeddings_body, floats, scores_body

MAX_TOKENS: Final = 1 << 22
"""The limit for all texts of a request together."""
MAX_CHARACTERS: Final = 8 * MAX_TOKENS
"""The limit for all pairs of a request together. A query that all documents share counts once for each of them."""
MAX_ELEMENTS: Final = 1 << 23
"""The limit for all vectors of a response together: as JSON they take about 160 MB."""
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""Default instruction for rerankers."""
_PROMPTS: Final[Mapping[str, tuple[str, ...]]] = {
    "query": ("query", "search_query", "retrieval.query"),
    "document": ("document", "passage", "search_document", "retrieval.passage"),
}
"""Names under which models publish their prompts for a purpose."""


def texts_to_encode(request: PoolingRequest, pooling: PoolingConfig, context_tokens: int) -> TextsToEncode | None:
    """The texts to tokenise; None if the client sent tokens. Raises InvalidValue."""
    max_tokens = request.truncate_to
    if max_tokens is not None:
        max_tokens = context_tokens if max_tokens < 0 else min(max_tokens, context_tokens)
    if request.tokens:
        return None
    if request.task == "score":
        _check_pairs(request, pooling)
    texts, queries = request.texts, request.queries
    if pooling.lowercase:
        texts, queries = tuple(map(str.lower, texts)), tuple(map(str.lower, queries))
    if request.task == "embed":
        prompt = _prompt(request, pooling)
        return TextsToEncode(tuple(prompt + text for text in texts), (), max_tokens, request.truncates_left)
    if pooling.task == "embed":  # whose scores are cosines
        before_query, before_text = _pair_prompts(request, pooling)
        prompted = (*(before_query + query for query in queries), *(before_text + text for text in texts))
        return TextsToEncode(prompted, (), max_tokens, request.truncates_left)
    queries = queries * len(texts) if len(queries) == 1 else queries
    if pooling.template is None:
        return TextsToEncode(texts, queries, max_tokens, request.truncates_left)
    instruction = request.instruction or INSTRUCTION
    pairs = zip(queries, texts, strict=True)
    filled, literal = zip(*(_filled(pooling.template, instruction, *pair) for pair in pairs), strict=True)
    return TextsToEncode(filled, (), max_tokens, literal=literal)


def _check_pairs(request: PoolingRequest, pooling: PoolingConfig) -> None:
    """Raises InvalidValue if the pairs have too much text, before any pair is built."""
    num_pairs = len(request.texts)
    around = 0 if pooling.template is None else len(pooling.template) + len(request.instruction or INSTRUCTION)
    in_queries = sum(map(len, request.queries)) * (num_pairs if len(request.queries) == 1 else 1)
    total = sum(map(len, request.texts)) + in_queries + around * num_pairs
    if total > MAX_CHARACTERS:
        raise InvalidValue(
            f"{num_pairs} documents, each with its query, have {total} characters; one request may have "
            f"{MAX_CHARACTERS}. Send a shorter query, or the documents in several requests.",
            param=request.queries_field,
        )


def _filled(template: str, instruction: str, query: str, document: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The template with the texts, and their places in it, so that they cannot end the template's turns. Does not use
    `str.format`: texts may contain braces or each other's placeholders."""
    parts = {"{instruction}": instruction, "{query}": query, "{document}": document}
    written, rest, spans = "", template, []
    for name, text in parts.items():
        before, _, rest = rest.partition(name)
        written += before
        spans.append((len(written), len(written) + len(text)))
        written += text
    return written + rest, tuple(spans)


def _prompt(request: PoolingRequest, pooling: PoolingConfig) -> str:
    """The prompt that precedes each text. Raises InvalidValue."""
    prompts = pooling.prompts
    if request.prompt_name is not None:
        if request.prompt_name not in prompts:
            known = f"it has {', '.join(map(shorten, prompts))}" if prompts else "it has none"
            raise InvalidValue(
                f"{request.model} has no prompt {shorten(request.prompt_name)!r}; {known}.", param="prompt_name"
            )
        return prompts[request.prompt_name]
    if request.purpose is not None:
        return next((prompts[name] for name in _PROMPTS[request.purpose] if name in prompts), "")
    return prompts[pooling.default_prompt] if pooling.default_prompt is not None else ""


def _pair_prompts(request: PoolingRequest, pooling: PoolingConfig) -> tuple[str, str]:
    """The prompts that precede queries and documents. Both sides of `/score` get the same."""
    if request.shape == "score":
        prompt = _prompt(request, pooling)
        return prompt, prompt
    query, document = (_prompt(structs.replace(request, purpose=purpose), pooling) for purpose in _PROMPTS)
    return query, document


def engine_texts(
    request: PoolingRequest, pooling: PoolingConfig, encoded: PooledTexts | None, vector_width: int
) -> PooledTexts:
    """The tokens for the engine, and how vectors are cut. Raises InvalidValue for what the model cannot do."""
    if encoded is None:
        encoded = PooledTexts(b"".join(map(packed, request.tokens)), tuple(map(len, request.tokens)))
    dimensions = request.dimensions
    if dimensions is not None:
        allowed = pooling.dimensions
        if dimensions > vector_width or (allowed and dimensions not in (*allowed, vector_width)):
            choice = f"one of {', '.join(map(str, allowed))}" if allowed else f"at most {vector_width}"
            raise InvalidValue(
                f"{request.model} has vectors of {vector_width} elements; ask for {choice}.", param="dimensions"
            )
    if request.task == "score" and pooling.task == "embed":
        return replace(encoded, num_queries=len(request.queries))
    is_normal = any(isinstance(step, NormalizeStep) for step in pooling.steps)
    normalize = request.normalize if request.normalize is not None else is_normal and dimensions is not None
    return replace(encoded, dimensions=dimensions, normalize=normalize)


def check_lengths(texts: PooledTexts, context_tokens: int, vector_width: int, field: str = "input") -> None:
    """Raises InvalidValue for a text without tokens, or for more texts than one request should have,
    ContextLengthExceeded for a text that is too long. `field`: where the client has them."""
    num_tokens, num_elements = sum(texts.lengths), len(texts.lengths) * (texts.dimensions or vector_width)
    if num_tokens > MAX_TOKENS or num_elements > MAX_ELEMENTS:
        raise InvalidValue(
            f"{len(texts.lengths)} texts have {num_tokens} tokens, and their vectors {num_elements} elements; one "
            f"request may have {MAX_TOKENS} tokens and {MAX_ELEMENTS} elements. Send the texts in several requests.",
            param=field,
        )
    for index, length in enumerate(texts.lengths):
        if length == 0:
            raise InvalidValue(f"Text {index} has no tokens; leave it out.", param=field)
        if length > context_tokens:
            raise text_too_long(index, length, context_tokens, field)


_USAGE = usage_report.HEADER.encode()
_ATTEMPT_ID = our_headers.ATTEMPT_ID.encode()
_DIMENSIONS = our_headers.DIMENSIONS.encode()
_VECTORS = (our_headers.VECTORS.encode(), our_headers.AS_BASE64.encode())
_IGNORED = our_headers.IGNORED_FIELDS.encode()
_YIELD_BYTES = 1 << 16
"""The loop does other work after writing this much of a response."""


@dataclass(frozen=True, slots=True)
class PoolingRoutes:
    inference: Inference

    def routes(self) -> list[Route]:
        return [Route("POST", path, self.handler(path)) for path in ROUTES]

    def handler(self, path: str) -> Handler:
        """The handler of one route."""

        async def handle(call: ApiCall) -> Response | None:
            shared, http = self.inference, call.request
            dialect = "embeddings" if "embed" in path else "rerank"
            with shared.drain_gate.enter(), shared.metrics.watch(dialect) as watch, traced(shared.tracer, http, watch):
                check_content_type(http.text(b"content-type"))
                if path in MODEL_OPTIONAL and not names_model(http.body):
                    http.body = with_model(http.body, call.query("model") or self._only_model(path))
                request = await shared.parser.run(parse_pooling, path, body=http.body, client=bodies.client_of(http))
                served = shared.backend.served(request.model)  # raises ModelNotFound
                watch.model = request.model
                is_of_gateway = bool(bodies.principal_of(http))
                if request.loads_only:
                    loaded = ready(shared.backend, request.model, is_of_gateway=is_of_gateway)
                    await shared.drain_gate.wait_for(loaded)
                    return Response(200, responses.JSON, b"".join(embeddings_body(request, b"", 0, 0)))
                if (upstream := shared.backend.upstream(request.model)) is not None:
                    upstream.check_route(path)
                    limit = bodies.token_limit_of(http)
                    _check_limit(len(http.body), limit)
                    dropped = (*upstream.stripped_fields, *upstream.fields)
                    body = await shared.server_body(http, upstream.fields, dropped, bodies.access_of(http))
                    await shared.opaque.pass_on_json(call, request.model, body, upstream, watch)
                    return None
                check_task(shared.backend, request.model, served, request.task, is_of_gateway=is_of_gateway)
                try:
                    return await self._respond(call, request, watch)
                except asyncio.CancelledError:
                    if attempt_id := http.text(_ATTEMPT_ID):
                        shared.usage_records.add(attempt_id, watch.usage())
                    raise

        return handle

    def _only_model(self, path: str) -> str:
        """Raises MissingModel."""
        listed = [(status.id, status.capabilities) for status in self.inference.backend.models()]
        if "embed" in path:
            return only_model([model for model, can in listed if can.embeddings], "embed")
        return only_model([model for model, can in listed if can.rerank], "score")

    async def _respond(self, call: ApiCall, request: PoolingRequest, watch: RequestWatch) -> Response:
        http, created = call.request, int(time.time())
        principal, limit = bodies.principal_of(http), bodies.token_limit_of(http)
        id = f"{'embd' if request.task == 'embed' else 'score'}-{uuid.uuid4().hex}"
        pooling, texts = await self._tokens(call, request, watch)
        num_tokens = sum(texts.lengths)
        _check_limit(num_tokens, limit)
        usage = Usage(prompt_tokens=num_tokens)
        watch.usage = lambda: usage
        watch.phase = lambda: "prefill"
        level = level_of(bodies.class_of(http, request.request_class))
        job = EngineRequest(id, (), 0, principal=principal, level=level, texts=texts)
        vectors = await self._pooled(request.model, job)
        headers = [(_USAGE, usage_report.header_value(usage).encode())] if principal else []
        if request.task == "embed":
            width = len(vectors) // 4 // len(texts.lengths)
            headers.append((_DIMENSIONS, b"%d" % width))
            if principal and not request.as_base64 and http.text(_VECTORS[0]) == our_headers.AS_BASE64:
                request = msgspec.structs.replace(request, as_base64=True)
                headers.append(_VECTORS)
            body = await _joined(embeddings_body(request, vectors, len(texts.lengths), num_tokens))
        else:
            scores = [_activated(score, request, pooling) for score in floats(vectors)]
            body = scores_body(request, scores, num_tokens, id=id, created=created)
        if ignored := our_headers.listed(request.ignored_fields):
            headers.append((_IGNORED, ignored.encode()))
        watch.count(usage)
        return Response(200, (*responses.JSON, *headers), body)

    async def _tokens(
        self, call: ApiCall, request: PoolingRequest, watch: RequestWatch
    ) -> tuple[PoolingConfig, PooledTexts]:
        """The pooling of the loaded model, and the tokens of the request's texts."""
        shared, principal = self.inference, bodies.principal_of(call.request)
        watch.phase = lambda: "load"
        arrived_s = time.monotonic()
        served = await shared.drain_gate.wait_for(ready(shared.backend, request.model, is_of_gateway=bool(principal)))
        call.load_s = time.monotonic() - arrived_s
        check_task(shared.backend, request.model, served, request.task, is_of_gateway=bool(principal))
        pooling, context_tokens = served.pooling, served.context_tokens
        if pooling is None or context_tokens is None:
            raise LoadFailed(f"{request.model} is being loaded again; try again")
        watch.phase = lambda: "render"
        encode = texts_to_encode(request, pooling, context_tokens)
        encoded = None
        if encode is not None:
            encoding = shared.backend.texts.encode_texts(request.model, encode, principal=principal)
            encoded = await shared.drain_gate.wait_for(encoding)
        texts = engine_texts(request, pooling, encoded, served.vector_width)
        check_lengths(texts, context_tokens, served.vector_width, request.texts_field)
        return pooling, texts

    async def _pooled(self, model_id: str, job: EngineRequest) -> bytes:
        """The vectors or scores of the texts, as little-endian float32."""
        made: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def receive(outputs: Sequence[StepOutput]) -> None:
            for output in outputs:
                if output.finish is not None and not made.done():
                    made.set_result(output.vectors)

        def fail(error: CortexError) -> None:
            if not made.done():
                made.set_exception(error)

        generation = self.inference.backend.generate(model_id, job)
        try:
            generation.follow(receive, fail)
            vectors = await made
        finally:
            generation.cancel()
        if not vectors:
            raise CortexError("The engine stopped before the texts were computed; try again.")
        return vectors


def _activated(score: float, request: PoolingRequest, pooling: PoolingConfig) -> float:
    if pooling.activation != "sigmoid" or request.raw_scores:
        return score
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))


def _check_limit(num_tokens: int, limit: int | None) -> None:
    """If the server's tokens are unknown, each byte counts as one."""
    if limit is not None and num_tokens > limit:
        raise InsufficientQuota(
            f"The texts have {num_tokens} tokens, and the budget of the key or its group has {limit} left; "
            "send fewer texts, or ask the operator for a larger budget.",
            details={"prompt_tokens": num_tokens},
        )


async def _joined(parts: Iterable[bytes]) -> bytes:
    """A long body, written in pieces so that other requests get their turn."""
    written, since = [], 0
    for part in parts:
        written.append(part)
        since += len(part)
        if since >= _YIELD_BYTES:
            since = 0
            await asyncio.sleep(0)
    return b"".join(written)
