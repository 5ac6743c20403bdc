"""The gateway's traffic and the fleet's memory over the last hour and the last day, in a few megabytes, kept in the
database so that a restart does not end them.

Traffic is in rings of buckets, each a step of time. First-token times are counted in buckets of their own, each a tenth
longer than the one before: two of them can be added, and a quantile of the sum is exact to a twentieth. What models
held of each device changes only when models come and go, so that changes are kept instead of samples.

Each gateway has its own history. Only what has changed is written, about once a minute. While the database is
unavailable, the history continues in memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from cortex.fleet.devices import bytes_held
from cortex.fleet.topology import Fleet
from cortex.gateway.database import Database, Execute, Schema, StoreError
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.proxy.accounting.activity import ActivityLog, RequestRecord
from cortex.wire.node.protocol import ModelState

log = logging.getLogger(__name__)

_GROWTH = math.log(1.1)
_SHORTEST_S = 1e-4


@dataclass(slots=True, kw_only=True)
class Bucket:
    """What happened in one step of time."""

    at: float
    """When the step began: seconds since 1970."""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_tokens: dict[int, int] = field(default_factory=dict)
    """How many times to the first token were of each length, on a scale that grows by a tenth."""
    waiting: int = 0
    """The most requests that waited at a time."""
    loads: int = 0
    evictions: int = 0

    def count_first_token(self, first_token_s: float) -> None:
        length = int(math.log(first_token_s / _SHORTEST_S) / _GROWTH) if first_token_s > _SHORTEST_S else 0
        self.first_tokens[length] = self.first_tokens.get(length, 0) + 1

    def add(self, other: Bucket) -> None:
        """Count what happened in `other` here too."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        for length, count in other.first_tokens.items():
            self.first_tokens[length] = self.first_tokens.get(length, 0) + count
        self.waiting = max(self.waiting, other.waiting)
        self.loads += other.loads
        self.evictions += other.evictions

    def quantile(self, part: float) -> float | None:
        """The time to the first token that `part` of the requests did not exceed."""
        total = sum(self.first_tokens.values())
        left = math.ceil(part * total)
        for length in sorted(self.first_tokens):
            left -= self.first_tokens[length]
            if left <= 0:
                return _SHORTEST_S * math.exp((length + 0.5) * _GROWTH)
        return None


