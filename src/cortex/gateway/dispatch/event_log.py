"""Recent decisions and events of the fleet, for `/fleet/decisions` and `/fleet/events`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from cortex.fleet.placement import explain
from cortex.fleet.placement.decision import Decision

log = logging.getLogger(__name__)

MAX_DECISIONS = 256
MAX_EVENTS = 256
"""Loads, failures and changes of nodes that are kept; decisions have a limit of their own."""

Subscriber = Callable[[dict[str, Any]], None]


class EventLog:
    """Used on the loop's thread only. Subscribers are called synchronously and must not raise."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._decisions: deque[dict[str, Any]] = deque(maxlen=MAX_DECISIONS)
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._last: dict[str, tuple[object, ...]] = {}
        self._subscribers: set[Subscriber] = set()

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """Newest first."""
        return list(reversed(self._decisions))

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened in the fleet, other than decisions, newest first."""
        return list(reversed(self._events))

    def decided(self, decision: Decision) -> None:
        """Record a decision, unless the last one for the model has the same outcome for the same reasons."""
        verdicts = tuple((each.node, each.verdict) for each in decision.assessments)
        summary = (decision.action, decision.node, decision.evictions, verdicts)
        if self._last.get(decision.model_id) == summary:
            return
        self._last[decision.model_id] = summary
        record = explain.as_json(decision) | {"at": self._wall_clock()}
        self._decisions.append(record)
        log.info(record["outcome"], extra={"model": decision.model_id, "action": decision.action})
        self._publish({"kind": "decision", **record})

    def why_waiting(self, model: str) -> dict[str, Any] | None:
        """The last decision for the model if its requests wait because of it."""
        last = next((each for each in reversed(self._decisions) if each["model"] == model), None)
        return last if last is not None and last["action"] in ("wait", "reject") else None

    def settled(self, model: str) -> None:
        """The model's situation changed: its next decision is recorded even if it equals the last one."""
        self._last.pop(model, None)

    def happened(self, kind: str, **fields: Any) -> None:
        """Log and publish an event of the fleet. One with a `why` is a problem."""
        log.log(logging.WARNING if "why" in fields else logging.INFO, kind.replace("_", " "), extra=fields)
        event = {"kind": kind, "at": self._wall_clock(), **fields}
        self._events.append(event)
        self._publish(event)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event until the returned function is called."""
        self._subscribers.add(subscriber)
        return lambda: self._subscribers.discard(subscriber)

    def _publish(self, event: dict[str, Any]) -> None:
        for subscriber in tuple(self._subscribers):
            subscriber(event)
