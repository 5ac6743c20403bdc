"""The gateway's traffic and the fleet's memory over the last hour and the last day, in a few megabytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from cortex.fleet.topology import Fleet
from cortex.gateway.history.device_memory import DeviceMemory, Holdings
from cortex.gateway.history.series import Bucket, Ring
from cortex.gateway.proxy.accounting.activity import RequestRecord

Window = Literal["hour", "day"]
WINDOWS: tuple[Window, ...] = ("hour", "day")
_DAY_S = 86_400
MAX_DEVICES = 1024
"""Devices in one response."""


class Seen(Protocol):
    """What the dispatcher knows."""

    @property
    def fleet(self) -> Fleet: ...
    @property
    def queue_depths(self) -> dict[str, int]: ...


class History:
    """Owned by the loop. `wall_clock`: seconds since 1970."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self.rings: dict[Window, Ring] = {"hour": Ring(10, 360), "day": Ring(300, 288)}
        self.memory = DeviceMemory(_DAY_S)
        self._memory_at = 0.0
        self._recent = Bucket(at=0.0)
        """What is in no ring yet: requests are counted once, and added to the rings together."""
        self._step_ends_at = 0.0
        """The end of the shortest step that `_recent` is in."""

    def request_ended(self, record: RequestRecord) -> None:
        """Counted in the step in which it ended."""
        if record.ended_at >= self._step_ends_at:
            self.fold()
        recent, usage = self._recent, record.usage
        recent.requests += 1
        if usage is not None:
            recent.prompt_tokens += usage.prompt_tokens
            recent.completion_tokens += usage.completion_tokens
        if record.first_token_s is not None:
            recent.count_first_token(record.first_token_s)

    def fold(self) -> None:
        """Add what was counted since the last time to the rings."""
        if self._recent.requests:
            for ring in self.rings.values():
                ring.current(self._recent.at).add(self._recent)
        now, step_s = self._wall_clock(), self.rings["hour"].step_s
        self._recent = Bucket(at=now)
        self._step_ends_at = now - now % step_s + step_s

    def happened(self, event: dict[str, Any]) -> None:
        """An event of the fleet: loads and evictions count when they begin."""
        self.fold()  # into their step, before an event opens the next one
        if event["kind"] == "load_started":
            for bucket in self._current():
                bucket.loads += 1
        elif event["kind"] == "unload_started" and event.get("cause") == "evicted":
            for bucket in self._current():
                bucket.evictions += 1

    def sample(self, seen: Seen) -> None:
        """About once a second. The memory is looked at once a step."""
        self.fold()
        num_waiting = sum(seen.queue_depths.values())
        hour, day = self._current()
        for bucket in (hour, day):
            bucket.waiting = max(bucket.waiting, num_waiting)
        if hour.at != self._memory_at:
            self._memory_at = hour.at
            self.memory.sample(seen.fleet, self._wall_clock())

    def as_json(self, window: Window) -> dict[str, Any]:
        """For the page and `/fleet/history`: one value per step, oldest first; None where nothing was measured."""
        self.fold()
        now, ring = self._wall_clock(), self.rings[window]
        buckets = ring.window(now)
        return {
            "window": window,
            "step_s": ring.step_s,
            "times": [bucket.at for bucket in buckets],
            "requests": [bucket.requests for bucket in buckets],
            "prompt_tokens_per_s": [bucket.prompt_tokens / ring.step_s for bucket in buckets],
            "completion_tokens_per_s": [bucket.completion_tokens / ring.step_s for bucket in buckets],
            "first_token_p50_s": [bucket.quantile(0.5) for bucket in buckets],
            "first_token_p95_s": [bucket.quantile(0.95) for bucket in buckets],
            "waiting": [bucket.waiting for bucket in buckets],
            "loads": [bucket.loads for bucket in buckets],
            "evictions": [bucket.evictions for bucket in buckets],
            "devices": _devices(self.memory.since(buckets[0].at)),
        }

    def _current(self) -> tuple[Bucket, Bucket]:
        now = self._wall_clock()
        return self.rings["hour"].current(now), self.rings["day"].current(now)


def _devices(changes: list[Holdings]) -> list[dict[str, Any]]:
    devices: dict[tuple[str, int], dict[str, Any]] = {}
    for each in sorted(changes, key=lambda change: (change.key, change.at)):
        entry = {"node": each.node, "device": each.index, "total_bytes": each.total_bytes, "changes": []}
        device = devices.setdefault(each.key, entry)
        device["changes"].append({"at": each.at, "models": dict(each.models)})
    return list(devices.values())[:MAX_DEVICES]
