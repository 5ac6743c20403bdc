"""Which replica serves a request: the one where its first token is expected first, or, where all replicas were
measured, its last.

Everything is weighed in seconds: computing what is not cached of the prompt, copying what is cached in host memory, the
prompts ahead of it, the queue, and the requests that share the device. A replica whose KV cache is full comes after
every other one whatever it has cached: routing by cache alone overloads one replica while another is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cortex.routing.prefixes import BYTES_PER_TOKEN, CachedPrefix, PrefixRecord, leading_blocks

PREFILL_TOKENS_PER_S = 4000.0
REQUEST_S = 5.0
"""Assumed until a request was measured."""
COPY_SPEEDUP = 5.0
"""By how much copying a token from host memory is assumed to be faster than computing it, until it was measured."""
RESPONSE_TOKENS = 256
"""What a response is assumed to have, where replicas are compared by their speed."""
SHARING_S = 0.05
"""A running request delays the first token by about one step, and slows the later ones by a few per cent."""
SCARCE_KV_FRACTION = 0.7
PREEMPTION_S = 2.0
"""What a nearly full KV cache costs: requests are preempted, and cached prefixes are lost."""
SATURATED_KV_FRACTION = 0.95
_NOTHING = CachedPrefix()


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A ready model in one place, as a candidate for a request."""

    place: str
    """Its node, or within a node its devices."""
    running: int = 0
    waiting: int = 0
    """Requests in the queue there."""
    kv_used_fraction: float = 0.0
    backlog_s: float = 0.0
    """Until the prompts that were sent there are computed."""
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    copied_tokens_per_s: float | None = None
    """How fast pages come back from host memory; None: not measured."""
    request_s: float = REQUEST_S
    """How long a request takes there, on average."""
    token_s: float = 0.0
    """How long each token of one more response takes there; 0 for all replicas where one of them was not measured."""

    @property
    def is_saturated(self) -> bool:
        """A further request would cost running ones their memory."""
        return self.running + self.waiting > 0 and self.kv_used_fraction >= SATURATED_KV_FRACTION

    @property
    def delay_s(self) -> float:
        """What a request waits for there before its own prompt is computed."""
        delay_s = self.backlog_s
        if self.running or self.waiting:
            queue_s = self.waiting * self.request_s / self.running if self.running else self.waiting * SHARING_S
            delay_s += queue_s + self.running * SHARING_S
        if self.kv_used_fraction > SCARCE_KV_FRACTION:
            scarcity = (self.kv_used_fraction - SCARCE_KV_FRACTION) / (1 - SCARCE_KV_FRACTION)
            delay_s += scarcity * PREEMPTION_S
        return delay_s


class RoutingChoice(msgspec.Struct, frozen=True):
    """The replica for a request."""

    replica: Replica
    prefill_s: float
    """How long it is expected to compute what it has not cached of the prompt, and to copy what is in host memory."""
    cached: CachedPrefix = _NOTHING
    """What it has of the prompt."""


def prefill_s(replica: Replica, num_prompt_tokens: int, cached: CachedPrefix) -> float:
    compute_s = max(0, num_prompt_tokens - sum(cached)) / replica.prefill_tokens_per_s
    if not cached.host_tokens:
        return compute_s
    return compute_s + cached.host_tokens / (replica.copied_tokens_per_s or COPY_SPEEDUP * replica.prefill_tokens_per_s)


def expected_s(replica: Replica, compute_s: float) -> float:
    """The expected time to the first token on `replica`, and to the last where its speed is known; less is better.

    `compute_s`: of the prompt, with what is copied."""
    return compute_s + replica.delay_s + RESPONSE_TOKENS * replica.token_s


def choose(replicas: Sequence[Replica], prompt: bytes, prefixes: PrefixRecord) -> RoutingChoice:
    """The replica for `prompt` (any bytes that share a prefix when prompts do), recorded in `prefixes`.

    `replicas` is not empty.
    """
    blocks = leading_blocks(prompt)
    num_prompt_tokens = len(prompt) // BYTES_PER_TOKEN

    ranked = []
    for position, replica in enumerate(replicas):
        cached = prefixes.cached(blocks, replica.place) if blocks else _NOTHING
        compute_s = prefill_s(replica, num_prompt_tokens, cached)
        rank = (replica.is_saturated, expected_s(replica, compute_s), replica.place)
        ranked.append((rank, position, compute_s, cached))
    _, position, compute_s, cached = min(ranked)
    best = replicas[position]
    if blocks:
        prefixes.record(blocks, best.place)
    return RoutingChoice(best, compute_s, cached)
