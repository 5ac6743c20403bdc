"""An address that tries keys is stopped for a while; others are not."""

from __future__ import annotations

import pytest

from cortex.gateway.page.signing_in import MOST_ADDRESSES, MOST_FAILURES, WINDOW_S, FailedSignIns
from cortex.wire.errors import RateLimitExceeded


def test_an_address_that_fails_too_often_waits() -> None:
    now = [100.0]
    failures = FailedSignIns(lambda: now[0])
    for _ in range(MOST_FAILURES):
        failures.check("a")
        failures.failed("a")
    with pytest.raises(RateLimitExceeded) as caught:
        failures.check("a")
    assert caught.value.retry_after_s == WINDOW_S
    failures.check("b")
    now[0] += WINDOW_S
    failures.check("a")
    failures.failed("a")
    failures.check("a")


def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    failures = FailedSignIns()
    for number in range(MOST_FAILURES):
        failures.failed(f"2001:db8::{number:x}")
    with pytest.raises(RateLimitExceeded):
        failures.check("2001:db8::ffff")
    failures.check("2001:db8:0:1::1")


def test_memory_is_bounded() -> None:
    failures = FailedSignIns()
    for _ in range(MOST_FAILURES):
        failures.failed("first")
    for number in range(MOST_ADDRESSES):
        failures.failed(str(number))
    failures.check("first")
