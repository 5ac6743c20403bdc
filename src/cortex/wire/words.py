"""Counts for people to read, the same in messages, logs and commands."""

from __future__ import annotations


def plural(count: float, noun: str, several: str | None = None) -> str:
    """`1 node`, `2 nodes`, `1,200 requests`, `0.5 days`; `several` where an `s` is not enough."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun if count == 1 else several or f'{noun}s'}"
