from __future__ import annotations

import logging

import pytest

from cortex.http.server.listener import INTERVAL_S, ThrottledLog


def test_logs_each_kind_once_per_interval_with_the_number_of_those_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = ThrottledLog(logging.getLogger("throttled"), lambda: now[0])
    for _ in range(5):
        log.warning("a", "first")
    log.warning("b", "second")
    assert caplog.messages == ["first", "second"]
    now[0] = INTERVAL_S
    log.warning("a", "again")
    assert caplog.messages[2:] == ["again (4 more since the last line)"]
