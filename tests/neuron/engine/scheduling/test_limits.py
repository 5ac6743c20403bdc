"""How many tokens of prompts a step may have."""

from __future__ import annotations

import pytest

from cortex.neuron.engine.scheduling.limits import SchedulerLimits


@pytest.mark.parametrize(
    ("num_decodes", "num_waiting", "expected"),
    [
        (0, 1, 16_384),  # no stream to delay
        (0, 200, 16_384),
        (1, 1, 2_048),
        (200, 7, 2_048),
        (1, 15, 2_048),
        (1, 16, 4_096),  # more waiting prompts get more
        (16, 31, 6_144),
        (16, 240, 8_192),  # but never more than half of a step
        (15_000, 240, 1_384),  # the rest of the step
    ],
)
def test_prefill_budget_of_a_step(num_decodes: int, num_waiting: int, expected: int) -> None:
    limits = SchedulerLimits(max_rows=512, step_tokens=16_384, mixed_prefill_tokens=2_048, context_tokens=40_960)
    assert limits.prefill_tokens(num_decodes, num_waiting) == expected
