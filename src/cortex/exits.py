"""Exit codes of all programs and commands."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Stable codes that scripts may rely on."""

    OK = 0
    FAILED = 1
    """The command failed for a reason that has no code of its own."""
    USAGE = 2
    """The command line is invalid."""
    CONFIG = 3
    """A configuration file is missing or invalid."""
    UNREACHABLE = 4
    """The gateway, a node or the network did not respond."""
    NOT_FOUND = 5
    """No such model or key, or no usage recorded."""
    DENIED = 6
    """The API key is missing, invalid or not allowed to do this."""
    NO_ROOM = 7
    """A port is taken, or disk space or device memory is not enough."""
    INTERRUPTED = 130
