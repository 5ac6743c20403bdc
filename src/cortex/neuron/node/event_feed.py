"""What changes on the node, told to everyone who listens. A slow listener costs a bounded amount of memory:
it gets the latest state of each thing, not every step in between."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator

from cortex.wire.node import NodeEvent


class Feed:
    """Belongs to one loop."""

    def __init__(self) -> None:
        # Weak: a subscription that is dropped without ever being read must not stay.
        self._listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()
        self._closed = False

    def publish(self, event: NodeEvent) -> None:
        for listener in self._listeners:
            listener.put(event)

    def close(self) -> None:
        """Ends every subscription after what is still unread."""
        self._closed = True
        for listener in self._listeners:
            listener.closed = True
            listener.changed.set()

    def subscribe(self, first: tuple[NodeEvent, ...]) -> AsyncIterator[NodeEvent]:
        """Events from now on, after `first`. The subscription counts from this call, and ends with the iterator."""
        listener = _Listener()
        for event in first:
            listener.put(event)
        listener.closed = self._closed
        self._listeners.add(listener)
        return self._listen(listener)

    async def _listen(self, listener: _Listener) -> AsyncIterator[NodeEvent]:
        try:
            while True:
                while listener.unread:
                    yield listener.unread.pop(next(iter(listener.unread)))
                if listener.closed:
                    return
                listener.changed.clear()
                await listener.changed.wait()
        finally:
            self._listeners.discard(listener)


class _Listener:
    def __init__(self) -> None:
        self.unread: dict[tuple[str, str], NodeEvent] = {}
        self.changed = asyncio.Event()
        self.closed = False

    def put(self, event: NodeEvent) -> None:
        subject = event.model.id if event.model is not None else ""
        # Taken out first: the latest state goes to the end of the line.
        self.unread.pop((event.kind, subject), None)
        self.unread[event.kind, subject] = event
        self.changed.set()
