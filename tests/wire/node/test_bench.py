"""The speed of a model between the numbers of streams that were measured."""

import pytest

from cortex.wire.node.bench import BenchResult, StreamRate


def result(*rates: tuple[int, float]) -> BenchResult:
    streams = tuple(StreamRate(streams=count, tokens_per_s=rate) for count, rate in rates)
    return BenchResult(measured_at=0.0, version="0", streams=streams)


MEASURED = result((1, 100.0), (8, 400.0), (64, 1520.0))


@pytest.mark.parametrize(
    ("measured", "streams", "token_s"),
    [
        (MEASURED, 1, 1 / 100),
        (MEASURED, 8, 8 / 400),
        (MEASURED, 36, 36 / 960),
        (MEASURED, 64, 64 / 1520),
        (MEASURED, 128, 128 / 1520),
        (result((1, 50.0)), 4, 4 / 50),
        (result((8, 400.0)), 1, 8 / 400),
        (result(), 1, None),
        (result((1, 0.0)), 1, None),
    ],
)
def test_seconds_per_token_follow_the_measured_rates(
    measured: BenchResult, streams: int, token_s: float | None
) -> None:
    assert measured.token_s(streams) == (None if token_s is None else pytest.approx(token_s))


def test_rate_of_one_stream_is_zero_where_it_was_not_measured() -> None:
    assert (MEASURED.stream_rate, result((8, 400.0)).stream_rate) == (100.0, 0.0)
