"""Telling whoever pays what a stream cost, although its client did not ask."""

from __future__ import annotations

import msgspec

from cortex.wire import sse
from cortex.wire.dialects import EventEncoder
from cortex.wire.events import AnyEvent, Finish
from cortex.wire.openai_chat.stream import usage_body
from cortex.wire.response import total_usage


class MeteredEncoder:
    """A dialect's encoder that also says `: usage {…}`, an SSE comment, just before the last event.

    Before, not behind: a client that hangs up at `[DONE]` must not take the bill with it. One per answer.
    """

    def __init__(self, encoder: EventEncoder, *, num_choices: int) -> None:
        self._encoder = encoder
        self._num_choices = num_choices
        self._finishes: list[Finish] = []

    def encode(self, event: AnyEvent) -> bytes:
        data = self._encoder.encode(event)
        if not isinstance(event, Finish):
            return data
        self._finishes.append(event)
        if len(self._finishes) < self._num_choices:
            return data
        return sse.comment(b"usage " + msgspec.json.encode(usage_body(total_usage(self._finishes)))) + data
