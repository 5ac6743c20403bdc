"""What is kept of a server's output, and what an error shows of it."""

from __future__ import annotations

from cortex.neuron.node.harness.command.server_log import ServerLog


def begun(output: bytes) -> ServerLog:
    log = ServerLog()
    log.begin("--- starts")
    log.feed(output)
    return log


def test_equal_lines_in_a_row_leave_room_for_others_in_an_error() -> None:
    log = begun(b"loading\nno such file\n" + b"GET /health 503\n" * 40)
    assert log.last_lines == "; the end of its log: loading | no such file | GET /health 503 (40 times)"
    assert len(log.since(0).lines) == 43, "all of them are in the log"


def test_an_error_has_the_last_twelve_lines() -> None:
    log = begun(b"".join(b"line %d\n" % number for number in range(30)))
    assert log.last_lines.startswith("; the end of its log: line 18 | line 19 | ")


def test_lines_that_are_not_kept_any_more_do_not_count() -> None:
    log = begun(b"".join(b"line %d\n" % number for number in range(600)))
    assert log.last_lines.endswith(" | line 599")


def test_the_end_of_a_server_is_in_its_log_and_not_in_its_error() -> None:
    log = begun(b"no card\n")
    log.end("--- ended with status 4")
    assert log.last_lines == "; the end of its log: no card"
    assert log.since(0).lines == ("--- starts", "no card", "--- ended with status 4")
    log.begin("--- starts")
    assert log.last_lines == "; it wrote nothing"
