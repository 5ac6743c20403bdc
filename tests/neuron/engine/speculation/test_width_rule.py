"""How many tokens the device proposes, on a simulated machine whose step times are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest

from cortex.neuron.engine.execution.graphs import SIZES
from cortex.neuron.engine.speculation.drafter import MAX_PROPOSALS, Draft, Drafter
from cortex.neuron.engine.speculation.width_rule import PLAIN_AGE, FastestWidths, StepTime

STEPS = 400


@dataclass(frozen=True, slots=True)
class Machine:
    """Milliseconds of a step."""

    plain: float
    gap: float
    """What the device waits for the host before a step that depends on the one before."""
    extend: float
    """What each proposed token takes."""
    absorb: float = 0.05

    def ms(self, num_rows: int, num_tokens: int, count: int, *, follows: bool) -> float:
        graph = next(ms for size, ms in CHECKS.items() if size >= num_tokens) if num_tokens > num_rows else self.plain
        proposing = self.absorb + self.extend * count if count else 0.0
        return graph + proposing + (0 if follows else self.gap)


CHECKS = {2: 4.64, 4: 4.80, 8: 5.02, 16: 5.31, 32: 6.32, 64: 8.06}
"""Times of graphs that check drafts, by their tokens: the 9B of Qwen3.5 in bfloat16 on an H200, as the first two
machines."""
ONE_STREAM = Machine(4.36, 1.1, 0.34)
EIGHT_STREAMS = Machine(5.1, 1.4, 0.39)
SLOW_HEAD = Machine(4.36, 1.0, 2.5, absorb=2.0)


def new_rule() -> FastestWidths:
    return FastestWidths(SIZES, 0.015, lambda: 64, proposal_cost=0.03)


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


CASES = [(ONE_STREAM, 1, rate) for rate in (0.0, 0.3, 0.6, 0.8)]
CASES += [(EIGHT_STREAMS, 8, 0.0), (EIGHT_STREAMS, 8, 0.8), (SLOW_HEAD, 1, 0.3), (SLOW_HEAD, 1, 0.8)]


@pytest.mark.parametrize(("machine", "num_rows", "rate"), CASES)
def test_proposes_about_as_many_tokens_as_is_fastest(machine: Machine, num_rows: int, rate: float) -> None:
    best, count = best_of_fixed(machine, rate, num_rows)
    rule = new_rule()
    tokens_per_ms(rule, machine, rate, num_rows, 60)  # it learns the times
    reached = tokens_per_ms(rule, machine, rate, num_rows)
    plain, _ = _fixed(machine, rate, num_rows, 0)
    assert reached >= 0.9 * best, f"{count} tokens would be fastest"
    assert reached >= 0.96 * plain


PLAIN = StepTime(1, 1, 1.0, checks_drafts=False)
ODDS = [(0.9,) * MAX_PROPOSALS]


def test_time_of_a_plain_step_is_measured_again_after_many_others() -> None:
    rule = new_rule()
    assert rule.num_proposals(ODDS, 1) == 0, "nothing is known"
    rule.record(PLAIN)
    for _ in range(PLAIN_AGE):
        assert rule.num_proposals(ODDS, 1) > 0
        rule.record(StepTime(1, 2, 1.2, checks_drafts=True, num_proposals=1))
    assert rule.num_proposals(ODDS, 1) == 0
    rule.record(replace(PLAIN, follows=False))
    assert rule.num_proposals(ODDS, 1) == 0, "the device had waited for this one"
    rule.record(PLAIN)
    assert rule.num_proposals(ODDS, 1) > 0


def test_times_from_before_the_graphs_are_forgotten() -> None:
    rule = new_rule()
    rule.record(replace(PLAIN, seconds=9.0))
    rule.forget()
    rule.record(PLAIN)
    for _ in range(3):
        rule.record(StepTime(1, 2, 5.0, checks_drafts=True, num_proposals=1))
    assert rule.num_proposals(ODDS, 1) == 0


def test_proposed_tokens_are_checked_even_if_other_drafts_of_their_number_did_not_pay() -> None:
    rule = new_rule()
    rule.record(PLAIN)
    for _ in range(3):
        rule.record(StepTime(1, 2, 9.0, checks_drafts=True))
    assert rule.widths([Draft((7,), (0.9,), "lookup")], 1, is_mixed=False) == [0]
    assert rule.widths([Draft((7,), (0.9,), "mtp")], 1, is_mixed=False) == [1]
