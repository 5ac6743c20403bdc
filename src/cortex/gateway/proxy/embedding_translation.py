"""Serves Ollama's embedding routes from a node's `/v1/embeddings`."""

from __future__ import annotations

import time

import msgspec

from cortex.gateway.proxy.float_vectors import FloatVectors, are_encoded
from cortex.gateway.proxy.redaction import MAX_ERROR_BYTES
from cortex.gateway.proxy.translation import MAX_BODY_BYTES
from cortex.http.request import Headers
from cortex.http.upstream.faults import MalformedResponse, ResponseTooLarge
from cortex.wire import error_encoding
from cortex.wire.dialects.ollama import embeddings
from cortex.wire.dialects.openai_chat.upstream_error import foreign_error
from cortex.wire.errors import CortexError, Family
from cortex.wire.events import Usage

_JSON: Headers = ((b"content-type", b"application/json"),)


class EmbeddingTranslation:
    """Translates one response. Each attempt needs a new one."""

    def __init__(self, path: str, model: str) -> None:
        self.usage: Usage | None = None
        """What the node reported, once the response is complete."""
        self.gateway_s = 0.0
        """How long the request was held back here."""
        self._path = path
        self._model = model
        self._began_at = time.monotonic()
        self._status = 200
        self._body = bytearray()
        self._vectors: FloatVectors | None = None
        """Where the node sends vectors as bytes."""

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        self._status = status
        if are_encoded(headers):
            self._vectors = FloatVectors(embeddings.TARGET)
        if status >= 400:
            return error_encoding.status(foreign_error(status, b""), Family.OLLAMA), _JSON
        return 200, _JSON

    def push(self, data: bytes) -> bytes:
        self._body += data if self._vectors is None else self._vectors.push(data)
        most = MAX_BODY_BYTES if self._status < 400 else MAX_ERROR_BYTES
        if len(self._body) > most:
            raise ResponseTooLarge(f"its response is over {most} bytes, more than is translated as a whole")
        return b""

    def finish(self) -> bytes:
        """The whole response. Raises `MalformedResponse` when the node's was not complete."""
        if self._vectors is not None:
            self._body += self._vectors.finish()
        body = bytes(self._body)
        if self._status >= 400:
            return msgspec.json.encode(error_encoding.envelope(foreign_error(self._status, body), Family.OLLAMA))
        total_s = self.gateway_s + time.monotonic() - self._began_at
        try:
            written, self.usage = embeddings.response_body(
                body, self._path, self._model, load_s=self.gateway_s, total_s=total_s
            )
        except CortexError as problem:
            raise MalformedResponse(problem.message) from problem
        return written
