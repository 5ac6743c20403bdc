"""Requests of the Responses API: those that refer to stored responses are completed, and responses are kept.

A node gets the whole conversation and knows nothing of stored responses. A request without state goes the way of all
others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from msgspec import Raw

from cortex.gateway.proxy.inference import Inference, ReceivedRequest
from cortex.gateway.proxy.request import ResponseKeeper
from cortex.gateway.proxy.routes import Route
from cortex.gateway.responses import items
from cortex.gateway.responses.background import BackgroundRuns
from cortex.gateway.responses.keeper import NotStored, StoringKeeper, num_input_bytes
from cortex.gateway.responses.store import ResponseStore
from cortex.gateway.responses.tables import StoredResponse
from cortex.http.server.exchange import Exchange
from cortex.parsing.cost import LARGE_BYTES
from cortex.parsing.envelope import Facts
from cortex.wire.errors import (
    BodyTooLarge,
    CortexError,
    InvalidValue,
    PreviousResponseNotFound,
    shorten,
)
from cortex.wire.raw_fields import replace_fields

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_REFERRED_BYTES = 256 * 1024 * 1024
"""Size of all stored responses that the references of one request may name."""


class _Conversation(NamedTuple):
    """A request with the stored items that it refers to."""

    own_items: list[Raw]
    """Its input, without references."""
    earlier: list[Raw]
    """What the responses that it continues have said."""


class StatefulInference:
    """Serves `/v1/responses` and its token counts. Owns a task for each request that waits for the database."""

    def __init__(self, inference: Inference, store: ResponseStore, background: BackgroundRuns) -> None:
        self._inference = inference
        self._store = store
        self._background = background
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, exchange: Exchange, route: Route) -> None:
        """Take over an exchange of `route`."""
        self._inference.receive(exchange, route, self._serve)

    def _serve(self, received: ReceivedRequest) -> None:
        facts = received.envelope.facts
        refers = facts.previous_response_id is not None or items.REFERENCE in received.body
        if refers or facts.background:
            task = asyncio.create_task(self._begin_with_state(received, facts))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

            def cancel() -> None:
                task.cancel()

            received.exchange.on_disconnect(cancel)
        else:
            self._inference.serve(received, self._keeper(received, facts, received.envelope.input))

    async def close(self) -> None:
        """Reject what still waits for the database."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _begin_with_state(self, received: ReceivedRequest, facts: Facts) -> None:
        try:
            conversation = await self._conversation(received, facts)
            if facts.background and received.route.generates:
                await self._begin_in_background(received, facts, conversation)
            else:
                keeper = self._keeper(received, facts, conversation.own_items)
                self._inference.serve(await self._completed(received, conversation), keeper)
        except asyncio.CancelledError:
            received.span.end({}, error="client_disconnected")
            raise
        except CortexError as error:
            self._inference.reject(received, error)
        except Exception:
            log.exception("a request with state failed")
            self._inference.reject(received, CortexError("Internal error of the gateway; its log has the details."))

    async def _begin_in_background(self, received: ReceivedRequest, facts: Facts, conversation: _Conversation) -> None:
        if facts.store is False:
            raise InvalidValue("background: it needs a stored response; leave `store` out.", param="background")
        streamed = await self._completed(received, conversation, background=True)
        await self._background.begin(
            received,
            streamed,
            key_id=_key_id(received),
            previous_id=facts.previous_response_id,
            own_items=conversation.own_items,
        )

    def _keeper(self, received: ReceivedRequest, facts: Facts, input: Raw | list[Raw]) -> ResponseKeeper | None:
        """What keeps the response; None when the client or the operator does not want it to be stored."""
        section = self._store.section
        if facts.store is False or not received.route.generates:
            return None
        if not section.store:
            return NotStored("this gateway stores no responses (responses.store)") if facts.store else None
        if self._store.failure is not None:
            return NotStored("the database of stored responses is not available")
        if num_input_bytes(input) > self._store.max_entry_bytes:
            return NotStored(f"the input is larger than {section.max_entry_mb} MB (responses.max_entry_mb)")
        previous_id, key_id = facts.previous_response_id, _key_id(received)
        return StoringKeeper(self._store, key_id, previous_id, input, stream=facts.stream)

    async def _conversation(self, received: ReceivedRequest, facts: Facts) -> _Conversation:
        """The request's items with everything that it refers to. Raises the CortexError of what is not stored."""
        own_items = await _off_loop(len(received.body), partial(items.split, received.envelope.input))
        referred = await _off_loop(len(received.body), partial(items.references, own_items))
        previous_id = facts.previous_response_id
        if not self._store.section.store and (referred or previous_id is not None or facts.background):
            param = "input" if referred else "background" if previous_id is None else "previous_response_id"
            raise InvalidValue(
                f"{param}: this gateway stores no responses (responses.store); send the whole conversation in 'input'.",
                param=param,
            )
        key_id = _key_id(received)
        earlier: Sequence[StoredResponse] = ()
        if previous_id is not None:
            earlier = await self._store.read_chain(key_id, previous_id)
            _check_chain(earlier, previous_id)
        stored: dict[str, StoredResponse] = {}
        num_bytes = sum(_num_bytes(response) for response in earlier)
        for item_id in referred.values():
            place = items.place_of(item_id)
            if place is not None and place.response_id not in stored:
                found = await self._store.read(key_id, place.response_id)
                if found is not None:
                    stored[found.id] = found
                    num_bytes += _num_bytes(found)
                if num_bytes > _MAX_REFERRED_BYTES:
                    raise BodyTooLarge(
                        f"The responses that this request refers to have more than {_MAX_REFERRED_BYTES} bytes. Send "
                        "the items themselves, or start a new conversation."
                    )

        def build() -> _Conversation:
            conversation = _Conversation(items.resolve(own_items, referred, stored), items.context(earlier))
            items.check_count([*conversation.earlier, *conversation.own_items])
            return conversation

        return await _off_loop(len(received.body) + num_bytes, build)

    async def _completed(
        self, received: ReceivedRequest, conversation: _Conversation, *, background: bool = False
    ) -> ReceivedRequest:
        """The request that a node gets: it has the whole conversation. In the background it is streamed, so that a
        node that takes long does not look silent."""
        whole = [*conversation.earlier, *conversation.own_items]
        num_bytes = len(received.body) + num_input_bytes(whole)
        limit_mb = self._inference.services.config.max_body_mb
        if num_bytes > limit_mb * 1024 * 1024:
            raise BodyTooLarge(
                f"With the responses that it continues the request has {num_bytes} bytes; the limit is {limit_mb} MB "
                "(gateway.max_body_mb). Start a new conversation."
            )

        def build() -> ReceivedRequest:
            values = {"input": whole, **({"stream": True} if background else {})}
            body = replace_fields(received.body, values, without=("previous_response_id", "background"))
            return self._inference.changed(received, body)

        return await _off_loop(num_bytes, build)


async def _off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """The result of `work` on `num_bytes`; on a thread if they are many, so that streams are not delayed."""
    return work() if num_bytes < LARGE_BYTES else await asyncio.to_thread(work)


def _num_bytes(stored: StoredResponse) -> int:
    return len(stored.input) + len(stored.body)


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
