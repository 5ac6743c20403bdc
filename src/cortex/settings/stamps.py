"""Notices that a file has changed."""

from __future__ import annotations

from pathlib import Path

Stamp = tuple[int, ...]


def stamp(file: Path) -> Stamp:
    """A value that changes when the file does; empty for a file that cannot be read."""
    try:
        status = file.stat()
    except (OSError, ValueError):  # missing, not accessible, or no valid name: the same until it can be read
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_ino)
