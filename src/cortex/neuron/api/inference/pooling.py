"""The routes for embeddings, rerank and scores: texts in the shape of each, and vectors or scores in the same."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from cortex.http.server.server import Response
from cortex.neuron.api import bodies, responses
from cortex.neuron.api.calls import ApiCall, Handler, Route
from cortex.neuron.api.inference.pooled_texts import check_lengths, engine_texts, texts_to_encode
from cortex.neuron.api.inference.routes import Inference
from cortex.neuron.api.inference.session import ready
from cortex.neuron.api.inference.tasks import check_task
from cortex.neuron.api.inference.tracing import traced
from cortex.neuron.api.routes.metrics import RequestWatch
from cortex.neuron.engine.request import EngineRequest, PooledTexts, StepOutput
from cortex.neuron.models.pooling.config import PoolingConfig
from cortex.wire.errors import CortexError, InsufficientQuota, LoadFailed
from cortex.wire.events import Usage
from cortex.wire.fields.body import check_content_type
from cortex.wire.node import headers as our_headers
from cortex.wire.node import usage_report
from cortex.wire.pooling.parse import MODEL_OPTIONAL, ROUTES, names_model, only_model, with_model
from cortex.wire.pooling.request import PoolingRequest
from cortex.wire.pooling.response import embeddings_body, floats, scores_body
from cortex.wire.request_class import level_of

_USAGE = usage_report.HEADER.encode()
_ATTEMPT_ID = our_headers.ATTEMPT_ID.encode()
_DIMENSIONS = our_headers.DIMENSIONS.encode()
_VECTORS = (our_headers.VECTORS.encode(), our_headers.AS_BASE64.encode())
_IGNORED = our_headers.IGNORED_FIELDS.encode()
_YIELD_BYTES = 1 << 16
"""The loop does other work after it has written this much of a response."""


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
                request = await shared.parser.parse_pooling(path, http.body, bodies.client_of(http))
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
                    body = await shared.server_body(http, upstream.fields, dropped, limit)
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
        """What the loaded model does with texts, and the tokens of the request's."""
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
    """At a server whose tokens nobody knows, each byte counts as one."""
    if limit is not None and num_tokens > limit:
        raise InsufficientQuota(
            f"The texts have {num_tokens} tokens, and the budget of the key has {limit} left for this request; "
            "send fewer texts, or ask the operator for a larger budget.",
            details={"prompt_tokens": num_tokens},
        )


async def _joined(parts: Iterable[bytes]) -> bytes:
    """A body that is long to write. Other requests have their turn meanwhile."""
    written, since = [], 0
    for part in parts:
        written.append(part)
        since += len(part)
        if since >= _YIELD_BYTES:
            since = 0
            await asyncio.sleep(0)
    return b"".join(written)
