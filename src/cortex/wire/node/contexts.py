"""What a model's context takes of memory, and how much of it a load is to get: one rule for gateways and nodes.

There are three levels. The full footprint, several full contexts, is taken where it is free. Idle models are evicted
for the wanted context: the full one or, where that cannot be had, a half, a quarter …, but no less than agents need.
A load gets less than that only where evictions cannot help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

AGENT_TOKENS = 32_768
"""The context that agents need. A model that has as much gets no less, unless its entry names another."""
_LEAST_TRIED = 1024
_TOLERANCE = 16
"""A load may get less than was decided by one part in 16: what is free changes a little meanwhile."""
_Tokens = Annotated[int, Meta(ge=1)]
_Count = Annotated[int, Meta(ge=0)]


class ContextSize(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    tokens: _Tokens
    num_bytes: _Count
    """What a load must be able to take for a sequence of this many tokens, weights included."""


class ContextSizes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The contexts that a model may get, and what they take on all of its devices together."""

    limit_tokens: _Tokens
    """What the model was made for."""
    full_tokens: _Tokens
    """That, or the context that its entry names."""
    wanted_tokens: _Tokens
    """The least that idle models are evicted for."""
    empty_tokens: _Count
    """What it gets if its devices are empty, within the operator's limits."""
    full_bytes: _Count
    """Its full footprint, on devices that are large enough for it."""
    sizes: Annotated[tuple[ContextSize, ...], Meta(min_length=1, max_length=64)]
    """At least one, ascending. Between two, and beyond the last, bytes grow evenly with tokens."""

    def bytes_for(self, tokens: int) -> int:
        """What a load must be able to take for a context of `tokens`."""
        below, above = self._segment(lambda size: size.tokens >= tokens)
        if tokens <= below.tokens:
            return below.num_bytes
        grown, span = tokens - below.tokens, max(1, above.tokens - below.tokens)
        return below.num_bytes + -(-(above.num_bytes - below.num_bytes) * grown // span)

    def tokens_in(self, num_bytes: int) -> int:
        """The context of a load that can take `num_bytes`, at most what it gets of empty devices. 0: even the least
        takes more."""
        below, above = self._segment(lambda size: size.num_bytes > num_bytes)
        if num_bytes < below.num_bytes:
            return 0
        grown, span = num_bytes - below.num_bytes, above.num_bytes - below.num_bytes
        tokens = below.tokens + (above.tokens - below.tokens) * grown // span if span else self.full_tokens
        return min(self.full_tokens, self.empty_tokens, tokens)

    def _segment(self, is_past: Callable[[ContextSize], bool]) -> tuple[ContextSize, ContextSize]:
        """The first two neighbours of which the second is past the point in question, else the last two."""
        pairs = list(pairwise(self.sizes)) or [(self.sizes[0], self.sizes[0])]
        return next((pair for pair in pairs if is_past(pair[1])), pairs[-1])

    def is_short(self, tokens: int) -> bool:
        """Whether a context is less than the model is to have."""
        return tokens < self.wanted_tokens

    def in_words(self, tokens: int) -> str:
        """`4,480 of 131,072 tokens`, or the full context alone."""
        return f"{tokens:,} tokens" if tokens >= self.full_tokens else f"{tokens:,} of {self.full_tokens:,} tokens"

    def shortage(self, tokens: int) -> str | None:
        """What is wrong with the context of a loaded model; None: nothing."""
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
        """With evictions for a context of at least `tokens`, as far as empty devices hold it."""
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
    """The contexts for which room is looked for, until one is found: each is half of the one before."""
    tokens = full_tokens
    while tokens > wanted_tokens:
        yield tokens
        tokens //= 2
    tokens = wanted_tokens
    yield tokens
    while (tokens := tokens // 2) >= _LEAST_TRIED:
        yield tokens


def wanted(own_limit: int, named_tokens: int | None) -> int:
    """The least context that a model is to have. `named_tokens`: by its entry."""
    return min(own_limit, named_tokens or AGENT_TOKENS)


def tolerated(tokens: int) -> int:
    """The least context with which a load that was decided to get `tokens` is still as decided."""
    return max(1, tokens - tokens // _TOLERANCE)
