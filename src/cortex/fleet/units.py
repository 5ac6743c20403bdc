"""Bytes in a reader's words."""

from __future__ import annotations


def gib(num_bytes: int | None) -> str:
    """`11.8 GiB`, `452 MiB` where that says more, or `?` for a size that is not known."""
    if num_bytes is None:
        return "?"
    if 0 < num_bytes < 1024**3:
        return f"{num_bytes / 1024**2:.0f} MiB"
    return f"{num_bytes / 1024**3:.1f} GiB"
