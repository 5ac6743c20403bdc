"""A drive of a simulated fleet: a skewed mix of requests, node failures and cold loads.

Time is simulated: each second of it runs as fast as the dispatcher goes. The CPU time that it took says how many
gateways of one core such traffic needs.
"""

from __future__ import annotations

import heapq
import random
import resource
import time
from bisect import bisect
from collections import Counter
from itertools import accumulate, count

from cortex.gateway.dispatch.leases import Lease, PendingRequest
from cortex.wire.errors import CortexError

from .nodes import MAX_WAIT_S, SimulatedFleet

REQUEST_S = 2.0
"""How long a response takes, on average."""
BYTES_PER_S = 2.5e9
"""How fast a model is loaded from disk."""
FAILURES_PER_HOUR = 60
DOWN_S = 20.0
ABORTS_PER_REQUEST = 0.02
"""The share of clients that disconnect while they wait."""


class Drive:
    """Requests for ready models are skewed as `skew` says; `cold_per_second` more are for any model."""

    def __init__(
        self, fleet: SimulatedFleet, per_second: int, cold_per_second: float, seconds: int, skew: float, seed: int
    ) -> None:
        self.fleet = fleet
        self.cold_share = cold_per_second / per_second
        self.per_second = per_second
        self.seconds = seconds
        self.random = random.Random(seed)
        self.order = self.random.sample(fleet.ready_models(), len(fleet.ready_models()))
        self.weights = list(accumulate((rank + 1) ** -skew for rank in range(len(self.order))))
        self._later: list[tuple[float, int, str, object]] = []
        self._number = count()
        self.ended: Counter[str] = Counter()
        self.waits_s: list[float] = []
        self.oldest_wait_s = 0.0
        self.waiting: dict[int, PendingRequest] = {}
        self.slowest_tick_s = self.slowest_report_s = 0.0

    def run(self) -> None:
        fleet = self.fleet
        begun = time.thread_time()
        start_s = fleet.now
        num_before = fleet.num_evictions
        for second in range(self.seconds):
            self._second()
            if (second + 1) % 10 == 0:
                print(f"{second + 1:4d} s: {self._line()}", flush=True)
        cpu_s = time.thread_time() - begun
        hours = (fleet.now - start_s) / 3600
        mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        waits = sorted(self.waits_s) or [0.0]
        print(f"requests ended: {dict(self.ended)}, waiting now: {sum(fleet.dispatcher.queue_depths.values())}")
        print(
            f"waited for a load: {len(self.waits_s)}, p50 {waits[len(waits) // 2]:.1f} s, "
            f"p99 {waits[len(waits) * 99 // 100]:.1f} s, longest {max(waits):.1f} s (limit {MAX_WAIT_S:.0f} s)"
        )
        print(f"loads {fleet.num_loads}, evictions per hour {(fleet.num_evictions - num_before) / hours:,.0f}")
        print(
            f"CPU {cpu_s / self.seconds:.2f} s per second of traffic; slowest tick {self.slowest_tick_s * 1e3:.1f} ms, "
            f"slowest report {self.slowest_report_s * 1e3:.1f} ms; memory {mebibytes:.0f} MB"
        )

    def _line(self) -> str:
        depths = self.fleet.dispatcher.queue_depths
        return (
            f"ended {sum(self.ended.values()):,}, waiting {sum(depths.values())} for {len(depths)} models, "
            f"loads {self.fleet.num_loads}, nodes down {sum(not up for up in self.fleet.is_up.values())}"
        )

    def _second(self) -> None:
        """Requests and reports arrive evenly; a tick ends the second."""
        fleet = self.fleet
        steps = max(len(fleet.names), 100)
        per_step = self.per_second / steps
        due = 0.0
        for step in range(steps):
            fleet.now += 1.0 / steps
            due += per_step
            while due >= 1.0:
                due -= 1.0
                self._request()
            if step < len(fleet.names):
                self._report(fleet.names[step])
            self._end_due()
            self._take_orders()
            if self.random.random() < FAILURES_PER_HOUR / 3600 / steps * self._time_lapse:
                self._fail(self.random.choice(fleet.names))
        begun = time.thread_time()
        fleet.dispatcher.tick()
        self.slowest_tick_s = max(self.slowest_tick_s, time.thread_time() - begun)
        for pending in self.waiting.values():
            self.oldest_wait_s = max(self.oldest_wait_s, fleet.now - pending.since)

    _time_lapse = 10.0
    """Failures come this many times as often as they would, so that a short drive has some."""

    def _model(self) -> str:
        if self.random.random() < self.cold_share:
            return self.random.choice(self.fleet.models)
        return self.order[bisect(self.weights, self.random.random() * self.weights[-1])]

    def _request(self) -> None:
        fleet, number = self.fleet, next(self._number)
        model = fleet.dispatcher.resolve(self._model()).model_id
        lease = fleet.dispatcher.lease_now(model, lambda: b"a prompt", frozenset())
        if lease is not None:
            self._serve(lease)
            return

        def deliver(result: Lease | CortexError) -> None:
            pending = self.waiting.pop(number, None)
            if isinstance(result, Lease):
                self.waits_s.append(result.waited_s)
                self._serve(result)
            else:
                self.ended[result.code] += 1
            del pending

        pending = PendingRequest(model, lambda: b"a prompt", deliver, fleet.now)
        self.waiting[number] = pending
        try:
            fleet.dispatcher.request_lease(pending)
        except CortexError as error:
            self.waiting.pop(number, None)
            self.ended[error.code] += 1
            return
        if self.random.random() < ABORTS_PER_REQUEST:
            self._at(fleet.now + self.random.uniform(0, 5), "abort", number)

    def _serve(self, lease: Lease) -> None:
        self._at(self.fleet.now + self.random.expovariate(1 / REQUEST_S), "release", lease)

    def _at(self, moment: float, kind: str, what: object) -> None:
        heapq.heappush(self._later, (moment, next(self._number), kind, what))

    def _end_due(self) -> None:
        fleet = self.fleet
        while self._later and self._later[0][0] <= fleet.now:
            _, _, kind, what = heapq.heappop(self._later)
            if kind == "release":
                assert isinstance(what, Lease)
                fleet.last_used[what.target] = fleet.now
                is_served = fleet.is_up[what.node]
                self.ended["served" if is_served else "node_failed"] += 1
                fleet.dispatcher.release(what)
            elif kind == "abort":
                assert isinstance(what, int)
                if (pending := self.waiting.pop(what, None)) is not None:
                    self.ended["disconnected"] += 1
                    fleet.dispatcher.cancel(pending)
            elif kind == "order":
                if fleet.is_up[what[1].node]:  # type: ignore[index]
                    fleet.end(what)  # type: ignore[arg-type]
            else:
                assert isinstance(what, str)
                fleet.is_up[what] = True
                self._report(what)

    def _take_orders(self) -> None:
        """Orders of the dispatcher take their time."""
        fleet = self.fleet
        while fleet.orders:
            order = fleet.orders.popleft()
            kind, target = order
            takes_s = fleet.sizes[target.model] / BYTES_PER_S if kind == "load" else 1.0
            self._at(fleet.now + takes_s, "order", order)

    def _report(self, node: str) -> None:
        fleet = self.fleet
        if not fleet.is_up[node]:
            fleet.dispatcher.missed(node, "connection refused")
            return
        report = fleet.report(node)
        begun = time.thread_time()
        fleet.dispatcher.observed(node, *report)
        self.slowest_report_s = max(self.slowest_report_s, time.thread_time() - begun)

    def _fail(self, node: str) -> None:
        """The host goes down and loses its models."""
        fleet = self.fleet
        fleet.is_up[node] = False
        fleet.ready[node].clear()
        fleet.dispatcher.request_failed(node, "connection reset")
        self._at(fleet.now + DOWN_S, "up", node)
