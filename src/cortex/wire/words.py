"""Counts for people to read, the same in messages, logs and commands."""

from __future__ import annotations

from collections.abc import Sequence


def plural(count: float, noun: str, several: str | None = None) -> str:
    """`1 node`, `2 nodes`, `1,200 requests`, `0.5 days`; `several` where an `s` is not enough."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun if count == 1 else several or f'{noun}s'}"


def duration(seconds: float) -> str:
    """Seconds for people: `42 s`, `3 min`, `5 h`, `2 d`."""
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds:.0f} s"


def os_error_in_words(error: OSError) -> str:
    """`/etc/cortex/cortex.toml: Permission denied`, or the reason alone where the error names no file."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if isinstance(error.filename, str) else reason


def replicas_in_words(replica_devices: Sequence[Sequence[int]]) -> str:
    """`2 replicas on devices 0, 1`, or `0+1, 2+3` where each is divided; empty if there are not several."""
    if len(replica_devices) < 2:
        return ""
    return (
        f"{len(replica_devices)} replicas on devices {', '.join('+'.join(map(str, each)) for each in replica_devices)}"
    )
