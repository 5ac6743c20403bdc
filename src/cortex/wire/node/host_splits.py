"""Divides a model's weights between device and host memory, with the resulting speed. One rule for gateways and nodes:
the less memory the device has, the more goes to the host."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

_Count = Annotated[int, Meta(ge=0)]


class HostSplit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One way to divide them."""

    saved_bytes: _Count
    """Bytes that the device saves."""
    host_bytes: _Count
    """Bytes that the host takes instead."""
    tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Expected for one stream, from measured or assumed memory rates; 0 if unknown."""


class HostSplits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    splits: Annotated[tuple[HostSplit, ...], Meta(min_length=1, max_length=64)]
    """Ascending: the first leaves the least to the host, the last the most. Values between two are interpolated."""
    is_measured: bool = False
    """Whether the rates behind the speeds were measured on the node (`cortex bench`)."""

    is_last_resort: bool = False
    """Whether every token reads the weights in host memory, as with a dense model, without permission in the node's
    entry (`host_weights`), so that the gateway's entry must permit it."""

    @property
    def most_saved_bytes(self) -> int:
        return self.splits[-1].saved_bytes

    def saving(self, saved_bytes: int) -> HostSplit | None:
        """The split that saves `saved_bytes` on the device; None if that is more than can be moved."""
        if saved_bytes > self.most_saved_bytes:
            return None
        for low, high in pairwise(self.splits):
            if low.saved_bytes < saved_bytes <= high.saved_bytes:
                part = (saved_bytes - low.saved_bytes) / (high.saved_bytes - low.saved_bytes)
                return HostSplit(
                    saved_bytes=saved_bytes,
                    host_bytes=low.host_bytes + -int(-(high.host_bytes - low.host_bytes) * part // 1),
                    tokens_per_s=_between(low.tokens_per_s, high.tokens_per_s, part),
                )
        return self.splits[0]


def _between(low_rate: float, high_rate: float, part: float) -> float:
    """Times per token grow evenly, not rates."""
    if not low_rate or not high_rate:
        return 0.0
    return 1 / ((1 - part) / low_rate + part / high_rate)


def speed_in_words(tokens_per_s: float, *, is_measured: bool) -> str:
    """`about 14 tokens/s expected`"""
    if not tokens_per_s:
        return "speed not known"
    rate = f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"
    return f"about {rate} tokens/s expected{'' if is_measured else ' from typical rates of memory'}"
