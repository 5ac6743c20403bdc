"""The limit of open files of this process, and how many of them connections of clients may take."""

from __future__ import annotations

import contextlib
import logging
import resource
from typing import NamedTuple

log = logging.getLogger(__name__)

MOST_FILES = 1 << 20
"""More are never needed, and not every system supports an unlimited value."""
MIN_RESERVE = 64
FEW_CONNECTIONS = 1024
"""Fewer than this are worth a warning."""


class Connections(NamedTuple):
    """How many connections of clients may be open."""

    in_all: int
    per_client: int
    """From one address."""


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES)


def raise_limit() -> None:
    """Raise the soft limit of this process to its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def reserve(num_files: int) -> int:
    """Files that no connection of a client may take: for files, databases, kept connections and other processes."""
    return max(MIN_RESERVE, num_files // 4)


def connections(
    num_files: int, *, files_each: int, one_of: int, in_all: int, per_client: int | None = None
) -> Connections:
    """How many of the configured connections fit into `num_files`. Logs it if they are fewer than configured.

    A connection takes up to `files_each`. Without `per_client`, one address gets one `one_of`-th of the connections.
    """
    possible = max(1, (num_files - reserve(num_files)) // files_each)
    if possible < in_all:
        log.log(
            logging.WARNING if possible < FEW_CONNECTIONS else logging.INFO,
            "the limit of %d open files permits %d client connections, not %d (limits.max_connections); raise the limit"
            " (LimitNOFILE, ulimit -n), or lower max_connections",
            num_files,
            possible,
            in_all,
        )
        in_all = possible
    return Connections(in_all, min(in_all, per_client or max(1, in_all // one_of)))
