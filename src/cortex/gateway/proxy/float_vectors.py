"""Writes vectors as arrays of floats. From a node to the gateway they travel as bytes, whatever the client wants."""

from __future__ import annotations

from base64 import b64decode

import msgspec

from cortex.http.request import Headers
from cortex.http.upstream.faults import MalformedResponse, ResponseTooLarge
from cortex.wire.node.headers import AS_BASE64, VECTORS
from cortex.wire.pooling.response import VECTOR_STARTS, floats

ASKED: Headers = ((VECTORS.encode(), AS_BASE64.encode()),)
"""The header of a request whose response may be decoded here."""
MAX_VECTOR_BYTES = 1 << 20
"""The size as base64; no model has a vector of this length."""
_DESCRIPTIONS = (VECTORS.encode(), b"content-length")


def are_encoded(headers: Headers) -> bool:
    """Whether the response with `headers` has vectors that the client did not ask for in this form."""
    return any(name == _DESCRIPTIONS[0] for name, _ in headers)


class FloatVectors:
    """A translation of the relay: base64 in, floats out, with all that is between the vectors left as it is."""

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
