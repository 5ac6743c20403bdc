"""What the activity log keeps of the texts of a request."""

from __future__ import annotations

from cortex.gateway.config import ActivitySection
from cortex.gateway.proxy.accounting.activity import ActivityLog

SECRET = b"4111 1111 1111 1111"


def log_that_redacts(*patterns: str) -> ActivityLog:
    return ActivityLog(ActivitySection(capture=True, capture_kb=1, redact=patterns))


def test_redacts_a_match_that_crosses_the_end_of_what_is_kept() -> None:
    request = b"x" * 1014 + SECRET + b"y" * 100_000
    kept = log_that_redacts(r"\d{4}( \d{4}){3}").capture(request, b"", is_stream=False).request
    assert (b"x[" in kept, b"4111" in kept) == (True, False)


def test_keeps_nothing_of_a_match_that_crosses_the_end_of_what_is_searched() -> None:
    request = b"aaaa " * 1000 + b"z" * 111 + SECRET + b"y" * 100_000
    capture = log_that_redacts("(aaaa )+", r"\d{4}( \d{4}){3}").capture(request, b"", is_stream=False)
    assert b"4111" not in capture.request
    assert capture.num_request_bytes == len(request)


def test_keeps_the_end_of_a_stream_only_without_patterns() -> None:
    end = b'data: {"text":"4111 1111"}\n\ndata: {"text":" 1111 1111"}\n\n'
    assert log_that_redacts(r"\d{4}( \d{4}){3}").capture(b"", end, is_stream=True).response_end == b""
    assert log_that_redacts().capture(b"", end, is_stream=True).response_end == end
