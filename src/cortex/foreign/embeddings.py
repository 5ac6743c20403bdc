"""Responses with vectors: bytes from a node written as floats, and Ollama's responses made of OpenAI's.

From a node to the gateway vectors travel as bytes, whatever the client wants.
"""

from __future__ import annotations

import time
from base64 import b64decode

import msgspec

from cortex.foreign.chat_response import check_length
from cortex.http.request import Headers
from cortex.http.upstream.faults import MalformedResponse, ResponseTooLarge
from cortex.wire.dialects.ollama import embeddings
from cortex.wire.dialects.ollama.lines import OLLAMA
from cortex.wire.dialects.openai_chat.upstream_response import foreign_error
from cortex.wire.errors import CortexError
from cortex.wire.events import Usage
from cortex.wire.node.headers import AS_BASE64, VECTORS
from cortex.wire.pooling.response import VECTOR_STARTS, floats

ASKED: Headers = ((VECTORS.encode(), AS_BASE64.encode()),)
"""The header of a request whose response may be decoded here."""
MAX_VECTOR_BYTES = 1 << 20
"""The size as base64; no model has a vector of this length."""
_JSON: Headers = ((b"content-type", b"application/json"),)
_DESCRIPTIONS = (VECTORS.encode(), b"content-length")


def are_encoded(headers: Headers) -> bool:
    """Whether the response with `headers` has vectors that the client did not ask for in this form."""
    return any(name == _DESCRIPTIONS[0] for name, _ in headers)


class FloatVectors:
    """A translation of the relay: base64 in, floats out; everything between the vectors stays unchanged."""

    def __init__(self, path: str) -> None:
        """`path`: of the node's route."""
        self._start = VECTOR_STARTS[path]
        self._held = b""

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        return status, tuple(header for header in headers if header[0] not in _DESCRIPTIONS)

    def push(self, data: bytes) -> bytes:
        """Everything up to the last complete vector. Raises MalformedResponse or ResponseTooLarge."""
        rest, written = self._held + data, bytearray()
        while (found := rest.find(self._start)) >= 0:
            first = found + len(self._start)
            end = rest.find(b'"', first)
            if end < 0:
                if len(rest) - first > MAX_VECTOR_BYTES:
                    raise ResponseTooLarge(f"it has a vector of more than {MAX_VECTOR_BYTES} bytes")
                written += rest[:found]
                self._held = rest[found:]
                return bytes(written)
            written += rest[: first - 1]
            written += _array(rest[first:end])
            rest = rest[end + 1 :]
        kept = len(self._start) - 1  # the beginning of a mark may be at the end
        written += rest[: len(rest) - kept] if kept else rest
        self._held = rest[len(rest) - kept :] if kept else b""
        return bytes(written)

    def finish(self) -> bytes:
        if self._start in self._held:
            raise MalformedResponse("its response ends inside a vector")
        return self._held


def _array(encoded: bytes) -> bytes:
    try:
        return msgspec.json.encode(floats(b64decode(encoded, validate=True)).tolist())
    except ValueError as problem:
        raise MalformedResponse(f"a vector of its response could not be read: {problem}") from problem


class OllamaEmbeddings:
    """A translation of the relay: a whole response of `/v1/embeddings` in, Ollama's out. Each attempt needs a new
    one."""

    def __init__(self, path: str, model: str, began_s: float | None = None, waited_s: float = 0.0) -> None:
        """`began_s`: when the request arrived, by the monotonic clock. None: now, `waited_s` ago."""
        self.usage: Usage | None = None
        """What the node reported, once the response is complete."""
        self.gateway_s = waited_s
        """How long the request waited."""
        self._path = path
        self._model = model
        self._began_s = began_s
        self._made_s = time.monotonic()
        self._status = 200
        self._body = bytearray()
        self._vectors: FloatVectors | None = None
        """Where a node sends vectors as bytes."""

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        self._status = status
        if are_encoded(headers):
            self._vectors = FloatVectors(embeddings.TARGET)
        if status >= 400:
            status = OLLAMA.status(foreign_error(status, b""))
        return status, _JSON

    def push(self, data: bytes) -> bytes:
        """Nothing. Raises ResponseTooLarge."""
        self._body += data if self._vectors is None else self._vectors.push(data)
        check_length(len(self._body), self._status)
        return b""

    def finish(self) -> bytes:
        """The whole response. Raises MalformedResponse when the node's was not complete."""
        if self._vectors is not None:
            self._body += self._vectors.finish()
        body = bytes(self._body)
        if self._status >= 400:
            return msgspec.json.encode(OLLAMA.envelope(foreign_error(self._status, body)))
        began_s = self._made_s - self.gateway_s if self._began_s is None else self._began_s
        total_s = time.monotonic() - began_s
        try:
            written, self.usage = embeddings.response_body(
                body, self._path, self._model, load_s=self.gateway_s, total_s=total_s
            )
        except CortexError as problem:
            raise MalformedResponse(problem.message) from problem
        return written
