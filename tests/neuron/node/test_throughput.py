import pytest

from cortex.neuron.node.instance import Throughput


def stream(throughput: Throughput, first_s: float, num_tokens: int, step_s: float) -> float:
    """One request whose first token comes at `first_s`. Returns when its last one came."""
    for number in range(num_tokens):
        now_s = first_s + number * step_s
        throughput.sample(now_s, int(number > 0), is_generating=number < num_tokens - 1)
    return now_s


def test_speed_of_one_request_is_that_after_its_first_token() -> None:
    throughput = Throughput()
    last_s = stream(throughput, 40.0, 51, 0.0625)  # after a prompt of any length
    assert throughput.per_s(last_s) == 16
    assert throughput.per_s(last_s + 4) == 16, "it does not fade after the stream"
    assert throughput.per_s(last_s + 6) == 0


def test_time_between_requests_does_not_count() -> None:
    throughput = Throughput()
    last_s = stream(throughput, 0.0, 11, 0.1)
    last_s = stream(throughput, last_s + 3, 11, 0.1)
    assert throughput.per_s(last_s) == pytest.approx(10)


def test_speeds_of_requests_at_the_same_time_are_added() -> None:
    throughput = Throughput()
    throughput.sample(1.0, 0, is_generating=True)
    for number in range(1, 11):
        throughput.sample(1.0 + number / 10, 2, is_generating=number < 10)
    assert throughput.per_s(2.0) == pytest.approx(20)


def test_slow_steps_count_in_full() -> None:
    throughput = Throughput()
    assert throughput.per_s(stream(throughput, 0.0, 10, 2.0)) == 0.5


def test_speed_is_that_of_the_last_seconds() -> None:
    throughput = Throughput()
    for number in range(20):
        throughput.sample(number, 10 if number < 10 else 50, is_generating=True)
    assert throughput.per_s(19) == 50


def test_new_stream_after_a_pause_is_not_mixed_with_the_one_before() -> None:
    throughput = Throughput()
    stream(throughput, 0.0, 11, 0.1)
    assert throughput.per_s(stream(throughput, 60.0, 3, 1.0)) == 1


def test_outputs_of_a_model_that_streams_none_take_no_memory() -> None:
    throughput = Throughput()
    for number in range(1000):
        throughput.sample(number / 100, 0, is_generating=False)
    assert len(throughput._samples) == 1  # noqa: SLF001 - nothing else shows what is kept
    assert throughput.per_s(stream(throughput, 10.0, 11, 0.1)) == pytest.approx(10)
