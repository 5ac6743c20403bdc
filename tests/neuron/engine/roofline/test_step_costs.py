"""Expected times of steps: right at once where the limits are, soon right where they are not, and never stuck."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.roofline.step_costs import StepCosts, StepShape
from cortex.neuron.engine.roofline.step_work import DeviceLimits, StepWork

WORK = StepWork(15_000_000_000, token_bytes=131_072, weights_per_token=7_500_000_000, attention_width=131_072)
RIGHT = DeviceLimits(4.0e12, 7.5e14)


def shape(num_streams: int, prompt_tokens: int = 0, start: int = 0, context: int = 500) -> StepShape:
    return StepShape(num_streams, num_streams * context, prompt_tokens, WORK.prompt_worth(start, prompt_tokens))


@pytest.mark.parametrize(
    ("step", "measured_ms"),
    [
        (shape(1), 3.8),
        (shape(64, context=64), 5.0),
        (shape(256, context=64), 9.3),
        (shape(48, 128), 8.5),
        (shape(48, 1024), 25.5),
        (shape(0, 2048), 49.0),
        (shape(0, 16_384), 495.0),
    ],
)
def test_expects_what_was_measured_on_an_h200(step: StepShape, measured_ms: float) -> None:
    assert StepCosts(WORK, RIGHT).seconds(step) * 1e3 == pytest.approx(measured_ms, rel=0.25)


@given(st.integers(0, 100_000), st.floats(1.0, 1e5))
def test_a_chunk_is_as_long_as_its_worth_allows(start: int, worth: float) -> None:
    count = WORK.tokens_worth(start, worth)
    assert WORK.prompt_worth(start, count) <= worth + 1e-3
    assert WORK.prompt_worth(start, count + 1) > worth


def test_attention_makes_tokens_late_in_a_prompt_worth_more() -> None:
    assert WORK.prompt_worth(100_000, 100) > 4 * WORK.prompt_worth(0, 100)
    assert WORK.prompt_worth(0, 400) == pytest.approx(WORK.prompt_worth(0, 150) + WORK.prompt_worth(150, 250))


def trained(costs: StepCosts, seconds: Callable[[StepShape], float], num_steps: int = 300) -> StepCosts:
    draw = random.Random(1)
    for _ in range(num_steps):
        step = shape(draw.randrange(1, 65), draw.choice([0, 0, 16, 128, 512, 1024]))
        costs.record(step, seconds(step))
    return costs


@pytest.mark.parametrize("limits", [DeviceLimits(1e12, 1e14), DeviceLimits(4e13, 1e16), DeviceLimits(4e12, 1e13)])
def test_learns_the_rates_of_a_device(limits: DeviceLimits) -> None:
    device = StepCosts(WORK, RIGHT)
    costs = trained(StepCosts(WORK, limits), device.seconds)
    for step in (shape(1), shape(48), shape(16, 128), shape(48, 1024)):
        assert costs.seconds(step) == pytest.approx(device.seconds(step), rel=0.1)
    assert costs.seconds(shape(48, 4096)) == pytest.approx(device.seconds(shape(48, 4096)), rel=0.3), "never computed"


def test_one_prompt_is_enough_where_the_guess_was_far_off() -> None:
    """The device is a hundred times slower than assumed, as a busy CPU may be."""
    device, costs = StepCosts(WORK, DeviceLimits(4e10, 7.5e12)), StepCosts(WORK, RIGHT)
    for _ in range(30):
        costs.record(shape(1), device.seconds(shape(1)))
    costs.record(shape(1, 512), device.seconds(shape(1, 512)))
    assert costs.seconds(shape(1, 512)) == pytest.approx(device.seconds(shape(1, 512)), rel=0.6)


@pytest.mark.parametrize("slower", [0.3, 1.0, 4.0, 20.0, 60.0])
@pytest.mark.parametrize(
    ("limits", "first"),
    [
        pytest.param(DeviceLimits(2e10, 2e11), [shape(0, 4), *[shape(1)] * 6], id="streams on a CPU"),
        pytest.param(DeviceLimits(4e12, 7.5e14), [shape(0, 16), *[shape(1)] * 20], id="streams on a GPU"),
        pytest.param(DeviceLimits(2e10, 2e11), [shape(0, 512, each) for each in (0, 512)], id="a prompt"),
    ],
)
def test_long_prompt_is_expected_from_the_first_steps_of_any_kind(
    limits: DeviceLimits, first: list[StepShape], slower: float
) -> None:
    """As after a restart, when nothing like it was computed."""
    device = StepCosts(WORK, DeviceLimits(limits.bytes_per_s / slower, limits.flops / slower))
    costs = StepCosts(WORK, limits)
    for step in first:
        costs.record(step, device.seconds(step))
    for step in (shape(0, 512, 60_000), shape(0, 2048), shape(1)):
        assert costs.seconds(step) == pytest.approx(device.seconds(step), rel=0.5)


def test_learns_that_steps_of_a_size_are_slow() -> None:
    device = StepCosts(WORK, RIGHT)

    def seconds(step: StepShape) -> float:
        return max(0.04, device.seconds(step)) if step.prompt_tokens >= 1024 else device.seconds(step)

    costs = trained(StepCosts(WORK, RIGHT), seconds)
    assert costs.seconds(shape(16, 1024)) == pytest.approx(0.04, rel=0.15)
    assert costs.seconds(shape(16, 512)) == pytest.approx(device.seconds(shape(16, 512)), rel=0.15)


def test_a_pause_of_the_machine_is_forgotten() -> None:
    device = StepCosts(WORK, RIGHT)
    costs = trained(StepCosts(WORK, RIGHT), device.seconds)
    before = costs.prompt_tokens(shape(16), 0.05, 16_384)
    costs.record(shape(16, 1024), 30.0)
    assert costs.prompt_tokens(shape(16), 0.05, 16_384) == before
    costs.record(shape(16, 1024), 30.0)
    assert before / 4 < costs.prompt_tokens(shape(16), 0.05, 16_384) < before, "twice is no pause"
    trained(costs, device.seconds)
    assert costs.prompt_tokens(shape(16), 0.05, 16_384) == pytest.approx(before, rel=0.05)


@given(st.integers(0, 512), st.floats(1e-4, 1.0), st.integers(0, 20_000))
def test_prompts_fill_the_time_that_is_left(num_streams: int, seconds: float, most: int) -> None:
    costs, streams = StepCosts(WORK, RIGHT), shape(num_streams)
    tokens = costs.prompt_tokens(streams, seconds, most)
    assert 0 <= tokens <= most
    assert tokens == 0 or costs.seconds(streams.with_prompts(tokens)) <= seconds
    assert tokens == most or costs.seconds(streams.with_prompts(tokens + 1)) > seconds
