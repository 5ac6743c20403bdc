from __future__ import annotations

from collections.abc import Iterator

from cortex.fleet.topology import Fleet, Node, Residency
from cortex.gateway.metrics import GAUGES, GaugeSample, Metrics, fleet_gauges
from cortex.wire.events import Usage
from cortex.wire.node.protocol import HostHealth, HostKV, ModelState, ModelStatus

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


def test_kept_kv_is_counted_of_models_in_any_state_where_there_is_any() -> None:
    kept = {ModelState.COLD: HostKV(num_bytes=5), ModelState.ASLEEP: HostKV(num_bytes=7), ModelState.READY: None}
    statuses = [ModelStatus(id=state.value, state=state, kv_host=held) for state, held in kept.items()]
    node = Node(
        name="beast", healthy=True, residencies={each.id: Residency(status=each, seen_at=0.0) for each in statuses}
    )
    found = [sample for sample in fleet_gauges(Fleet(nodes=(node,)), {}, {}) if "kv_host" in sample.name]
    assert [(sample.labels["model"], sample.value) for sample in found] == [("cold", 5), ("asleep", 7)]


def test_host_memory_is_counted_by_kind_and_weights_of_a_loaded_model_are_not_asleep() -> None:
    statuses = [
        ModelStatus(id="split", state=ModelState.READY, host_bytes=40),
        ModelStatus(id="idle", state=ModelState.ASLEEP, host_bytes=20),
    ]
    node = Node(
        name="beast",
        healthy=True,
        host=HostHealth(
            total_bytes=200, free_bytes=90, budget_bytes=150, weight_bytes=40, sleeping_bytes=20, locked_bytes=60
        ),
        residencies={each.id: Residency(status=each, seen_at=0.0) for each in statuses},
    )
    found = list(fleet_gauges(Fleet(nodes=(node,)), {}, {}))
    kinds = {each.labels["kind"]: each.value for each in found if each.name == "cortex_host_memory_bytes"}
    assert kinds == {"weights": 40, "sleeping": 20, "kv": 0, "locked": 60}
    sizes = {(each.name, each.labels["model"]): each.value for each in found if "model" in each.labels}
    assert sizes["cortex_model_host_bytes", "split"] == 40
    assert sizes["cortex_model_sleeping_bytes", "split"] == 0
    assert sizes["cortex_model_sleeping_bytes", "idle"] == 20


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
