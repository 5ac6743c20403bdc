import pytest

from cortex.gateway.responses.response_object import last_event

DELTA = b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n'


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed"])
@pytest.mark.parametrize("before", [b"", DELTA, DELTA * 3, b": keepalive\n\n"])
def test_last_event_is_found_behind_others_and_alone(before: bytes, status: str) -> None:
    events = b'%sevent: response.%s\ndata: {"response":{}}\n\n' % (before, status.encode())
    assert last_event(events) == b'{"response":{}}'


@pytest.mark.parametrize(
    "events",
    [
        DELTA,
        b"data: event: response.completed\ndata: {}\n\n",  # not the name of the event
        b"event: response.completed.other\ndata: {}\n\n",
        b"event: response.completed\n\n",
    ],
)
def test_other_events_are_no_last_event(events: bytes) -> None:
    assert last_event(events) is None
