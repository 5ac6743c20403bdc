"""Caps on the batch lines that each node runs at once, adapted to how much they slow interactive requests.

Pure: samples and times come in, numbers go out. The cap of a node without interactive requests doubles up to a limit.
While a node serves interactive requests, their latency sets the cap: it doubles until some of them exceed the limits
below, is halved each time that they do, and grows by a part of itself as long as they are as fast as without batches.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable
from itertools import pairwise

MAX_TTFT_RATIO = 1.5
"""Limit of the time to first token while batch lines run, relative to that without them."""
MAX_GAP_RATIO = 1.2
"""The same limit for the mean time between tokens."""
MAX_PACED_GAP_RATIO = 2.0
"""The same where an engine runs all lines: it bounds the 99th percentile itself, and lengthens many shorter steps."""
QUIET_S, MAX_QUIET_S = 5.0, 300.0
"""A node is free for batches after this long without interactive requests, or once the next one is overdue."""
OVERDUE = 5
"""A request is overdue after this many usual intervals. With random arrivals, one in 150 comes that late."""
INTERVAL_WEIGHT = 0.1
"""The weight of the latest interval in the moving average."""
STEP_S = 1.0
"""Minimum interval between raises of a cap."""
HOLD_S = 2.0
"""Samples of requests that began before a cap was halved do not halve it again."""
NUM_KEPT = 128
NUM_CLEAN = 8
"""Number of samples without batches that a baseline needs."""
MAX_UNSHARED = 1024
"""Requests without lines that are kept until a line runs."""
TAIL = 0.95
"""The fraction of requests without batches that must be within the limit too."""
NUM_GOOD = 4
"""Samples within the limits, since the last change, that raise the cap of a node with interactive requests."""
NUM_FIRST_GOOD = 2
"""The same before lines have slowed requests there for the first time."""
GROWTH = 1 / 8
"""Fraction by which the cap grows; at least one line."""
NUM_JUDGED, NUM_SLOW = 8, 2
"""This many slow requests among the latest halve the cap. A single one often has other causes."""
MAX_PATIENCE = 64
"""Maximum of `NUM_GOOD` at a cap of zero, where a single line was too much: it doubles with every attempt."""


class _Pace:
    """Samples of one kind, with and without concurrent batch lines."""

    __slots__ = ("clean", "shared")

    def __init__(self) -> None:
        self.clean: deque[float] = deque(maxlen=NUM_KEPT)
        self.shared: deque[float] = deque(maxlen=NUM_KEPT)

    @property
    def baseline(self) -> float:
        """The latency without batches; infinite while unknown. If a node was rarely seen without batches, its fastest
        requests are used."""
        if len(self.clean) >= NUM_CLEAN:
            return _quantile(self.clean, TAIL)
        samples = [*self.clean, *self.shared]
        return _quantile(samples, 0.25) if len(samples) >= NUM_CLEAN else math.inf


def _is_slow(paces: dict[Hashable, _Pace], kind: Hashable, value: float, lines: int, most: float) -> bool:
    """Record a sample. Returns whether it is above `most` times its baseline while batch lines run."""
    pace = paces.get(kind)
    if pace is None:
        pace = paces[kind] = _Pace()
    if not lines:
        pace.clean.append(value)
        return False
    is_slow = value > most * pace.baseline
    pace.shared.append(value)
    return is_slow


class _NodeCap:
    """One node."""

    __slots__ = (
        "arrivals",
        "free",
        "gaps",
        "halved_at",
        "interactive_at",
        "is_starting",
        "judged",
        "num_good",
        "patience",
        "raised_at",
        "shared",
        "ttfts",
        "unshared",
    )

    def __init__(self) -> None:
        self.free = 1.0
        self.shared = 1.0
        self.raised_at = self.halved_at = self.interactive_at = -math.inf
        self.arrivals: deque[float] = deque(maxlen=NUM_KEPT)
        """When the latest interactive requests were sent there."""
        self.num_good = 0
        self.patience = NUM_GOOD
        self.is_starting = True
        """Whether lines have not slowed a request yet."""
        self.judged: deque[bool] = deque(maxlen=NUM_JUDGED)
        """Whether each of the latest requests that ran together with this many lines was slow."""
        self.unshared: deque[tuple[str, float | None, int, float | None]] = deque(maxlen=MAX_UNSHARED)
        """Requests without lines that `learn` has not seen: model, time to first token, computed tokens, gap."""
        self.ttfts: dict[Hashable, _Pace] = {}
        self.gaps: dict[Hashable, _Pace] = {}

    def is_quiet(self, now: float) -> bool:
        idle_s = now - max(self.interactive_at, self.arrivals[-1] if self.arrivals else -math.inf)
        if not QUIET_S <= idle_s < MAX_QUIET_S:
            return idle_s >= QUIET_S
        return idle_s >= OVERDUE * self.interval_s

    @property
    def interval_s(self) -> float:
        """The usual interval between interactive requests."""
        usual = 0.0
        for before, after in pairwise(self.arrivals):
            usual += INTERVAL_WEIGHT * (min(MAX_QUIET_S, after - before) - usual)
        return usual

    def learn(self) -> None:
        """Adds the requests that were served without lines to the samples."""
        while self.unshared:
            self.is_slow(*self.unshared.popleft())

    def is_slow(
        self,
        model: str,
        ttft_s: float | None,
        num_tokens: int,
        gap_s: float | None,
        *,
        lines: int = 0,
        most_gap: float = MAX_GAP_RATIO,
    ) -> bool:
        """Adds a request to the samples. Whether lines of batches have slowed it down."""
        is_slow = False
        if ttft_s is not None:
            kind = (model, num_tokens.bit_length() // 2)
            is_slow = _is_slow(self.ttfts, kind, ttft_s, lines, MAX_TTFT_RATIO)
        if gap_s is not None:
            is_slow |= _is_slow(self.gaps, model, gap_s, lines, most_gap)
        return is_slow


class IdleCaps:
    """The caps of all nodes. Mutable; belongs to the loop's thread."""

    def __init__(self, most: int = 64) -> None:
        self.most = most
        """Lines on one node at once. Replaced by a reload."""
        self._nodes: defaultdict[str, _NodeCap] = defaultdict(_NodeCap)
        self.lines: Counter[str] = Counter()
        """Running lines by node, counted by their owner."""
        self.paced: Counter[str] = Counter()
        """Those of them that an engine runs, which bounds what they add to a step of other requests."""

    def cap(self, node: str, now: float, *, num_interactive: int) -> int:
        """How many lines may run there now, given `num_interactive` other requests."""
        at = self._nodes[node]
        if num_interactive:
            at.interactive_at = now
        return int(min(self.most, at.free if at.is_quiet(now) else at.shared))

    def began(self, node: str, now: float) -> None:
        """An interactive request was sent there."""
        self._nodes[node].arrivals.append(now)  # cheap, because it runs for every request

    def served(
        self, node: str, model: str, now: float, *, ttft_s: float | None, num_tokens: int, gap_s: float | None
    ) -> None:
        """An interactive request was served; `num_tokens` of its prompt were computed."""
        at, lines = self._nodes[node], self.lines.get(node, 0)
        at.interactive_at = now
        if not lines and at.shared >= 1:  # cheap too: the cap stays
            at.unshared.append((model, ttft_s, num_tokens, gap_s))
            at.num_good += 1
            return
        at.learn()
        most_gap = MAX_PACED_GAP_RATIO if self.paced[node] >= lines else MAX_GAP_RATIO
        is_slow = at.is_slow(model, ttft_s, num_tokens, gap_s, lines=lines, most_gap=most_gap)
        if lines > 0:
            at.judged.append(is_slow)
        if is_slow:
            if sum(at.judged) >= NUM_SLOW and now - at.halved_at >= HOLD_S:
                self._halve(at, now, lines)
        else:
            at.num_good += 1
            self._raise(at, now, lines)

    def _halve(self, at: _NodeCap, now: float, lines: int) -> None:
        at.shared = max(0.5, min(at.shared, lines) / 2)
        at.patience = NUM_GOOD if at.shared >= 1 else min(MAX_PATIENCE, 2 * at.patience)
        at.halved_at, at.num_good, at.is_starting = now, 0, False
        at.judged.clear()

    def _raise(self, at: _NodeCap, now: float, lines: int) -> None:
        # A cap that was not reached gives no evidence about the next one.
        is_used = lines >= int(at.shared)
        wanted = NUM_FIRST_GOOD if at.is_starting else NUM_GOOD if at.shared >= 1 else at.patience
        if is_used and at.num_good >= wanted and now - max(at.raised_at, at.halved_at) >= STEP_S:
            added = max(1, int(at.shared * (1.0 if at.is_starting else GROWTH)))
            at.shared = min(self.most, math.floor(at.shared) + added)
            at.raised_at, at.num_good = now, 0

    def full(self, node: str, now: float) -> None:
        """The node rejected a line because it is busy."""
        at = self._nodes[node]
        at.free, at.raised_at = max(1.0, at.free / 2), now

    def completed(self, node: str, now: float) -> None:
        """A line was completed there, and still counts."""
        at = self._nodes[node]
        if at.is_quiet(now) and self.lines[node] >= int(at.free) and now - at.raised_at >= STEP_S:
            at.free, at.raised_at = min(self.most, at.free * 2), now


def _quantile(samples: Iterable[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
