"""Counts and times as text, the same in messages, logs and commands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def plural(count: float, noun: str, several: str | None = None) -> str:
    """`1 node`, `2 nodes`, `1,200 requests`, `0.5 days`; `several` where an `s` is not enough."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun if count == 1 else several or f'{noun}s'}"


def whole_seconds(seconds: float) -> int:
    """Rounded up, so that a time to wait is never too short. A thousandth more is an error of the sum, not a second."""
    return math.ceil(round(seconds, 3))


def duration(seconds: float) -> str:
    """Seconds for people, rounded up: `42 s`, `2 min 30 s`, `24 h`, `2 d 3 h`; `∞ s` where a setting is `inf`."""
    if seconds == math.inf:
        return "∞ s"
    whole = whole_seconds(seconds)
    for (unit, scale), (finer, step) in pairwise((("d", 86400), ("h", 3600), ("min", 60), ("s", 1))):
        if whole >= 2 * scale:
            count, rest = divmod(-(-whole // step) * step, scale)
            return f"{count} {unit} {rest // step} {finer}" if rest else f"{count} {unit}"
    return f"{whole} s"


def os_error_in_words(error: OSError) -> str:
    """`/etc/cortex/cortex.toml: Permission denied`, or the reason alone where the error names no file."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if isinstance(error.filename, str) else reason


def about(subject: str, problem: object) -> str:
    """A message that names its subject first, once."""
    text = os_error_in_words(problem) if isinstance(problem, OSError) else str(problem)
    return text if text.startswith((f"{subject} ", f"{subject}: ")) else f"{subject}: {text}"


def replicas_in_words(replica_devices: Sequence[Sequence[int]]) -> str:
    """`2 replicas on devices 0, 1`, or `0+1, 2+3` where each is divided; empty if there are not several."""
    if len(replica_devices) < 2:
        return ""
    return (
        f"{len(replica_devices)} replicas on devices {', '.join('+'.join(map(str, each)) for each in replica_devices)}"
    )
