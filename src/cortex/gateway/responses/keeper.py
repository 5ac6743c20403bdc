"""Captures a response while it is relayed, and stores it when it has ended.

Of a stream only the last event is captured, which has the whole response object, so keeping a stream costs no work per
event. A response without its end (the client disconnected or the node failed) is not stored. If another gateway may get
the next request, the client gets the end of the response only once it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import Raw

from cortex.gateway.responses.response_object import WholeEvents, head_of, last_event, response_in_event
from cortex.gateway.responses.store import ResponseStore
from cortex.gateway.responses.tables import NewResponse
from cortex.http.observer import Outcome
from cortex.http.request import Headers
from cortex.http.server.deferred_end import DeferredEnd
from cortex.parsing import items
from cortex.wire.dialects.openai_responses.kept import KeptResponse
from cortex.wire.node.headers import NOT_STORED


class StreamCapture:
    """The response object in the last event of a stream, which may come in pieces."""

    __slots__ = ("_events", "captured")

    def __init__(self, max_bytes: int) -> None:
        self.captured: bytes | None = None
        """The payload of that event; None before it arrives, and if it exceeds the limit."""
        self._events = WholeEvents(max_bytes)

    @property
    def is_too_large(self) -> bool:
        """Whether an event was longer than the limit."""
        return self._events.num_dropped > 0

    def push(self, data: bytes) -> None:
        if self.captured is None:
            self.captured = last_event(self._events.push(data))

    def response(self) -> bytes:
        assert self.captured is not None, "nothing was captured"
        return response_in_event(self.captured)


class BodyCapture:
    """A whole body, up to a limit."""

    __slots__ = ("_max_bytes", "captured")

    def __init__(self, max_bytes: int) -> None:
        self.captured: bytearray | None = bytearray()
        """None if it exceeds the limit."""
        self._max_bytes = max_bytes

    @property
    def is_too_large(self) -> bool:
        return self.captured is None

    def push(self, data: bytes) -> None:
        if self.captured is not None:
            self.captured += data
            if len(self.captured) > self._max_bytes:
                self.captured = None

    def response(self) -> bytes:
        assert self.captured is not None, "nothing was captured"
        return bytes(self.captured)


class StoringKeeper:
    """Stores the response of one request."""

    __slots__ = ("_capture", "_held_end", "_input", "_key_id", "_store", "kept")

    headers: Headers = ()

    def __init__(
        self,
        store: ResponseStore,
        kept: KeptResponse,
        key_id: str,
        input: Raw | bytes,
        *,
        stream: bool,
        deferred_end: DeferredEnd | None = None,
    ) -> None:
        """`input` is the input of the client's request; bytes if its references are resolved and its items have ids.
        The client gets the end of the response, `deferred_end`, after the response is stored."""
        self.kept = kept
        self._store = store
        self._key_id = key_id
        self._input = input
        self._held_end = deferred_end
        self._capture = (StreamCapture if stream else BodyCapture)(store.max_entry_bytes)

    @property
    def capture(self) -> Callable[[bytes], None]:
        return self._capture.push if self._held_end is None else self._capture_and_hold

    def _capture_and_hold(self, data: bytes) -> None:
        """`data` is not written yet; a whole body is held from its first byte."""
        self._capture.push(data)
        assert self._held_end is not None
        if self._capture.captured is not None:
            self._held_end.hold()
        elif self._capture.is_too_large:
            self._held_end.release()

    def ended(self, status: int, outcome: Outcome) -> None:
        """Store the response if its end was captured, whether or not the client has read it."""
        release = self._held_end.release if self._held_end is not None else _nothing
        captured = self._capture.captured
        if status == 200 and captured is not None:
            num_bytes = len(captured) + memoryview(self._input).nbytes
            build = partial(_built, self.kept, self._key_id, self._input, self._capture)
            self._store.save(build, num_bytes, release)
            return
        release()
        if status == 200 and self._capture.is_too_large:
            self._store.too_large()
        elif status == 200 and outcome is Outcome.COMPLETE:
            self._store.without_end()


class NotStored:
    """The keeper of a response that cannot be stored although the client wants it: a header says why."""

    __slots__ = ("headers",)

    kept = None
    capture = None

    def __init__(self, reason: str) -> None:
        self.headers: Headers = ((NOT_STORED.encode(), reason.encode()),)

    def ended(self, status: int, outcome: Outcome) -> None:
        """Nothing is kept."""


def _nothing() -> None:
    """Nothing to store."""


def _built(kept: KeptResponse, key_id: str, input: Raw | bytes, capture: StreamCapture | BodyCapture) -> NewResponse:
    """Runs on the thread of the store. Raises msgspec.DecodeError when the response is not one."""
    response = capture.response()
    stored_input = items.with_ids(items.split(input), kept.id) if isinstance(input, Raw) else input
    status = head_of(response).status
    return NewResponse(
        kept.id,
        key_id,
        kept.previous_response_id,
        status,
        stored_input,
        response,
        kept.conversation_id,
        is_retrievable=kept.store,
    )
