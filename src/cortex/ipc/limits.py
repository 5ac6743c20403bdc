"""What a process may take of its host, set by the process itself."""

from __future__ import annotations

import logging
import math
import resource
import time
from pathlib import Path

log = logging.getLogger(__name__)


def limit_memory(additional_bytes: int) -> None:
    """Limits this process to its address space of now and `additional_bytes`: more raises MemoryError, or ends it in
    libraries that cannot raise it. Mapped files count."""
    try:
        num_pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    except (OSError, ValueError):
        return  # only Linux reports it
    _limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + additional_bytes)


def limit_cpu(additional_s: int) -> None:
    """Ends this process when it has computed for `additional_s` from now on. Waits do not count."""
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + additional_s)


def lift_cpu_limit() -> None:
    _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)


def _limit(kind: int, limit: int) -> None:
    """Sets the soft limit, which ends or stops a process as well as the hard one does, and can be raised again."""
    _, hard_limit = resource.getrlimit(kind)
    if hard_limit != resource.RLIM_INFINITY and (limit == resource.RLIM_INFINITY or limit > hard_limit):
        limit = hard_limit
    try:
        resource.setrlimit(kind, (limit, hard_limit))
    except (OSError, ValueError) as error:
        log.warning("a limit of this process cannot be set: %s", error)
