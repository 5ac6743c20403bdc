"""Ollama's `/api/embed` and its older form `/api/embeddings`, in terms of `/v1/embeddings`."""

from __future__ import annotations

from typing import Any

import msgspec

from cortex.wire.dialects.ollama.lines import nanoseconds
from cortex.wire.errors import UpstreamInterrupted
from cortex.wire.events import Usage
from cortex.wire.fields import body as wire_body
from cortex.wire.fields.body import LARGEST_COUNT
from cortex.wire.model_names import plain_name

PATH = "/api/embed"
OLD_PATH = "/api/embeddings"
TARGET = "/v1/embeddings"


class _Item(msgspec.Struct, frozen=True):
    embedding: msgspec.Raw
    """Raw, because decoding and encoding thousands of floats would delay other requests."""
    index: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0


class _Embeddings(msgspec.Struct, frozen=True):
    data: list[_Item]
    model: str = ""
    usage: _Usage = _Usage()


_decoder = msgspec.json.Decoder(_Embeddings)


def embed_request(model: str | None, body: bytes) -> bytes:
    """The body for `/v1/embeddings`, with `model`, if there is one, in place of the client's name. Raises
    MalformedJSON, MissingModel or InvalidValue."""
    fields = wire_body.parse(body)
    is_old = "prompt" in fields and "input" not in fields
    texts = fields.texts("prompt" if is_old else "input")
    if texts == ("",) and not isinstance(fields.raw("input"), list):
        texts = ()
    sent: dict[str, Any] = {
        "model": model or plain_name(fields.model()),
        "input": texts,
        "encoding_format": "float",
    }
    if not texts:
        sent["loads_only"] = True  # as a chat without messages
    if (dimensions := fields.integer("dimensions", low=1, high=LARGEST_COUNT)) is not None:
        sent["dimensions"] = dimensions
    truncates = fields.flag("truncate")
    if truncates or (truncates is None and not is_old and texts):
        sent["truncate_prompt_tokens"] = -1  # as many as the model takes
    return msgspec.json.encode(sent)


def response_body(
    body: bytes, path: str, model: str | None = None, *, load_s: float, total_s: float
) -> tuple[bytes, Usage]:
    """The response for the client of `path`, from that of `/v1/embeddings`, and its usage. `model`: its name, if not
    that of the response. Raises UpstreamInterrupted."""
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise UpstreamInterrupted(f"The response of /v1/embeddings could not be read: {problem}") from problem
    vectors = [item.embedding for item in sorted(found.data, key=lambda item: item.index)]
    if not all(bytes(memoryview(vector)[:1]) == b"[" for vector in vectors):
        raise UpstreamInterrupted("The response of /v1/embeddings has a vector that is no array.")
    usage = Usage(prompt_tokens=found.usage.prompt_tokens)
    if path == OLD_PATH:
        return msgspec.json.encode({"embedding": vectors[0] if vectors else []}), usage
    return (
        msgspec.json.encode(
            {
                "model": model or found.model,
                "embeddings": vectors,
                "total_duration": nanoseconds(total_s),
                "load_duration": nanoseconds(load_s),
                "prompt_eval_count": usage.prompt_tokens,
            }
        ),
        usage,
    )
