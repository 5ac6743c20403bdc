"""The response of a server to a chat request, as events."""

from __future__ import annotations

from cortex.http.request import Headers
from cortex.http.upstream.faults import ResponseTooLarge
from cortex.wire.dialects import openai_chat
from cortex.wire.dialects.openai_chat.upstream_response import foreign_error
from cortex.wire.errors import CortexError
from cortex.wire.events import AnyEvent

MAX_BODY_BYTES = 32 << 20
"""The longest response that is read as a whole."""
MAX_ERROR_BYTES = 1 << 20
"""The same for an error."""
_JSON = b"application/json"


def check_length(num_bytes: int, status: int) -> None:
    """Raises ResponseTooLarge for a whole response over the limit."""
    most = MAX_BODY_BYTES if status < 400 else MAX_ERROR_BYTES
    if num_bytes > most:
        raise ResponseTooLarge(f"its response is over {most} bytes, more than is read as a whole")


class ForeignResponse:
    """One response. Call `head`, then `feed` with each piece, then `finish`. A server that ignores `stream` sends its
    events at the end."""

    def __init__(self, *, is_stream: bool) -> None:
        """`is_stream`: what the request asked for."""
        self._decoder = openai_chat.ResponseDecoder() if is_stream else None
        self._body = bytearray()
        self.status = 200

    @property
    def is_whole(self) -> bool:
        """Whether the response is not a stream."""
        return self._decoder is None

    @property
    def error(self) -> CortexError | None:
        """The server's error as one of ours; None if it is not an error."""
        return foreign_error(self.status, bytes(self._body)) if self.status >= 400 else None

    def head(self, status: int, headers: Headers) -> None:
        self.status = status
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if status >= 400 or kind.startswith(_JSON):
            self._decoder = None

    def feed(self, data: bytes) -> list[AnyEvent]:
        """The events that `data` completes. Raises ResponseTooLarge, and the CortexError of a malformed stream."""
        if self._decoder is not None:
            return self._decoder.feed(data)
        self._body += data
        check_length(len(self._body), self.status)
        return []

    def finish(self) -> list[AnyEvent]:
        """The remaining events. Raises the server's error, or the CortexError of an incomplete response."""
        if (error := self.error) is not None:
            raise error
        return self._decoder.finish() if self._decoder is not None else openai_chat.unfold(bytes(self._body))
