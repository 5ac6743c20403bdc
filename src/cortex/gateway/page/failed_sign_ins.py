"""Limits how often an address may fail to sign in. Pure but for its clock; used on the loop's thread."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from cortex.http.connection_counts import network_of
from cortex.wire.errors import RateLimitExceeded

MOST_FAILURES = 20
"""More than a person mistypes, also behind a proxy, where all people have one address."""
WINDOW_S = 60.0
MOST_ADDRESSES = 10_000
"""Networks whose failures are remembered; the oldest are forgotten first."""


class FailedSignIns:
    """The recent failures of each address; an IPv6 /64 network counts as one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """When the window of a network began, and its failures since."""

    def check(self, address: str) -> None:
        """Raises RateLimitExceeded for an address that failed too often."""
        began, num_failures = self._failures.get(network_of(address), (0.0, 0))
        left_s = began + WINDOW_S - self._clock()
        if num_failures >= MOST_FAILURES and left_s > 0:
            raise RateLimitExceeded(
                f"{num_failures} sign-ins from this address failed; try again in {math.ceil(left_s)} s.",
                retry_after_s=left_s,
            )

    def failed(self, address: str) -> None:
        """Count a failure."""
        now, network = self._clock(), network_of(address)
        began, num_failures = self._failures.pop(network, (now, 0))
        if now - began >= WINDOW_S:
            began, num_failures = now, 0
        self._failures[network] = (began, num_failures + 1)
        if len(self._failures) > MOST_ADDRESSES:
            self._failures.popitem(last=False)
