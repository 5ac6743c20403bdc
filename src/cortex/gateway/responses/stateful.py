"""Requests of the Responses API: resolves references to stored responses, and stores responses.

A node gets the whole conversation and knows nothing of stored responses. A request without state is served like any
other. Of a stream only the last event is captured, which has the whole response object, so storing a stream costs no
work per event. A response without its end (the client disconnected or the node failed) is not stored. If another
gateway may get the next request, the client gets the end of the response only once it is stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Raw

from cortex.gateway.proxy.admission import ReceivedRequest, ResponseKeeper
from cortex.gateway.proxy.inference import Inference
from cortex.gateway.proxy.routes import InferenceRoute
from cortex.gateway.responses.background import BackgroundRuns
from cortex.gateway.responses.conversations import StoredConversations
from cortex.gateway.responses.response_object import (
    WholeEvents,
    head_of,
    last_event,
    new_response_id,
    response_in_event,
)
from cortex.gateway.responses.store import ResponseStore
from cortex.gateway.responses.tables import NewResponse, StoredResponse
from cortex.http.observer import Outcome
from cortex.http.request import Headers
from cortex.http.server.deferred_end import DeferredEnd
from cortex.http.server.exchange import Exchange
from cortex.parsing import items
from cortex.parsing.conversations import Completed, Completion, References, find_references
from cortex.parsing.items import StoredTexts
from cortex.system.tasks import OwnedTasks
from cortex.wire.dialects.openai_responses.kept import KeptResponse
from cortex.wire.errors import (
    BodyTooLarge,
    CortexError,
    InvalidValue,
    PreviousResponseNotFound,
    shorten,
)
from cortex.wire.fields.body import ABSENT
from cortex.wire.node.headers import NOT_STORED
from cortex.wire.request_summary import RequestSummary

log = logging.getLogger(__name__)

_MAX_REFERRED_BYTES = 128 * 1024 * 1024
"""Size of all stored responses that one request may continue or refer to."""


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


class _Referred(NamedTuple):
    """The stored responses that a request refers to."""

    earlier: Sequence[StoredTexts]
    """Those that it continues, oldest first."""
    others: Sequence[StoredTexts]
    """Those with items that it refers to."""


class Turn(Protocol):
    """A request of a connection that remembers its latest responses, whether or not they are stored."""

    def remembered(self, response_id: str) -> Sequence[StoredTexts] | None:
        """The response and those that it continues, oldest first; None if the connection has forgotten it."""

    def begins(self, earlier: Sequence[StoredTexts], input: Raw | bytes) -> None:
        """The request is being sent. It continues `earlier`; its own `input` is a string or an array of items."""


class StatefulInference:
    """Serves `/v1/responses`, its token counts and its compaction. Owns a task for each request that waits for the
    database."""

    def __init__(
        self,
        inference: Inference,
        store: ResponseStore,
        background: BackgroundRuns,
        conversations: StoredConversations,
    ) -> None:
        self._inference = inference
        self._conversations = conversations
        self._store = store
        self._background = background
        self._tasks = OwnedTasks()

    def begin(self, exchange: Exchange, route: InferenceRoute, turn: Turn | None = None) -> None:
        """Take over an exchange of `route`. `turn`: its client has a connection that remembers responses."""
        self._inference.receive(exchange, route, partial(self._serve, turn=turn))

    def _serve(self, received: ReceivedRequest, turn: Turn | None) -> None:
        summary = received.envelope.summary
        is_continued = summary.previous_response_id is not None or summary.conversation_id is not None
        if is_continued or items.REFERENCE in received.body or summary.background:
            task = self._tasks.start(self._begin_with_state(received, summary, turn))
            received.exchange.on_disconnect(task.cancel)
        else:
            if turn is not None:
                turn.begins((), received.envelope.input)
            self._inference.serve(received, self._keeper(received, summary, received.envelope.input))

    async def close(self) -> None:
        """Reject what still waits for the database."""
        await self._tasks.cancel()

    async def _begin_with_state(self, received: ReceivedRequest, summary: RequestSummary, turn: Turn | None) -> None:
        try:
            in_background = summary.background and _makes_response(received)
            if in_background and summary.store is False:
                raise InvalidValue("background: it needs a stored response; leave `store` out.", param="background")
            needs_id = in_background or turn is not None or self._is_stored(received, summary)
            id = new_response_id() if needs_id else None
            referred = await self._referred(received, summary, turn)
            completion = Completion(
                received.route.generates, in_background, id, self._inference.services.config.max_body_mb
            )
            completed = await self._inference.services.parser.complete(
                received.body, referred.earlier, referred.others, completion, received.client
            )
            if turn is not None:
                turn.begins(referred.earlier, completed.stored_input or ABSENT)
            await self._begin_completed(received, summary, id, completed)
        except asyncio.CancelledError:
            received.span.end({}, error="client_disconnected")
            raise
        except CortexError as error:
            self._inference.reject(received, error)
        except Exception:
            log.exception("a request with state failed")
            self._inference.reject(received, CortexError("Internal error of the gateway; its log has the details."))

    async def _begin_completed(
        self, received: ReceivedRequest, summary: RequestSummary, id: str | None, completed: Completed
    ) -> None:
        read, stored_input = completed
        whole = msgspec.structs.replace(received, body=read.body, envelope=read.envelope)
        if id is None or stored_input is None or not (summary.background and _makes_response(received)):
            self._inference.serve(whole, self._keeper(received, summary, stored_input or ABSENT, id))
            return
        kept = KeptResponse(id, summary.previous_response_id, background=True, conversation_id=summary.conversation_id)
        await self._background.begin(received, whole, kept=kept, key_id=_key_id(received), stored_input=stored_input)

    def _is_stored(self, received: ReceivedRequest, summary: RequestSummary) -> bool:
        """Whether the client and the operator want the response to be stored."""
        is_wanted = summary.store is not False or summary.conversation_id is not None
        return _makes_response(received) and is_wanted and self._store.section.store

    def _keeper(
        self, received: ReceivedRequest, summary: RequestSummary, input: Raw | bytes, id: str | None = None
    ) -> ResponseKeeper | None:
        """The keeper of the response, as `id` if it has one already; None if the client or the operator does not want
        it stored."""
        section = self._store.section
        is_retrievable = summary.store is not False
        if not _makes_response(received) or not (is_retrievable or summary.conversation_id is not None):
            return None
        if not section.store:
            return NotStored("this gateway stores no responses (responses.store)") if summary.store else None
        if self._store.database.is_failing:
            return NotStored("the database of stored responses is not available")
        if memoryview(input).nbytes > self._store.max_entry_bytes:
            return NotStored(f"the input is larger than {section.max_entry_mb} MB (responses.max_entry_mb)")
        kept = KeptResponse(
            id or new_response_id(),
            summary.previous_response_id,
            conversation_id=summary.conversation_id,
            store=is_retrievable,
        )
        deferred_end = None
        if self._store.database.is_shared or summary.conversation_id is not None:
            max_held_s = self._inference.services.limits.max_held_s
            deferred_end = DeferredEnd.of(received.exchange, self._store.max_entry_bytes, max_held_s)
        return StoringKeeper(
            self._store, kept, _key_id(received), input, stream=summary.stream, deferred_end=deferred_end
        )

    async def _referred(self, received: ReceivedRequest, summary: RequestSummary, turn: Turn | None) -> _Referred:
        """Everything that a request refers to. Raises the CortexError for a missing response or item."""
        references = References(False, ())
        if items.REFERENCE in received.body:
            references = await self._inference.services.parser.run(
                find_references, received.route.generates, body=received.body, client=received.client
            )
        previous_id, conversation_id = summary.previous_response_id, summary.conversation_id
        remembered = turn.remembered(previous_id) if turn is not None and previous_id is not None else None
        if remembered is not None:
            previous_id = None
        stateful = {
            "input": references.are_any,
            "previous_response_id": previous_id is not None,
            "conversation": conversation_id is not None,
            "background": summary.background,
        }
        if not self._store.section.store and any(stateful.values()):
            param = next(name for name, is_used in stateful.items() if is_used)
            raise InvalidValue(
                f"{param}: this gateway stores no responses (responses.store); send the whole conversation in 'input'.",
                param=param,
            )
        key_id = _key_id(received)
        earlier: Sequence[StoredResponse] = ()
        if previous_id is not None:
            earlier = await self._store.read_chain(key_id, previous_id)
            _check_chain(earlier, previous_id)
        others: list[StoredResponse] = []
        texts = [*(remembered or ()), *(stored.texts for stored in earlier)]
        if conversation_id is not None:
            texts = [await self._conversations.texts(key_id, conversation_id)]
        num_bytes = sum(len(each.input) + len(each.body) for each in texts)
        for response_id in references.response_ids:
            found = await self._store.read(key_id, response_id)
            if found is not None:
                others.append(found)
                num_bytes += len(found.input) + len(found.body)
            if num_bytes > _MAX_REFERRED_BYTES:
                break
        if num_bytes > _MAX_REFERRED_BYTES:
            raise BodyTooLarge(
                f"The responses that this request refers to have more than {_MAX_REFERRED_BYTES} bytes. Send "
                "the items themselves, or start a new conversation."
            )
        return _Referred(texts, [stored.texts for stored in others])


def _makes_response(received: ReceivedRequest) -> bool:
    """Whether the result is a response object, which can be stored: not a count of tokens, nor a compaction."""
    return received.route.generates and received.route.dialect == "openai_responses"


def _key_id(received: ReceivedRequest) -> str:
    return received.key.id if received.key is not None else ""


def _check_chain(chain: Sequence[StoredResponse], previous_id: str) -> None:
    """Raises PreviousResponseNotFound, or InvalidValue for a response that has not ended."""
    param = "previous_response_id"
    if not chain:
        raise PreviousResponseNotFound(
            f"Previous response with id '{shorten(previous_id)}' not found. It was not stored for this key, was "
            "deleted, or has expired: send the whole conversation in 'input'.",
            param=param,
        )
    if chain[0].previous_id is not None:
        raise PreviousResponseNotFound(
            f"Previous response with id '{shorten(previous_id)}' continues '{chain[0].previous_id}', which was deleted "
            "or has expired: send the whole conversation in 'input'.",
            param=param,
        )
    if not chain[-1].is_finished:
        raise InvalidValue(
            f"previous_response_id: '{shorten(previous_id)}' is {chain[-1].status}; wait until it has ended.",
            param=param,
        )