class Ring:
    """The latest buckets of one step. Those of times in which nothing happened are absent."""

    def __init__(self, step_s: int, num_steps: int) -> None:
        self.step_s = step_s
        self.num_steps = num_steps
        self._buckets: deque[Bucket] = deque()

    def current(self, now: float) -> Bucket:
        """The bucket of this moment. A clock that was set back continues the latest one."""
        at = now - now % self.step_s
        if not self._buckets or self._buckets[-1].at < at:
            self._buckets.append(Bucket(at=at))
            while self._buckets[0].at <= at - self.num_steps * self.step_s:
                self._buckets.popleft()
        return self._buckets[-1]

    def restore(self, buckets: Iterable[Bucket], now: float) -> None:
        """Begin with the buckets of an earlier process, before the first of this one."""
        oldest = now - self.num_steps * self.step_s
        self._buckets = deque(sorted((each for each in buckets if oldest < each.at <= now), key=lambda each: each.at))

    def since(self, at: float) -> list[Bucket]:
        """The buckets that began at `at` or later, the current one included."""
        return [bucket for bucket in self._buckets if bucket.at >= at]

    def window(self, now: float) -> list[Bucket]:
        """One bucket for every step until now, oldest first."""
        last = int(now // self.step_s)
        known = {int(bucket.at // self.step_s): bucket for bucket in self._buckets}
        steps = range(last - self.num_steps + 1, last + 1)
        return [known.get(step) or Bucket(at=float(step * self.step_s)) for step in steps]


MAX_CHANGES = 20_000
"""Changes that are kept of all devices together; the oldest are dropped."""


class DeviceKey(NamedTuple):
    node: str
    device: int


class Holdings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a device holds from one moment on."""

    at: float
    node: str
    index: int
    total_bytes: int
    used_bytes: int
    """By anything, other programs included; as of that moment."""
    models: tuple[tuple[str, int], ...]

    @property
    def key(self) -> DeviceKey:
        return DeviceKey(self.node, self.index)


class DeviceMemory:
    """The changes of a day, oldest first."""

    def __init__(self, keep_s: float, max_changes: int = MAX_CHANGES) -> None:
        self._keep_s = keep_s
        self._max_changes = max_changes
        self._changes: deque[Holdings] = deque()
        self._latest: dict[DeviceKey, Holdings] = {}

    def sample(self, fleet: Fleet, now: float) -> None:
        """Record the devices that hold other models than before. One whose node is down or gone holds none."""
        found = list(holdings_of(fleet, now))
        unknown = {node.name for node in fleet.nodes if not node.healthy and node.problem is None}
        for key in self._latest.keys() - {each.key for each in found}:
            latest = self._latest[key]
            if latest.models and key.node not in unknown:
                found.append(msgspec.structs.replace(latest, at=now, used_bytes=0, models=()))
            elif not latest.models and latest.at < now - self._keep_s:
                del self._latest[key]
        for holdings in found:
            before = self._latest.get(holdings.key)
            if before is None or before.models != holdings.models or before.total_bytes != holdings.total_bytes:
                self._add(holdings)
        while self._changes and (self._changes[0].at < now - self._keep_s or len(self._changes) > self._max_changes):
            self._changes.popleft()

    def restore(self, changes: list[Holdings], now: float) -> None:
        for holdings in sorted(changes, key=lambda each: each.at):
            if now - self._keep_s <= holdings.at <= now:
                self._add(holdings)

    def since(self, at: float) -> list[Holdings]:
        """The changes at `at` or later, and the state of each device before them."""
        before: dict[DeviceKey, Holdings] = {}
        later: list[Holdings] = []
        for holdings in self._changes:
            if holdings.at < at:
                before[holdings.key] = holdings
            else:
                later.append(holdings)
        missing = {key: latest for key, latest in self._latest.items() if latest.at < at and key not in before}
        return [*before.values(), *missing.values(), *later]

    def _add(self, holdings: Holdings) -> None:
        self._changes.append(holdings)
        self._latest[holdings.key] = holdings


def holdings_of(fleet: Fleet, now: float) -> Iterator[Holdings]:
    """What each device holds now; nothing of a node that is down."""
    for node in fleet.nodes:
        if not node.healthy:
            continue
        statuses = [held.status for held in node.residencies.values() if held.state is not ModelState.COLD]
        statuses += node.members
        for device in node.devices:
            sizes = ((status.id, bytes_held(device.index, device.kind, status)) for status in statuses)
            yield Holdings(
                at=now,
                node=node.name,
                index=device.index,
                total_bytes=device.total_bytes,
                used_bytes=device.total_bytes - device.free_bytes,
                models=tuple(sorted((model, num_bytes) for model, num_bytes in sizes if num_bytes)),
            )


Window = Literal["hour", "day"]
WINDOWS: tuple[Window, ...] = ("hour", "day")
_DAY_S = 86_400
MAX_DEVICES = 1024
"""Devices in one response."""


class FleetActivity(Protocol):
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
        """Not in a ring yet: each request is counted here once, and the sums are added to the rings."""
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

    def sample(self, activity: FleetActivity) -> None:
        """About once a second. Memory is sampled once per step."""
        self.fold()
        num_waiting = sum(activity.queue_depths.values())
        hour, day = self._current()
        for bucket in (hour, day):
            bucket.waiting = max(bucket.waiting, num_waiting)
        if hour.at != self._memory_at:
            self._memory_at = hour.at
            self.memory.sample(activity.fleet, self._wall_clock())

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


SCHEMA: Schema = (
    "CREATE TABLE IF NOT EXISTS history (gateway TEXT NOT NULL, kind TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, "
    "entry TEXT NOT NULL, PRIMARY KEY (gateway, kind, at))",
)
INTERVAL_S = 60.0
KEEP_S = 86_400.0
KEEP_HOUR_S = 3_600.0
"""How long the steps of the window of an hour are kept."""
_WRITE = (
    "INSERT INTO history (gateway, kind, at, entry) VALUES ($1, $2, $3, $4) "
    "ON CONFLICT (gateway, kind, at) DO UPDATE SET entry = excluded.entry"
)
_DELETE_OLD = "DELETE FROM history WHERE at < $1 OR (kind = 'hour' AND at < $2)"
"""For entries of all gateways, because a gateway that does not come back leaves its own behind."""


class _Entry(NamedTuple):
    kind: str
    at: float
    text: str


class HistoryStore:
    """Owned by the loop. Never raises. A database that does not exist is not created."""

    def __init__(self, activity: ActivityLog, event_log: EventLog, database: Database, port: int) -> None:
        """`port` tells the gateways of a host apart."""
        self.history = History(time.time)
        activity.subscribe(self.history.request_ended)
        event_log.subscribe(self.history.happened)
        self._gateway = f"{socket.gethostname()}:{port}"
        self._database = database.use(SCHEMA)
        self._saved_at = 0.0

    async def restore(self) -> None:
        """Continue with what the database has, before the first request."""
        entries, now = await self._read(), time.time()
        try:
            for window in WINDOWS:
                texts = [entry.text for entry in entries if entry.kind == window]
                buckets = [msgspec.json.decode(text, type=Bucket) for text in texts]
                self.history.rings[window].restore(buckets, now)
            texts = [entry.text for entry in entries if entry.kind.startswith("memory ")]
            self.history.memory.restore([msgspec.json.decode(text, type=Holdings) for text in texts], now)
        except msgspec.DecodeError as problem:
            log.warning("the history before the restart is unreadable: %s", problem)
        self._saved_at = now

    async def save(self) -> None:
        """Write what has changed since the last time."""
        self.history.fold()
        now, since = time.time(), self._saved_at
        entries = [
            _Entry(window, bucket.at, msgspec.json.encode(bucket).decode())
            for window in WINDOWS
            for bucket in self.history.rings[window].since(since - self.history.rings[window].step_s)
        ]
        entries += [
            _Entry(f"memory {change.index} {change.node}", change.at, msgspec.json.encode(change).decode())
            for change in self.history.memory.since(since)
            if change.at >= since
        ]
        if self._database.exists:
            with contextlib.suppress(StoreError):  # the next write includes it
                await self._database.do(lambda execute: self._write(execute, entries, now))
                self._saved_at = now

    async def _read(self) -> list[_Entry]:
        if not self._database.exists:
            return []
        query, oldest = "SELECT kind, at, entry FROM history WHERE gateway = $1 AND at >= $2", time.time() - KEEP_S
        try:
            rows = await self._database.do(lambda execute: execute(query, (self._gateway, oldest)))
        except StoreError:
            return []
        return [_Entry(str(kind), float(at), str(text)) for kind, at, text in rows]

    def _write(self, execute: Execute, entries: list[_Entry], now: float) -> None:
        for entry in entries:
            execute(_WRITE, (self._gateway, *entry))
        execute(_DELETE_OLD, (now - KEEP_S, now - KEEP_HOUR_S))
