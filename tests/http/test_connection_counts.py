from __future__ import annotations

from cortex.http.limits import ConnectionCounts
from cortex.wire.errors import Overloaded, RateLimitExceeded


def test_counts_in_all_and_by_address_and_forgets_what_left() -> None:
    counts = ConnectionCounts(3, 2)
    assert counts.enter("10.0.0.1") is counts.enter("10.0.0.1") is None
    assert isinstance(counts.enter("10.0.0.1"), RateLimitExceeded)
    assert counts.enter("10.0.0.2") is None
    assert isinstance(counts.enter("10.0.0.3"), Overloaded)
    counts.leave("10.0.0.1")
    assert counts.enter("10.0.0.1") is None
    assert counts.num_connections == 3


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    counts = ConnectionCounts(9, 1)
    assert counts.enter("2001:db8::1") is None
    assert isinstance(counts.enter("2001:db8::2"), RateLimitExceeded)
    assert counts.enter("2001:db8:0:1::1") is None
    assert counts.enter("::ffff:10.0.0.1") is None
    assert isinstance(counts.enter("10.0.0.1"), RateLimitExceeded)
