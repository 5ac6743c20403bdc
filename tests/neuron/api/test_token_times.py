"""The histogram of token times exposes what prometheus_client's own would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cortex.neuron.api.metrics import TokenTimes

BOUNDS = (0.001, 0.01, 0.5, 5)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0.0, 0.001, 0.002, 0.01, 0.3, 0.5, 4.0, 9.0]))))
def test_exposes_the_same_series_as_the_library(values: list[tuple[str, float]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    expected = Histogram("seconds", "Between.", ["model"], buckets=BOUNDS, registry=theirs)
    times = TokenTimes("seconds", "Between.", BOUNDS, ours)
    for model, seconds in values:
        expected.labels(model).observe(seconds)
        times.of(model)(seconds)

    def series(registry: CollectorRegistry) -> list[bytes]:
        return sorted(line for line in generate_latest(registry).splitlines() if b"_created" not in line)

    assert series(ours) == series(theirs)
