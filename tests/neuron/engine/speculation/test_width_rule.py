"""How many tokens the device proposes, on a simulated machine whose step times are known."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import pytest

from cortex.neuron.engine.execution.graphs import SIZES
from cortex.neuron.engine.speculation.drafter import MAX_PROPOSALS, Drafter
from cortex.neuron.engine.speculation.width_rule import FastestWidths, StepTime

STEPS = 600


@dataclass(frozen=True, slots=True)
class Machine:
    """Milliseconds of a step."""

    plain: float
    token: float
    """What each token more takes."""
    gap: float
    """What the device waits for the host before a step that depends on the one before."""
    absorb: float
    extend: float
    """What each proposed token takes."""

    def ms(self, num_rows: int, num_tokens: int, count: int, *, follows: bool) -> float:
        proposing = self.absorb + self.extend * count if count else 0.0
        return self.plain + self.token * (num_tokens - num_rows) + proposing + (0 if follows else self.gap)


ONE_STREAM = Machine(4.4, 0.05, 0.6, 0.5, 0.35)
EIGHT_STREAMS = Machine(5.1, 0.08, 0.8, 0.8, 0.4)
SLOW_HEAD = Machine(4.4, 0.05, 1.0, 2.0, 2.5)


class FixedCount(FastestWidths):
    count = 0

    def num_proposals(self, odds: object, num_rows: int) -> int:
        del odds, num_rows
        return self.count


def new_rule(kind: type[FastestWidths] = FastestWidths) -> FastestWidths:
    return kind(SIZES, 0.03, lambda: 64, proposal_cost=0.03)


def tokens_per_ms(rule: FastestWidths, machine: Machine, rate: float, num_rows: int = 1, steps: int = STEPS) -> float:
    """Decodes rows whose proposed tokens are right at `rate`, if those before them are. The right token after n tokens
    is n."""
    chance = random.Random(3)
    texts = [[0] for _ in range(num_rows)]
    drafters = [Drafter(text, is_on=True, proposals="mtp") for text in texts]
    for drafter in drafters:
        drafter.propose(())
    spent, depends = 0.0, False
    for _ in range(steps):
        drafts = [drafter.draft(MAX_PROPOSALS) for drafter in drafters]
        widths = (
            rule.widths(drafts, num_rows, is_mixed=False) if any(draft.tokens for draft in drafts) else [0] * num_rows
        )
        count = rule.num_proposals([drafter.proposal_chances for drafter in drafters], num_rows)
        num_tokens, follows = num_rows + sum(widths), not depends
        ms = machine.ms(num_rows, num_tokens, count, follows=follows)
        rule.record(StepTime(num_rows, num_tokens, ms / 1e3, any(widths), count, follows))
        spent += ms
        depends = bool(count or any(widths))
        for text, drafter, draft, width in zip(texts, drafters, drafts, widths, strict=True):
            for token in (*draft.tokens[:width], None):
                right = len(text)
                text.append(right)
                if token != right:
                    break
            drafter.propose(tuple(len(text) + n if chance.random() < rate else -1 for n in range(count)))
    return sum(len(text) - 1 for text in texts) / spent


def best_of_fixed(machine: Machine, rate: float, num_rows: int) -> tuple[float, int]:
    """The most tokens per millisecond of any fixed count, and the count."""
    return max(_fixed(machine, rate, num_rows, count) for count in range(MAX_PROPOSALS + 1))


def _fixed(machine: Machine, rate: float, num_rows: int, count: int) -> tuple[float, int]:
    rights = sum(accumulate([1.0] + [rate] * count, lambda one, other: one * other))
    ms = machine.ms(num_rows, num_rows * (1 + count), count, follows=not count)
    return num_rows * rights / ms, count


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8])
@pytest.mark.parametrize(
    ("machine", "num_rows"), [(ONE_STREAM, 1), (EIGHT_STREAMS, 8), (SLOW_HEAD, 1)], ids=["one", "eight", "slow head"]
)
def test_proposes_about_as_many_tokens_as_is_fastest(machine: Machine, num_rows: int, rate: float) -> None:
    best, count = best_of_fixed(machine, rate, num_rows)
    reached = tokens_per_ms(new_rule(), machine, rate, num_rows)
    plain, _ = _fixed(machine, rate, num_rows, 0)
    assert reached >= 0.95 * best, f"{count} tokens would be fastest"
    assert reached >= 0.96 * plain
