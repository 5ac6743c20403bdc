"""The memory of a model's context, and the context that a load gets: one rule for gateways and nodes.

There are three levels. The full footprint, several full contexts, is taken if it is free. Idle models are evicted for
the wanted context: the full one or, if that is impossible, a half, a quarter …, but no less than agents need. A load
gets less than that only if evictions cannot help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

AGENT_TOKENS = 32_768
"""The context that agents need. A model that supports it gets no less, unless its entry names another."""
_LEAST_TRIED = 1024
_TOLERANCE = 16
"""A load may get a sixteenth less than was decided, because free memory changes a little meanwhile."""
_Tokens = Annotated[int, Meta(ge=1)]
_Count = Annotated[int, Meta(ge=0)]


class ContextSize(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    tokens: _Tokens
    num_bytes: _Count
    """Bytes that a load must be able to take for a sequence of this many tokens, weights included."""


class ContextSizes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The possible contexts of a model, and their sizes on all of its devices together."""

    limit_tokens: _Tokens
    """The context that the model was made for."""
    full_tokens: _Tokens
    """That, or the context that its entry names."""
    wanted_tokens: _Tokens
    """The smallest context for which idle models are evicted."""
    empty_tokens: _Count
    """The context on empty devices, within the operator's limits."""
    full_bytes: _Count
    """Its full footprint, on devices that are large enough for it."""
    sizes: Annotated[tuple[ContextSize, ...], Meta(min_length=1, max_length=64)]
    """At least one, ascending. Between two, and beyond the last, bytes grow evenly with tokens."""

    def bytes_for(self, tokens: int) -> int:
        """Bytes that a load must be able to take for a context of `tokens`."""
        below, above = self._segment(lambda size: size.tokens >= tokens)
        if tokens <= below.tokens:
            return below.num_bytes
        grown, span = tokens - below.tokens, max(1, above.tokens - below.tokens)
        return below.num_bytes + -(-(above.num_bytes - below.num_bytes) * grown // span)

    def tokens_in(self, num_bytes: int) -> int:
        """The context of a load that can take `num_bytes`, at most that on empty devices. 0 if even the smallest needs
        more."""
        below, above = self._segment(lambda size: size.num_bytes > num_bytes)
        if num_bytes < below.num_bytes:
            return 0
        grown, span = num_bytes - below.num_bytes, above.num_bytes - below.num_bytes
        tokens = below.tokens + (above.tokens - below.tokens) * grown // span if span else self.full_tokens
        return min(self.full_tokens, self.empty_tokens, tokens)

    def _segment(self, is_past: Callable[[ContextSize], bool]) -> tuple[ContextSize, ContextSize]:
        """The first two neighbours whose second is past the point, else the last two."""
        pairs = list(pairwise(self.sizes)) or [(self.sizes[0], self.sizes[0])]
        return next((pair for pair in pairs if is_past(pair[1])), pairs[-1])

    def is_short(self, tokens: int) -> bool:
        """Whether a context is less than the wanted one."""
        return tokens < self.wanted_tokens

    def in_words(self, tokens: int) -> str:
        """`4,480 of 131,072 tokens`, or the full context alone."""
        return f"{tokens:,} tokens" if tokens >= self.full_tokens else f"{tokens:,} of {self.full_tokens:,} tokens"

    def shortage(self, tokens: int) -> str | None:
        """What is wrong with the context of a loaded model; None if nothing."""
        return f"context limited to {self.in_words(tokens)} by memory" if self.is_short(tokens) else None

    def named(self, tokens: int) -> ContextSizes:
        """With the context that an entry names."""
        tokens = min(tokens, self.limit_tokens)
        least_bytes = self.sizes[0].num_bytes
        cache_bytes = max(0, self.full_bytes - least_bytes) * tokens // self.full_tokens
        tokens_of_empty = self.empty_tokens if self.empty_tokens < self.full_tokens else tokens
        return msgspec.structs.replace(
            self,
            full_tokens=tokens,
            wanted_tokens=tokens,
            empty_tokens=tokens_of_empty,
            full_bytes=least_bytes + cache_bytes,
        )

    def wanting(self, tokens: int) -> ContextSizes:
        """With evictions for a context of at least `tokens`, at most what empty devices hold."""
        wanted_tokens = max(self.wanted_tokens, min(tokens, self.full_tokens, self.empty_tokens))
        return msgspec.structs.replace(self, wanted_tokens=wanted_tokens)

    def part_of(self, whole: int, part: int = 1) -> ContextSizes:
        """The bytes of `part` of `whole` equal parts of the model. A `part` above `whole`: of several such models."""
        return msgspec.structs.replace(
            self,
            full_bytes=-(-self.full_bytes * part // whole),
            sizes=tuple(
                ContextSize(tokens=size.tokens, num_bytes=-(-size.num_bytes * part // whole)) for size in self.sizes
            ),
        )


def tried(full_tokens: int, wanted_tokens: int) -> Iterator[int]:
    """The contexts to try in order, each half of the one before."""
    tokens = full_tokens
    while tokens > wanted_tokens:
        yield tokens
        tokens //= 2
    tokens = wanted_tokens
    yield tokens
    while (tokens := tokens // 2) >= _LEAST_TRIED:
        yield tokens


def wanted(own_limit: int, named_tokens: int | None) -> int:
    """The wanted context of a model. `named_tokens`: from its entry."""
    return min(own_limit, named_tokens or AGENT_TOKENS)


def missing_sixteenths(tokens: int, full_tokens: int) -> int:
    """How much of the full context is missing, so that small differences do not count."""
    return _TOLERANCE * max(0, full_tokens - tokens) // full_tokens


def tolerated(tokens: int) -> int:
    """The smallest context accepted for a load that was decided to get `tokens`."""
    return max(1, tokens - tokens // _TOLERANCE)
