"""Bytes in a reader's words."""

from __future__ import annotations


def gib(num_bytes: int | None) -> str:
    """`11.8 GiB`, or `?` for a size that is not known."""
    return "?" if num_bytes is None else f"{num_bytes / 1024**3:.1f} GiB"
