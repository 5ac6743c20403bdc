"""Chooses the replica of a request: the one where its first token is expected first or, if all replicas were measured,
its last.

Everything is weighed in seconds: computing what is not cached of the prompt, copying what is cached in host memory or
on disk, fetching what another place has, the prompts ahead of it, the queue, and the requests that share the device. A
replica whose KV cache is full comes after every other one whatever it has cached: routing by cache alone overloads one
replica while another is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from cortex.routing.prefixes import BYTES_PER_TOKEN, NOTHING_CACHED, Blocks, CachedPrefix, PrefixRecord, leading_blocks

PREFILL_TOKENS_PER_S = 4000.0
REQUEST_S = 5.0
"""Assumed until a request is measured."""
COPY_SPEEDUP = 5.0
"""Assumed speed of copying a token from host memory relative to computing it, until measured."""
RESPONSE_TOKENS = 256
"""Assumed length of a response, for comparing replicas by speed."""
SHARING_S = 0.05
"""A running request delays the first token by about one step, and slows the later ones by a few per cent."""
SCARCE_KV_FRACTION = 0.7
PREEMPTION_S = 2.0
"""Cost of a nearly full KV cache, where requests are preempted and cached prefixes lost."""
SATURATED_KV_FRACTION = 0.95
MIN_FETCHED_TOKENS = 1024
"""Fewer tokens are computed rather than fetched from another place."""


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A ready model in one place, as a candidate for a request."""

    place: str
    """Its node, or within a node its devices."""
    running: int = 0
    waiting: int = 0
    """Requests in the queue there."""
    kv_used_fraction: float = 0.0
    backlog_s: float = 0.0
    """Time until the prompts sent there are computed."""
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    copied_tokens_per_s: float | None = None
    """Rate of pages from host memory; None if not measured."""
    fetched_tokens_per_s: float | None = None
    """Rate of pages from other places; None if unknown, in which case they count as computed."""
    request_s: float = REQUEST_S
    """Average duration of a request there."""
    token_s: float = 0.0
    """Time per token of one more response there; 0 for all replicas if one was not measured."""

    @property
    def is_saturated(self) -> bool:
        """Whether a further request would take memory from running ones."""
        return self.running + self.waiting > 0 and self.kv_used_fraction >= SATURATED_KV_FRACTION


class RoutingChoice(msgspec.Struct, frozen=True):
    """The replica for a request."""

    position: int
    """Its index among the candidates."""
    prefill_s: float
    """Expected time to compute the uncached part of the prompt and to copy what is in host memory."""
    cached: CachedPrefix = NOTHING_CACHED
    """The cached part of the prompt."""
    source: str = ""
    """The place that has computed enough more of the prompt that its KV may be worth fetching; empty if none."""


class Source(NamedTuple):
    """The place that has the most of a prompt. Other places decide by measured rates whether to fetch it."""

    place: str = ""
    num_tokens: int = 0

    def tokens_for(self, place: str, cached: CachedPrefix) -> int:
        """How many more tokens it has than `place`; 0 if not worth fetching."""
        more = 0 if place == self.place else self.num_tokens - sum(cached)
        return more if more >= MIN_FETCHED_TOKENS else 0


def source_of(blocks: Blocks, prefixes: PrefixRecord, is_usable: Callable[[str], bool] = lambda _: True) -> Source:
    """`is_usable`: whether a place can be asked now."""
    return Source(*prefixes.most(blocks, is_usable))


def prefill_s(replica: Replica, num_prompt_tokens: int, cached: CachedPrefix, num_elsewhere: int = 0) -> float:
    """`num_elsewhere`: tokens that another place has."""
    device_tokens, host_tokens = cached
    num_tokens = num_prompt_tokens - device_tokens - host_tokens
    compute_s = num_tokens / replica.prefill_tokens_per_s if num_tokens > 0 else 0.0
    if host_tokens:
        compute_s += host_tokens / (replica.copied_tokens_per_s or COPY_SPEEDUP * replica.prefill_tokens_per_s)
    if num_elsewhere and (rate := replica.fetched_tokens_per_s or 0.0) > replica.prefill_tokens_per_s:
        compute_s -= num_elsewhere * (1 / replica.prefill_tokens_per_s - 1 / rate)
    return max(0.0, compute_s)


def expected_s(replica: Replica, compute_s: float) -> float:
    """The expected time to the first token on `replica`, and to the last where its speed is known; less is better.

    `compute_s`: of the prompt, with what is copied."""
    expected_s = compute_s + replica.backlog_s + RESPONSE_TOKENS * replica.token_s
    if replica.running or replica.waiting:
        running, waiting = replica.running, replica.waiting
        expected_s += waiting * replica.request_s / running if running else waiting * SHARING_S
        expected_s += running * SHARING_S
    if replica.kv_used_fraction > SCARCE_KV_FRACTION:
        scarcity = (replica.kv_used_fraction - SCARCE_KV_FRACTION) / (1 - SCARCE_KV_FRACTION)
        expected_s += scarcity * PREEMPTION_S
    return expected_s


def choose(
    replicas: Sequence[Replica],
    prompt: bytes,
    prefixes: PrefixRecord,
    is_source: Callable[[str], bool] = lambda _: True,
) -> RoutingChoice:
    """The replica for `prompt`, recorded in `prefixes`. Prompts are any bytes that have a prefix in common where what
    is cached of one can be used for the other: they begin with the digest of their tenant.

    `replicas` is not empty. `is_source`: whether a place can be asked for what it has computed.
    """
    blocks = leading_blocks(prompt)
    source = source_of(blocks, prefixes, is_source) if blocks else Source()
    num_prompt_tokens = len(prompt) // BYTES_PER_TOKEN

    best, best_position, best_compute_s, best_cached = None, 0, 0.0, NOTHING_CACHED
    for position, replica in enumerate(replicas):
        cached = prefixes.cached(blocks, replica.place) if blocks else NOTHING_CACHED
        num_elsewhere = source.tokens_for(replica.place, cached) if replica.fetched_tokens_per_s else 0
        compute_s = prefill_s(replica, num_prompt_tokens, cached, num_elsewhere)
        rank = (replica.is_saturated, expected_s(replica, compute_s), replica.place)
        if best is None or rank < best:
            best, best_position, best_compute_s, best_cached = rank, position, compute_s, cached
    place = replicas[best_position].place
    if blocks:
        prefixes.record(blocks, place)
    return RoutingChoice(
        best_position, best_compute_s, best_cached, source.place if source.tokens_for(place, best_cached) else ""
    )
