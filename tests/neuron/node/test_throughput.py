import pytest

from cortex.neuron.node.throughput import Throughput


def idle(throughput: Throughput, first_s: int, last_s: int, count: int) -> None:
    for now_s in range(first_s, last_s + 1):
        throughput.sample(now_s, count, is_idle=True)


def test_speed_of_a_short_stream_is_not_averaged_over_idle_time() -> None:
    throughput = Throughput()
    idle(throughput, 0, 40, 0)
    throughput.sample(40.5, 50, is_idle=False)
    throughput.sample(41.0, 100, is_idle=True)  # its last tokens
    assert throughput.per_s(41.0) == 100
    idle(throughput, 42, 44, 100)
    assert throughput.per_s(44.0) == 100, "it does not fade after the stream"
    idle(throughput, 45, 47, 100)
    assert throughput.per_s(47.0) == 0


def test_slow_steps_count_in_full() -> None:
    throughput = Throughput()
    for now_s in range(20):
        throughput.sample(now_s, now_s // 2, is_idle=False)
    assert throughput.per_s(19) == pytest.approx(0.5, abs=0.1)


def test_speed_is_that_of_the_last_seconds() -> None:
    throughput = Throughput()
    for now_s in range(20):
        throughput.sample(now_s, 10 * now_s if now_s < 10 else 100 + 50 * (now_s - 10), is_idle=False)
    assert throughput.per_s(19) == 50
