"""Exit codes of all programs and commands, and those of processes in words."""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Stable codes that scripts may rely on."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CONFIG = 3
    UNREACHABLE = 4
    NOT_FOUND = 5
    DENIED = 6
    NO_ROOM = 7
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "done, or a server was stopped by a signal",
    ExitCode.FAILED: "failed for a reason that has no code of its own",
    ExitCode.USAGE: "invalid command line",
    ExitCode.CONFIG: "a configuration file or environment variable is missing or invalid",
    ExitCode.UNREACHABLE: "no response from the gateway, a node, a database or the network",
    ExitCode.NOT_FOUND: "no such model, node, job or key, or no usage recorded",
    ExitCode.DENIED: "the key is missing, invalid or not allowed to do this",
    ExitCode.NO_ROOM: "a port is taken, or disk space or device memory is not enough",
    ExitCode.INTERRUPTED: "interrupted",
}
"""As the commands' help and the documents list them."""


def ending(code: int) -> str:
    """How a process ended, from its exit code, which is negative after a signal."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
