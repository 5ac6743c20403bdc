"""Divides the next step's budget for prompts among principals. Pure.

A step with streams is bounded by its expected time, because every stream waits for the whole step. Prompts are measured
in tokens without attention (`StepWork.prompt_worth`), so a chunk late in a long prompt has fewer tokens.

Prompts of a higher class come first; `idle_work.py` decides how much of a step the idle class gets. Within a class,
principals with waiting prompts get equal shares, and unused parts go to the others, so that a long prompt of one
principal delays another's prompts by one chunk only. Shares are not smaller than `LEAST_TOKENS`: with more principals
than fit into a step, those that had the fewest tokens so far go first. Within a principal, short prompts overtake a
long one with half of its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from cortex.neuron.engine.roofline.step_costs import StepCosts, StepShape
from cortex.neuron.engine.roofline.step_work import StepWork
from cortex.system.fair_turns import DEFAULT, PRIORITY, VirtualTime

LEAST_TOKENS = 64
"""Smaller chunks cost more per token."""
LEAST_CHUNK = 16
"""A smaller chunk joins a step of other prompts only if it ends its prompt."""
STREAM_SHARE = 1 / 3
"""If streams alone take more than this part of the bound, the step is lengthened so that they take this part."""
READS_PER_STEP = 16
"""A step of several prompts without streams takes at least this many times as long as reading the weights, which would
otherwise dominate."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_rows: int
    """Sequences that run at once."""
    step_tokens: int
    """Most tokens that one step computes, decode rows included."""
    step_s: float
    """Expected duration to which prompts may extend a step while streams or other prompts wait for it."""
    context_tokens: int
    """Longest sequence, prompt and output together."""
    reserved_tokens: int = 0
    """Pages are reserved for each row up to this many tokens ahead, at most up to its `max_tokens`. Responses no longer
    than this are never preempted. Clients set `max_tokens` far above usual lengths, so reserving all of it would leave
    rows idle."""
    mixed_sizes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The prompt sizes of the captured graphs, in tokens, by the most streams that the graphs decode with them. Both
    ascend. Empty: there are no such graphs."""
    least_prompt_tokens: int = 1
    """Minimum prompt tokens per step, whatever their time: fewer would waste most of a step on a slow device."""

    def prompt_budget(self, costs: StepCosts, streams: StepShape, num_prompts: int) -> int | None:
        """The maximum work of prompts in a step; None for as many tokens as the step holds. `streams`: the step without
        prompts."""
        room, streams_s = self.step_tokens - streams.num_streams, costs.seconds(streams)
        if not streams.num_streams:
            if num_prompts < 2:
                return None
            most_s = max(self.step_s, READS_PER_STEP * streams_s)
        else:
            most_s = max(self.step_s, streams_s / STREAM_SHARE)
        tokens = max(min(self.least_prompt_tokens, room), costs.prompt_tokens(streams, most_s, room))
        if not streams.num_streams:
            return tokens
        graph = self.graph_tokens(streams.num_streams, tokens)
        # Two graphs compute as many tokens as one longer step in the same time, and streams wait for half as long. But
        # where streams take most of the time, it is their number of steps that counts.
        is_fast = 0 < graph < tokens and streams_s < costs.seconds(streams.with_prompts(graph)) / 2
        return graph if is_fast else tokens

    def graph_tokens(self, num_streams: int, tokens: int) -> int:
        """The largest number of prompt tokens, at most `tokens`, that a graph for `num_streams` has; `tokens` if there
        is no such graph."""
        sizes = next((sizes for most, sizes in self.mixed_sizes.items() if most >= num_streams), ())
        return max((size for size in sizes if size <= tokens), default=tokens)


class Flow(NamedTuple):
    """The requests of one principal and class, which fair queueing serves as one flow."""

    principal: str
    level: int = DEFAULT


def fair_shares(budget: int, needed: Mapping[Flow, int]) -> dict[Flow, int]:
    """Tokens of each flow. Their sum is at most `budget`, and less only if no flow needs more.

    `needed` has the tokens that each flow could use, in the order in which they are considered.
    """
    num_served = max(1, budget // LEAST_TOKENS)
    served = dict(list(needed.items())[:num_served])
    shares: dict[Flow, int] = {}
    for position, (flow, tokens) in enumerate(sorted(served.items(), key=lambda entry: entry[1])):
        shares[flow] = min(tokens, budget // (len(served) - position))
        budget -= shares[flow]
    for flow, tokens in needed.items():  # the remainder of the division, and the unused parts of the first ones
        added = min(budget, tokens - shares.get(flow, 0))
        shares[flow] = shares.get(flow, 0) + added
        budget -= added
    return shares


class Prompt(NamedTuple):
    """The remaining need of a waiting or running prompt, as input of its turn."""

    flow: Flow
    worth: int


class Turns(NamedTuple):
    """The order in which the prompts of a step are computed, as their indexes."""

    overtaking: list[int]
    """Short prompts that overtake, the shortest first."""
    by_age: list[int]


def turns(prompts: Ordered[Prompt], shares: Mapping[Flow, int]) -> Turns:
    """The turns of prompts, which are given by age. A flow whose oldest prompt exceeds its share gives up to half of
    the share to other prompts of its own that the share completes. They wait for a chunk of the long prompt, not for
    all of it, and the long one always advances."""
    oldest: dict[Flow, int] = {}
    for index, prompt in enumerate(prompts):
        oldest.setdefault(prompt.flow, index)
    left = {
        flow: shares.get(flow, 0) // 2 for flow, index in oldest.items() if prompts[index].worth > shares.get(flow, 0)
    }
    overtaking = []
    for index in sorted(range(len(prompts)), key=lambda index: prompts[index].worth) if left else ():
        flow, worth = prompts[index]
        if index != oldest[flow] and worth <= left.get(flow, 0):
            overtaking.append(index)
            left[flow] -= worth
    first = set(overtaking)
    return Turns(overtaking, [index for index in range(len(prompts)) if index not in first])


class StepShares:
    """The rest of the principals' shares while a step is planned."""

    def __init__(self, work: StepWork, shares: dict[Flow, int]) -> None:
        """`work` gives the work of tokens."""
        self._work = work
        self.left = shares

    def tokens(self, flow: Flow, start: int, remaining: int) -> int:
        """How many of the `remaining` tokens of a prompt from `start` on the share allows; at least one if there is any
        left."""
        share = self.left.get(flow, 0)
        return min(remaining, max(1, self._work.tokens_worth(start, share))) if share > 0 else 0

    def take(self, flow: Flow, start: int, count: int) -> int:
        """Subtracts a chunk and returns its work."""
        worth = ceil(self._work.prompt_worth(start, count))
        self.left[flow] -= worth
        return worth


class PrefillShares:
    """Tokens that each flow has received while it had prompts to prefill. Belongs to the scheduler."""

    def __init__(self) -> None:
        self._prefilled: list[VirtualTime[Flow]] = [VirtualTime() for _ in range(PRIORITY + 1)]
        self._waiting: set[Flow] = set()

    def of_step(self, budget: int, needed: Mapping[Flow, int]) -> dict[Flow, int]:
        """The shares of the next step: those of the highest class first, and within it see `fair_shares`."""
        for flow in needed.keys() - self._waiting:
            self._prefilled[flow.level].joins(flow)
        for flow in self._waiting - needed.keys():
            self._prefilled[flow.level].leaves(flow)
        self._waiting = set(needed)
        shares: dict[Flow, int] = {}
        for level in sorted({flow.level for flow in needed}, reverse=True):
            order = sorted((each for each in needed if each.level == level), key=self._prefilled[level].used)
            shares |= fair_shares(budget, {flow: needed[flow] for flow in order})
            budget -= sum(shares[flow] for flow in order)
        return shares

    def count(self, flow: Flow, worth: int) -> None:
        """Record prefilled tokens."""
        self._prefilled[flow.level].charge(flow, worth)
