from collections.abc import Iterator

from cortex.gateway.metrics import GAUGES, GaugeSample, Metrics
from cortex.wire.events import Usage

LISTED = [
    "cortex_requests_total",
    "cortex_request_errors_total",
    "cortex_cold_starts_total",
    "cortex_evictions_total",
    "cortex_request_duration_seconds_bucket",
    "cortex_time_to_first_token_seconds_bucket",
    "cortex_tokens_per_second_bucket",
    "cortex_prompt_tokens_total",
    "cortex_cached_prompt_tokens_total",
    "cortex_completion_tokens_total",
    "cortex_cost_total",
    "cortex_queue_depth",
    "cortex_overhead_seconds_bucket",
    "cortex_node_up",
]


def sample_gauges() -> Iterator[GaugeSample]:
    for name, (_, labels) in GAUGES.items():
        yield GaugeSample(name, 1.0, **dict.fromkeys(labels, "x"))


def test_exposition_contains_every_documented_metric() -> None:
    metrics = Metrics(sample_gauges)
    traffic = metrics.traffic("m", "n")
    traffic.num_requests += 1
    traffic.duration.observe(1.0)
    traffic.first_token.observe(0.1)
    traffic.speed.observe(50.0)
    metrics.overhead.observe(0.0001)
    metrics.errors.labels("m", "n", "overloaded").inc()
    metrics.cold_starts.labels("m", "n").inc()
    metrics.evictions.labels("m", "n").inc()
    metrics.spend("m", "alice").add(Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=3))
    text = metrics.exposition().decode()
    for name in LISTED:
        assert f"\n{name}{{" in text, name


def test_durations_are_real_histograms() -> None:
    metrics = Metrics(list)
    metrics.traffic("m", "n").duration.observe(0.3)
    text = metrics.exposition().decode()
    assert "# TYPE cortex_request_duration_seconds histogram" in text
    assert 'cortex_request_duration_seconds_bucket{le="0.25",model="m",node="n"} 0.0' in text
    assert 'cortex_request_duration_seconds_bucket{le="0.5",model="m",node="n"} 1.0' in text
    assert 'cortex_request_duration_seconds_bucket{le="+Inf",model="m",node="n"} 1.0' in text
    assert 'cortex_request_duration_seconds_count{model="m",node="n"} 1.0' in text


def test_spend_is_labelled_by_key() -> None:
    metrics = Metrics(list)
    metrics.spend("m", "alice").add(Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=3))
    text = metrics.exposition().decode()
    assert 'cortex_prompt_tokens_total{key="alice",model="m"} 7.0' in text
    assert 'cortex_cached_prompt_tokens_total{key="alice",model="m"} 4.0' in text
    assert 'cortex_completion_tokens_total{key="alice",model="m"} 3.0' in text


def test_bounds_belong_to_their_bucket_and_sums_add_up() -> None:
    metrics = Metrics(list)
    for value in (0.01, 0.25, 0.26, 5000.0):
        metrics.traffic("m", "n").duration.observe(value)
    text = metrics.exposition().decode()
    assert 'cortex_request_duration_seconds_bucket{le="0.01",model="m",node="n"} 1.0' in text
    assert 'cortex_request_duration_seconds_bucket{le="0.25",model="m",node="n"} 2.0' in text
    assert 'cortex_request_duration_seconds_bucket{le="1800.0",model="m",node="n"} 3.0' in text
    assert 'cortex_request_duration_seconds_bucket{le="+Inf",model="m",node="n"} 4.0' in text
    assert 'cortex_request_duration_seconds_sum{model="m",node="n"} 5000.52' in text


def test_traffic_is_kept_per_model_on_node() -> None:
    metrics = Metrics(list)
    assert metrics.traffic("m", "n") is metrics.traffic("m", "n")
    assert metrics.traffic("m", "n") is not metrics.traffic("m", "o")
