"""Processes that tests watch."""

import os
import select
from pathlib import Path

from .waiting import WAIT_S


def alive(process_id: int) -> bool:
    # A zombie is dead: the process that inherited it may take its time to reap it.
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_end(process_id: int) -> None:
    """Returns once the process has ended, whoever its parent is. Fails after `WAIT_S`."""
    try:
        process = os.pidfd_open(process_id)
    except ProcessLookupError:
        return
    try:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        assert ended.poll(WAIT_S * 1000), f"{process_id} is still running"
    finally:
        os.close(process)
