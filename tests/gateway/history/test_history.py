"""In which step things count."""

from __future__ import annotations

from cortex.gateway.history.history import History
from cortex.gateway.proxy.accounting.activity import RequestRecord


def ended(at: float) -> RequestRecord:
    return RequestRecord(
        number=1,
        id=b"1",
        ended_at=at,
        key_id=None,
        key_name="",
        model="a",
        node="beast",
        dialect="openai_chat",
        path=b"/v1/chat/completions",
        status=200,
        outcome="completed",
        error_code=None,
        error_message=None,
        reason="",
    )


def test_request_counts_in_the_step_in_which_it_ended_whatever_happens_next() -> None:
    now = 1000.0
    history = History(lambda: now)
    history.request_ended(ended(now))
    now = 1010.0
    history.happened({"kind": "load_started"})
    shown = history.as_json("hour")
    assert (shown["times"][-2:], shown["requests"][-2:], shown["loads"][-2:]) == ([1000.0, 1010.0], [1, 0], [0, 1])
