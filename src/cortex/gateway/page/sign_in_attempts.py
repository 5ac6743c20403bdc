"""Sign-ins to the page, by key and through a provider: the limit of failures per address, and audit records. Used on
the loop's thread."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable

from cortex.gateway.dispatch.operator.audit import AuditLog
from cortex.gateway.ledger.keys import KeySection
from cortex.http.limits import network_of
from cortex.http.request import Request
from cortex.wire.errors import CortexError, RateLimitExceeded

MOST_FAILURES = 20
"""Higher than typing errors reach, even behind a proxy, where all people share one address."""
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


log = logging.getLogger(__name__)

ONCE_IN_S = 60.0
"""Repeats from the same network within this time are not recorded."""
MOST_RECORDED = 10_000
"""Number of records remembered for that; the oldest are dropped first."""


class SignInAttempts:
    """Counts and records attempts. The client's input is never recorded: it contains keys, codes and tokens."""

    def __init__(self, audit: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit = audit
        self._clock = clock
        self._failures = FailedSignIns(clock)
        self._recorded: OrderedDict[tuple[str, ...], float] = OrderedDict()
        """When each was recorded, the oldest first."""

    def check(self, request: Request) -> None:
        """Raises RateLimitExceeded for an address that failed too often. Such an attempt is not recorded, so that no
        address can fill the audit log."""
        self._failures.check(request.client)

    def succeeded(self, request: Request, key: KeySection) -> None:
        """Record a sign-in with the rights of `key`, unless one was recorded a moment ago, so that no key can fill the
        audit log."""
        detail = "signed in as operator" if key.operator else "signed in"
        if self._is_new(request, key.id, key.name, detail):
            self._audit.record(
                _action(request), 200, key_id=key.id, key_name=key.name, client=request.client, detail=detail
            )

    def failed(self, request: Request, error: CortexError, *, is_counted: bool = True) -> None:
        """Record a sign-in that was rejected, or that failed at the provider. With `is_counted` it counts against the
        address; otherwise it is unlimited and recorded only once in a while."""
        if is_counted:
            self._failures.failed(request.client)
        elif not self._is_new(request, error.message):
            return
        log.warning("sign-in failed: %s", error.message)
        self._audit.record(_action(request), error.status, client=request.client, detail=error.message)

    def _is_new(self, request: Request, *facts: str) -> bool:
        """Whether this was not recorded within `ONCE_IN_S`. Marks it as recorded."""
        record, now = (network_of(request.client), _action(request), *facts), self._clock()
        if now - self._recorded.get(record, -ONCE_IN_S) < ONCE_IN_S:
            return False
        self._recorded[record] = now
        self._recorded.move_to_end(record)
        if len(self._recorded) > MOST_RECORDED:
            self._recorded.popitem(last=False)
        return True


def _action(request: Request) -> str:
    return f"{request.method.decode('latin-1')} {request.path.decode('latin-1')}"
