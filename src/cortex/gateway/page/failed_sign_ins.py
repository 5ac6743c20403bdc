"""Limits how often an address may try keys. Pure but for its clock; used on the loop's thread."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from cortex.wire.errors import RateLimitExceeded

MOST_FAILURES = 20
"""More than a person mistypes, also behind a proxy, where all people have one address."""
WINDOW_S = 60.0
MOST_ADDRESSES = 10_000
"""Addresses whose failures are remembered; the oldest are forgotten first."""


class FailedSignIns:
    """The recent failures of each address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """When the window of an address began, and its failures since."""

    def check(self, address: str) -> None:
        """Raises RateLimitExceeded for an address that failed too often."""
        began, num_failures = self._failures.get(address, (0.0, 0))
        left_s = began + WINDOW_S - self._clock()
        if num_failures >= MOST_FAILURES and left_s > 0:
            raise RateLimitExceeded(
                f"{num_failures} sign-ins from this address failed; try again in {math.ceil(left_s)} s.",
                retry_after_s=left_s,
            )

    def failed(self, address: str) -> None:
        """Count a failure."""
        now = self._clock()
        began, num_failures = self._failures.pop(address, (now, 0))
        if now - began >= WINDOW_S:
            began, num_failures = now, 0
        self._failures[address] = (began, num_failures + 1)
        if len(self._failures) > MOST_ADDRESSES:
            self._failures.popitem(last=False)
