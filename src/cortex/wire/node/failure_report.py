"""Reports to the gateway why a response failed, including streams that failed although their HTTP status is 200.

A node ends the failed stream of a request that came through a gateway with an SSE comment that has the error's code,
which the gateway does not pass on. Foreign servers send only the error event of their dialect, which is read where
there is no comment.
"""

from __future__ import annotations

import msgspec

from cortex.wire import sse
from cortex.wire.error_encoding import BY_CODE
from cortex.wire.errors import UpstreamInterrupted

_MARK = b"failed "
_COMMENT = b"\n: " + _MARK
_DATA = b"\ndata: "
_DONE = b"\ndata: [DONE]\n"
"""Ends a complete stream of OpenAI's dialects."""


class _Error(msgspec.Struct, frozen=True):
    code: str | int | None = None


class _Event(msgspec.Struct, frozen=True):
    """The fields with which dialects report a failed stream."""

    type: str | None = None
    error: _Error | str | None = None
    code: str | int | None = None
    """Next to an `error` that is text, as Ollama writes it."""

    @property
    def error_code(self) -> str:
        return str(self.error.code if isinstance(self.error, _Error) else self.code)


_decoder = msgspec.json.Decoder(_Event)


def comment(code: str) -> bytes:
    """The end of a failed stream, behind its error event."""
    return sse.last_comment(_MARK + code.encode())


def from_stream(tail: bytes) -> str | None:
    """The code of the error that ended a stream, from its last bytes; None when it did not fail.

    Generated text cannot pass for one: it is JSON inside an event, and JSON has no line breaks inside a string.
    """
    tail = b"\n" + tail  # the beginning of the stream begins a line, too
    if (at := tail.rfind(_COMMENT)) >= 0:
        return _known(_line(tail, at + len(_COMMENT)).decode("latin-1"))
    at = tail.rfind(_DATA)
    if at < 0 or tail.startswith(_DONE, at):
        return None
    try:
        event = _decoder.decode(_line(tail, at + len(_DATA)))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if event.error is None and event.type not in ("error", "response.failed"):
        return None
    return _known(event.error_code)


def from_body(body: bytes) -> str | None:
    """The code in the body of an error response; None where the dialect has none, or a foreign server made it up."""
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found.error_code if found.error is not None and found.error_code in BY_CODE else None


def _line(text: bytes, start: int) -> bytes:
    """The rest of the line from `start` on."""
    end = text.find(b"\n", start)
    return text[start:end] if end >= 0 else text[start:]


def _known(code: str) -> str:
    """Codes become labels of metrics, so that those which a foreign server made up are one code."""
    return code if code in BY_CODE else UpstreamInterrupted.code
