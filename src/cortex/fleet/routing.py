"""Which replica serves a request: the one with the least work, where a cached prefix is work saved.

The unit is prompt tokens still to be computed; queue and cache pressure are converted into it. A saturated replica
comes after every other one whatever it has cached: routing by cache alone overloads one node while another is idle.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from .topology import Node, Residency

BLOCK_BYTES = 2048
MAX_BLOCKS = 128
"""Longer prefixes are indistinguishable here; sessions differ long before."""
BYTES_PER_TOKEN = 4

QUEUED_TOKENS = 1500
"""A request ahead of ours costs about as much as computing this many prompt tokens."""
FULL_CACHE_TOKENS = 4000
"""What a full KV cache costs: requests are preempted, and cached prefixes are lost."""
SATURATED_KV_FRACTION = 0.95

Blocks = tuple[int, ...]


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A ready model on a node, as a candidate for a request."""

    node: str
    running: int = 0
    waiting: int = 0
    kv_used_fraction: float = 0.0
    in_flight: int = 0
    """This gateway's own requests there now; unlike the others, never stale."""

    @classmethod
    def of(cls, node: Node, held: Residency, in_flight: int) -> Replica:
        load = held.status.load
        return cls(
            node=node.name,
            running=load.running,
            waiting=load.waiting,
            kv_used_fraction=load.kv_used_fraction,
            in_flight=in_flight,
        )

    @property
    def num_requests(self) -> int:
        """The node's report, or our own count where that is higher."""
        return max(self.running + self.waiting, self.in_flight)

    @property
    def is_saturated(self) -> bool:
        """A further request would wait there: others already queue, or the cache is full."""
        return self.waiting > 0 or self.kv_used_fraction >= SATURATED_KV_FRACTION


def leading_blocks(prompt: bytes) -> Blocks:
    """Chained fingerprints of the leading full blocks of a prompt. Equal fingerprints mean an equal prefix, with a
    certainty that is enough for a preference."""
    fingerprints = []
    fingerprint = 0
    last = min(len(prompt) // BLOCK_BYTES, MAX_BLOCKS)
    view = memoryview(prompt)
    for number in range(last):
        fingerprint = zlib.crc32(view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES], fingerprint)
        fingerprints.append(fingerprint << 16 | number)
    return tuple(fingerprints)


class Affinity:
    """Which replicas of one model have computed which prefixes. Bounded; the least recently used are dropped.

    Mutable; owned by the gateway's loop. It records where prompts went, not what nodes still cache: a preference, not a
    guarantee.
    """

    def __init__(self, max_blocks: int = 65536) -> None:
        self._max_blocks = max_blocks
        self._nodes: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def record(self, blocks: Blocks, node: str) -> None:
        """`node` is about to compute the prompt that begins with `blocks`."""
        for block in blocks:
            nodes = self._nodes.pop(block, ())
            self._nodes[block] = nodes if node in nodes else (*nodes, node)
        while len(self._nodes) > self._max_blocks:
            self._nodes.popitem(last=False)

    def num_cached_blocks(self, blocks: Blocks, node: str) -> int:
        """How many leading blocks `node` has seen without a gap."""
        count = 0
        for block in blocks:
            if node not in self._nodes.get(block, ()):
                break
            count += 1
        return count

    def forget(self, node: str) -> None:
        """`node` unloaded the model or restarted: its cache is empty."""
        kept = {block: tuple(name for name in nodes if name != node) for block, nodes in self._nodes.items()}
        self._nodes = OrderedDict((block, nodes) for block, nodes in kept.items() if nodes)


def score(replica: Replica, num_prompt_tokens: int, num_cached_tokens: int) -> float:
    """The work between a request and its first token on `replica`, in prompt tokens; less is better."""
    return (
        max(0, num_prompt_tokens - num_cached_tokens)
        + QUEUED_TOKENS * replica.num_requests
        + FULL_CACHE_TOKENS * replica.kv_used_fraction
    )


def choose(replicas: Sequence[Replica], prompt: bytes, affinity: Affinity) -> Replica:
    """The replica for `prompt` (any bytes that share a prefix when prompts do), recorded in `affinity`.

    `replicas` is not empty. With a single one nothing is computed.
    """
    if len(replicas) == 1:
        return replicas[0]
    blocks = leading_blocks(prompt)
    num_prompt_tokens = len(prompt) // BYTES_PER_TOKEN

    def rank(replica: Replica) -> tuple[bool, float, str]:
        if replica.is_saturated:
            return True, score(replica, num_prompt_tokens, 0), replica.node
        num_cached_tokens = affinity.num_cached_blocks(blocks, replica.node) * BLOCK_BYTES // BYTES_PER_TOKEN
        return False, score(replica, num_prompt_tokens, num_cached_tokens), replica.node

    best = min(replicas, key=rank)
    affinity.record(blocks, best.node)
    return best
