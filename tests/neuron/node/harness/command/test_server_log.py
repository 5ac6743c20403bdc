"""What is kept of a server's output, and what an error shows of it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from cortex.neuron.node.harness.command.server_log import ServerLog
from cortex.neuron.node.harness.command.server_process import ServerProcess

from .....waiting import WAIT_S


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


def test_of_a_large_block_only_the_end_is_read() -> None:
    log = begun(b"first\n" + b"".join(b"line %d\n" % number for number in range(100_000)))
    kept = log.since(0)
    assert (len(kept.lines), kept.lines[-1]) == (500, "line 99999")
    assert kept.next >= 100_002, "those that were skipped count too"
    assert log.since(kept.next).lines == ()
    log.feed(b"one more\n")
    assert log.since(kept.next).lines == ("one more",)


def test_lines_before_those_that_are_kept_are_gone() -> None:
    log = begun(b"early\n")
    for _ in range(3):
        log.feed(b"filling\n" * 50_000)
    log.feed(b"late\n")
    lines = log.since(0).lines
    assert (len(lines), set(lines[:-1]), lines[-1]) == (500, {"filling"}, "late")
    assert "early" not in log.last_lines


def test_line_may_arrive_in_pieces_and_end_as_the_line_of_a_progress_bar_does() -> None:
    log = begun(b"10%\r20")
    log.feed(b"%\r\n\x1b[32mdo")
    log.feed(b"ne\x1b[0m\x00\n\x1b[0m\n")
    log.feed(b"no end")
    log.feed(b"")
    assert log.since(0).lines == ("--- starts", "10%", "20%", "done", "no end")


def test_line_that_never_ends_takes_bounded_memory() -> None:
    log = begun(b"x" * 100_000)
    log.feed(b"y" * 100_000 + b"\n")
    assert [len(line) for line in log.since(1).lines] == [2000]
    for _ in range(20):
        log.feed(b"z" * 100_000)
    log.feed(b"\nafter\n")
    assert log.since(0).lines == ("after",)


class WatchedLog(ServerLog):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.num_bytes = 0

    def feed(self, data: bytes) -> None:
        self.threads.add(threading.get_ident())
        self.num_bytes += len(data)
        super().feed(data)


async def test_output_is_read_to_its_end_and_not_by_the_loop() -> None:
    log = WatchedLog()
    program = "import sys; sys.stdout.buffer.write(b'some line\\n' * 3_000_000 + b'the last'); sys.exit(3)"
    server = await ServerProcess.start("m", [sys.executable, "-S", "-c", program], dict(os.environ), log)
    async with asyncio.timeout(WAIT_S):
        assert await server.ended() == "ended with status 3"
    assert log.num_bytes == 30_000_008
    assert log.last_lines.endswith("times) | the last")
    assert threading.get_ident() not in log.threads
