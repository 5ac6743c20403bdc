"""Ollama's embedding routes for a model that a server of its own runs."""

from __future__ import annotations

import time

import msgspec

from cortex.http.request import Headers
from cortex.http.upstream.faults import MalformedResponse, ResponseTooLarge
from cortex.neuron.api import responses
from cortex.wire import error_encoding
from cortex.wire.dialects.ollama import embeddings
from cortex.wire.dialects.openai_chat.upstream_error import foreign_error
from cortex.wire.errors import CortexError, Family

_MAX_BODY_BYTES = 32 << 20


class ServerEmbeddings:
    """A translation of the relay: a server's whole response of `/v1/embeddings` in, Ollama's out."""

    def __init__(self, path: str, model: str, began_s: float, load_s: float) -> None:
        """`began_s`: when the request arrived, by the monotonic clock. `load_s`: how long it waited since."""
        self._path = path
        self._model = model
        self._began_s = began_s
        self._load_s = load_s
        self._status = 200
        self._body = bytearray()

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:  # noqa: ARG002 - as Translation has it
        self._status = status
        if status >= 400:
            status = error_encoding.status(foreign_error(status, b""), Family.OLLAMA)
        return status, responses.JSON

    def push(self, data: bytes) -> bytes:
        self._body += data
        if len(self._body) > _MAX_BODY_BYTES:
            raise ResponseTooLarge(f"its response is over {_MAX_BODY_BYTES} bytes, more than is translated as a whole")
        return b""

    def finish(self) -> bytes:
        body = bytes(self._body)
        if self._status >= 400:
            return msgspec.json.encode(error_encoding.envelope(foreign_error(self._status, body), Family.OLLAMA))
        total_s = time.monotonic() - self._began_s
        try:
            return embeddings.response_body(body, self._path, self._model, load_s=self._load_s, total_s=total_s)[0]
        except CortexError as problem:
            raise MalformedResponse(problem.message) from problem
