"""Processes that tests watch."""

from pathlib import Path


def alive(process_id: int) -> bool:
    # A zombie is dead: the process that inherited it may take its time to reap it.
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
