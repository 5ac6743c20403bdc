"""Errors cross from the main process to a worker with everything that a client needs."""

import msgspec
import pytest

from cortex.gateway.workers.messages import Rejected
from cortex.wire.errors import BY_CODE, InsufficientCapacity, Overloaded


def sent(error):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(Rejected.of(3, error)), type=Rejected).error()


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_error_keeps_its_type_and_fields(kind):
    received = sent(kind("what happened", param="model", retry_after_s=7.5))
    assert type(received) is kind
    assert (received.message, received.param, received.retry_after_s) == ("what happened", "model", 7.5)


def test_error_keeps_its_details_and_default_retry_after():
    error = InsufficientCapacity("no", details={"nodes": [{"node": "n", "need_bytes": 5}]})
    assert sent(error).details == error.details
    assert sent(Overloaded("x")).retry_after_s == 1.0
