"""Bytes for people to read."""

from __future__ import annotations


def gib(num_bytes: int | None) -> str:
    """`11.8 GiB`; `452 MiB` below one GiB, `120 KiB` below one MiB; `?` for an unknown size."""
    if num_bytes is None:
        return "?"
    if 0 < num_bytes < 1024**2:
        return f"{num_bytes / 1024:.0f} KiB"
    if 0 < num_bytes < 1024**3:
        return f"{num_bytes / 1024**2:.0f} MiB"
    return f"{num_bytes / 1024**3:.1f} GiB"
