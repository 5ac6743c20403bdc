"""Publishes changes on the node to subscribers.

A slow subscriber costs a bounded amount of memory: it gets the latest state of each subject, not every change.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator

from cortex.wire.node.protocol import ModelStatus, NodeEvent


class EventFeed:
    """Belongs to one loop."""

    def __init__(self) -> None:
        # Weak: a subscription that is dropped without being read must not stay.
        self._subscribers: weakref.WeakSet[_Subscriber] = weakref.WeakSet()
        self._closed = False

    @property
    def num_subscribers(self) -> int:
        return len(self._subscribers)

    def publish(self, event: NodeEvent) -> None:
        for subscriber in self._subscribers:
            subscriber.put(event)

    def close(self) -> None:
        """Ends every subscription after its unread events."""
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.closed = True
            subscriber.changed.set()

    def subscribe(self, first: tuple[NodeEvent, ...]) -> AsyncIterator[NodeEvent]:
        """`first`, then every event published after this call. The subscription ends with the iterator."""
        subscriber = _Subscriber()
        for event in first:
            subscriber.put(event)
        subscriber.closed = self._closed
        self._subscribers.add(subscriber)
        return self._events_of(subscriber)

    async def _events_of(self, subscriber: _Subscriber) -> AsyncIterator[NodeEvent]:
        try:
            while True:
                while subscriber.unread:
                    yield subscriber.unread.pop(next(iter(subscriber.unread)))
                if subscriber.closed:
                    return
                subscriber.changed.clear()
                await subscriber.changed.wait()
        finally:
            self._subscribers.discard(subscriber)


class _Subscriber:
    def __init__(self) -> None:
        self.unread: dict[tuple[str, str], NodeEvent] = {}
        """By kind and model."""
        self.changed = asyncio.Event()
        self.closed = False

    def put(self, event: NodeEvent) -> None:
        subject = event.model.id if event.model is not None else ""
        self.unread.pop((event.kind, subject), None)  # so the latest state goes to the end
        self.unread[event.kind, subject] = event
        self.changed.set()


def model_event(status: ModelStatus) -> NodeEvent:
    return NodeEvent(kind="model", at_s=time.time(), model=status)
