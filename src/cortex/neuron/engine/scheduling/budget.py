"""How many tokens a step may have, and whose prompts get them. Pure.

Principals whose prompts wait get the same number of tokens, and what one does not need goes to the others, so that a
long prompt of one principal delays the prompts of another by a chunk, not by itself. Shares are not smaller than
`LEAST_TOKENS`: with more principals than fit into a step, those that had the fewest tokens so far go first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cortex.neuron.engine.scheduling.sequence import Sequence

PROMPTS_PER_SHARE = 8
"""For every 8 waiting prompts, a step that also decodes may prefill another `mixed_prefill_tokens`."""
LEAST_TOKENS = 64
"""Smaller chunks cost more for each token."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_rows: int
    """Sequences that run at once."""
    step_tokens: int
    """Most tokens that one step computes, decode rows included."""
    mixed_prefill_tokens: int
    """Prefill tokens in a step that also decodes, unless many prompts wait. Keeps running streams at their pace."""
    context_tokens: int
    """Longest sequence, prompt and output together."""
    reserved_tokens: int = 0
    """Pages are reserved for each row up to this many tokens ahead, at most up to its `max_tokens`. Responses no
    longer than this are never preempted. Clients set `max_tokens` far above usual lengths: reserving all of it would
    leave rows idle."""

    def prefill_tokens(self, num_decodes: int, num_waiting: int) -> int:
        """Most prefill tokens of a step. If there are decode rows, a few prompts get little, so that running streams do
        not stutter. Many prompts get up to half of a step: they start at nearly full pace, and the stutter ends
        sooner."""
        room = self.step_tokens - num_decodes
        if num_decodes == 0:
            return room
        for_many = min(self.mixed_prefill_tokens * (num_waiting // PROMPTS_PER_SHARE), self.step_tokens // 2)
        return min(room, max(self.mixed_prefill_tokens, for_many))


def fair_shares(budget: int, needed: Mapping[str, int]) -> dict[str, int]:
    """Tokens of each principal. Their sum is at most `budget`, and is below it only where nobody needs more.

    `needed` has the tokens that each principal could use, in the order in which they are considered.
    """
    num_served = max(1, budget // LEAST_TOKENS)
    served = dict(list(needed.items())[:num_served])
    shares: dict[str, int] = {}
    for position, (principal, tokens) in enumerate(sorted(served.items(), key=lambda entry: entry[1])):
        shares[principal] = min(tokens, budget // (len(served) - position))
        budget -= shares[principal]
    for principal, tokens in needed.items():  # what division left over, and what the first ones did not need
        added = min(budget, tokens - shares.get(principal, 0))
        shares[principal] = shares.get(principal, 0) + added
        budget -= added
    return shares


def needed_tokens(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> dict[str, int]:
    """The tokens that the prompts of each principal need, of those that run and of those that may start now."""
    needed: dict[str, int] = {}
    for sequence in running:
        if sequence.wants_more:
            principal = sequence.request.principal
            needed[principal] = needed.get(principal, 0) + sequence.remaining
    for sequence in waiting:
        principal = sequence.request.principal
        needed[principal] = needed.get(principal, 0) + len(sequence.tokens)
    return needed


class PrefillShares:
    """The tokens that principals have had while they had prompts to prefill. Belongs to the scheduler."""

    def __init__(self) -> None:
        self._prefilled: dict[str, int] = {}

    def of_step(self, budget: int, needed: Mapping[str, int]) -> dict[str, int]:
        """The shares of the next step; see `fair_shares`. A principal that had no prompts starts level with the one
        that had the fewest tokens."""
        known = [self._prefilled[principal] for principal in needed if principal in self._prefilled]
        level = min(known, default=0)
        self._prefilled = {principal: self._prefilled.get(principal, level) for principal in needed}
        order = sorted(needed, key=self._prefilled.__getitem__)
        return fair_shares(budget, {principal: needed[principal] for principal in order})

    def count(self, principal: str, num_tokens: int) -> None:
        """Record what was prefilled."""
        self._prefilled[principal] = self._prefilled.get(principal, 0) + num_tokens
