"""What a measurement asks of a model, and what follows from the times."""

import pytest

from cortex.neuron.engine.roofline.step_work import DeviceLimits, ExpertWork, StepWork
from cortex.neuron.node.bench.workload import (
    DECODE_PROMPT_TOKENS,
    PROBE_TOKENS,
    Arrivals,
    ModelCapacity,
    ReplicaLimits,
    Workload,
    mean_tokens,
    steady_rate,
)


def room(context: int = 4096, cache: int = 1 << 20, slots: int = 64, max_prompt: int | None = None) -> ModelCapacity:
    return ModelCapacity(
        Workload(decode_tokens=256, prompt_tokens=2048),
        context_tokens=context,
        max_prompt_tokens=max_prompt,
        slots=slots,
        cache_tokens=cache,
    )


@pytest.mark.parametrize(
    ("given", "streams", "tokens"),
    [
        (room(), 64, 256),
        (room(slots=8), 64, 0),
        (room(context=128), 1, 128 - DECODE_PROMPT_TOKENS),
        (room(context=40), 1, 0),
        (room(cache=64 * 100), 64, 100 - DECODE_PROMPT_TOKENS),
        (room(cache=64 * 40), 64, 0),
        (room(cache=64 * 40), 8, 256),
    ],
)
def test_responses_fit_into_slots_context_and_cache(given: ModelCapacity, streams: int, tokens: int) -> None:
    assert given.decode_tokens(streams) == tokens


@pytest.mark.parametrize(
    ("given", "tokens_per_s", "tokens"),
    [
        (room(), 100_000.0, 2048),
        (room(), 100.0, 400),
        (room(), 0.0, PROBE_TOKENS),
        (room(context=64), 100_000.0, 63),
        (room(max_prompt=500), 100_000.0, 500),
        (room(cache=300), 100_000.0, 299),
    ],
)
def test_prompt_is_as_long_as_the_model_and_the_time_allow(
    given: ModelCapacity, tokens_per_s: float, tokens: int
) -> None:
    assert given.prompt_tokens(tokens_per_s) == tokens


@pytest.mark.parametrize(
    ("streams", "rate"),
    [
        ([], None),
        ([[]], None),
        ([[(1.0, 1)]], None),
        ([[(1.0, 1), (2.0, 1), (3.0, 1)]], 1.0),
        # Counted is what came while both ran: from 2 s to 3 s.
        ([[(0.0, 9), (2.5, 3), (3.0, 3), (4.0, 50)], [(2.0, 1), (2.5, 2), (3.0, 2)]], 10.0),
        ([[(0.0, 1), (1.0, 1)], [(2.0, 1), (3.0, 1)]], None),
        ([[(0.0, 1), (1.0, 1)], []], None),
    ],
)
def test_rate_is_of_the_time_in_which_all_streams_ran(streams: list[Arrivals], rate: float | None) -> None:
    assert steady_rate(streams) == rate


def test_streams_may_have_different_numbers_of_tokens() -> None:
    assert mean_tokens([[(0.0, 9), (2.5, 3)], [(2.0, 1)], []]) == pytest.approx(13 / 3)


LIMITS = DeviceLimits(bytes_per_s=1000.0, flops=1e6)


def test_shares_are_of_the_time_that_the_device_would_need() -> None:
    dense = ReplicaLimits.of(StepWork(100, weights_per_token=50), [LIMITS], replicas=1, is_staged=False)
    assert dense is not None
    # A step reads 100 bytes in 0.1 s.
    assert dense.decode_share(1, 5.0, tokens=16.0) == pytest.approx(0.5)
    assert dense.decode_share(8, 40.0, tokens=16.0) == pytest.approx(0.5)
    # 100,000 rows are bound by their 10 million operations: 10 s.
    assert dense.decode_share(100_000, 5_000.0, tokens=16.0) == pytest.approx(0.5)
    # 10,000 tokens take 1 million operations: 1 s.
    assert dense.prompt_share(10_000, 5_000.0) == pytest.approx(0.5)
    # A prompt of one token must still read the weights.
    assert dense.prompt_share(1, 5.0) == pytest.approx(0.5)


def test_share_is_of_the_context_that_the_streams_had() -> None:
    work = StepWork(100, token_bytes=1)
    limits = ReplicaLimits.of(work, [LIMITS], replicas=1, is_staged=False)
    assert limits is not None
    # Halfway through 36 tokens a row has read the prompt and 18 more.
    context_tokens = DECODE_PROMPT_TOKENS + 18
    assert limits.decode_share(8, 40.0, tokens=36.0) == pytest.approx(5.0 * work.read_bytes(8, context_tokens) / 1000)


def test_more_rows_select_more_experts() -> None:
    mixture = StepWork(100, experts=(ExpertWork(num_bytes=800, share=0.25),))
    assert mixture.read_bytes(1) == pytest.approx(100 + 200)
    assert mixture.read_bytes(2) == pytest.approx(100 + 350)
    assert mixture.read_bytes(64) == pytest.approx(900, rel=1e-3)


def test_ranks_read_together_stages_one_after_the_other_and_replicas_share_the_streams() -> None:
    work = StepWork(100)

    def share(streams: int, *, replicas: int = 1, is_staged: bool = False) -> float:
        limits = ReplicaLimits.of(work, [LIMITS, LIMITS], replicas=replicas, is_staged=is_staged)
        assert limits is not None
        return limits.decode_share(streams, 10.0, tokens=16.0)

    assert share(1) == pytest.approx(0.5), "two devices read 100 bytes in 0.05 s"
    assert share(1, is_staged=True) == pytest.approx(1.0)
    assert share(8, replicas=2) == pytest.approx(0.5 / 8)
    assert share(1, replicas=2) == share(1), "one stream runs on one replica"


def test_work_of_ranks_adds_up() -> None:
    first = StepWork(10, (ExpertWork(100, 0.5),), token_bytes=2, state_bytes=3, weights_per_token=7, attention_width=4)
    second = StepWork(20, (ExpertWork(50, 0.5), ExpertWork(30, 0.1)), weights_per_token=1)
    whole = StepWork(30, (ExpertWork(150, 0.5), ExpertWork(30, 0.1)), 2, 3, 8, 4)
    assert StepWork.together([first, second]) == whole
