"""One request on a client connection, and the answer to it."""

from __future__ import annotations

from collections.abc import Callable

from cortex.gateway.http.request import Headers, Request


class Exchange:
    """Gives one request its answer: either `respond`, or `start`, any number of `write`, `finish`.

    Made by the server, handed to its handler, used on the loop's thread only. Once the client has left, every method is
    a no-op, so callers need not check before each write; calling out of order (two starts, a write before start or after
    finish) is a programming error and raises `RuntimeError`. Header names and values are checked: one that carries a
    line break raises `ValueError` and nothing is sent. Framing headers (`content-length`, `transfer-encoding`,
    `connection`, `date`) are this class's business; callers must not pass the first three.
    """

    request: Request
    started: bool
    """The head of the answer is on its way to the client."""
    closed: bool
    """Over: the answer is complete, was aborted, or the client left."""
    paused: bool
    """The client reads slower than we write: hold back until `resume`."""

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole answer at once, with its Content-Length. For HEAD the body is counted but not sent."""
        raise NotImplementedError

    def start(self, status: int, headers: Headers, content_length: int | None = None) -> None:
        """Begin an answer of a known length, or (None) one whose end is marked by chunking or by closing."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Send a piece of the body now. Never blocks; see `paused`, `on_flow` and `drain` for the client's pace."""
        raise NotImplementedError

    def finish(self, *, keep_alive: bool = True) -> None:
        """End the answer. The connection serves the next request unless `keep_alive` is False or a party asked to close."""
        raise NotImplementedError

    def abort(self) -> None:
        """Cut the connection so that the client sees a broken answer, not a short one."""
        raise NotImplementedError

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` once if the client leaves before the answer is complete: in whatever phase, within a loop turn.

        At most one callback; the last one set counts. Called immediately when the client has already left. Not called after `finish`, `respond` or `abort`.
        """
        raise NotImplementedError

    def on_flow(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Call `pause` when the client's buffer is full and `resume` when it has room again."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Return when there is room to write, or the exchange is closed. For callers that write from a task."""
        raise NotImplementedError
