"""The responses of the routes for vectors and scores. Vectors stay bytes until here: little-endian float32."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from cortex.wire.pooling.request import PoolingRequest

VECTOR_STARTS = {"/v1/embeddings": b'"embedding":"', "/embed": b'"'}
"""What precedes a vector as base64 in the response of each route. Nothing else in it looks like that: quotes in texts
are escaped, and TEI's responses have no other strings."""


def embeddings_body(request: PoolingRequest, vectors: bytes, num_texts: int, num_tokens: int) -> Iterator[bytes]:
    """The body in parts, one for each vector: a caller may do something else between them."""
    size = len(vectors) // num_texts if num_texts else 0
    is_openai = request.shape == "openai"
    yield b'{"object":"list","data":[' if is_openai else b"["
    for index in range(num_texts):
        vector = vectors[index * size : (index + 1) * size]
        shown = b'"%s"' % b64encode(vector) if request.as_base64 else msgspec.json.encode(floats(vector).tolist())
        comma = b"," if index else b""
        if is_openai:
            yield b'%s{"object":"embedding","index":%d,"embedding":%s}' % (comma, index, shown)
        else:
            yield comma + shown
    if is_openai:
        model = msgspec.json.encode(request.model)
        yield b'],"model":%s,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (model, num_tokens, num_tokens)
    else:
        yield b"]"


def scores_body(request: PoolingRequest, scores: Sequence[float], num_tokens: int, *, id: str, created: int) -> bytes:
    """The body of a response with scores, of which rerank sorts the best to the front."""
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    if request.shape == "score":
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": id, "object": "list", "created": created, "model": request.model}
        return msgspec.json.encode({**head, "data": data, "usage": usage})
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    if request.shape == "tei_rerank":
        return msgspec.json.encode([_tei_result(request, index, scores[index]) for index in best])
    results: list[dict[str, Any]] = []
    for index in best:
        document = {"document": {"text": request.texts[index]}} if request.returns_documents else {}
        results.append({"index": index, "relevance_score": scores[index], **document})
    billed = {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": num_tokens}}
    meta = {"api_version": {"version": "2"}, **billed}
    return msgspec.json.encode(
        {"id": id, "object": "list", "model": request.model, "results": results, "usage": usage, "meta": meta}
    )


def _tei_result(request: PoolingRequest, index: int, score: float) -> dict[str, Any]:
    text = {"text": request.texts[index]} if request.returns_documents else {}
    return {"index": index, "score": score, **text}


def floats(vector: bytes) -> array[float]:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values
