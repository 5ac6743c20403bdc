"""How the programs and commands end: one table of exit codes for all of them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a script may rely on."""

    OK = 0
    FAILED = 1
    """What was asked for did not work."""
    USAGE = 2
    """The command line is wrong."""
    CONFIG = 3
    """A configuration file is missing or wrong."""
    UNREACHABLE = 4
    """The gateway, a node or the network did not answer."""
    NOT_FOUND = 5
    """No such model."""
    DENIED = 6
    """The key is missing, wrong or not allowed."""
    NO_ROOM = 7
    """A port, disk space or device memory is taken."""
    INTERRUPTED = 130
