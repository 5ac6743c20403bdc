"""The metrics of several processes, added up."""

from prometheus_client.parser import text_string_to_metric_families

from cortex.gateway.metrics import GaugeSample, Metrics
from cortex.gateway.workers.merged_metrics import merged
from cortex.wire.events import Usage


def counted(num_requests: int, *gauges: GaugeSample) -> bytes:
    metrics = Metrics(lambda: gauges)
    for _ in range(num_requests):
        traffic = metrics.traffic("a b", "n")
        traffic.num_requests += 1
        traffic.duration.observe(0.25)
        metrics.spend("a b", 'a "key"').add(Usage(prompt_tokens=5))
        metrics.errors.labels("a b", "n", "overloaded").inc()
    return metrics.exposition()


def values(exposition: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    }


def test_adds_up_counters_and_histograms_and_keeps_gauges():
    gauge = GaugeSample("cortex_node_up", 1.0, node="n")
    whole = values(merged([counted(3, gauge), counted(4), counted(0)]))
    assert whole == values(counted(7, gauge))


def test_each_metric_has_help_and_type_once():
    text = merged([counted(1), counted(2)]).decode()
    headers = [line for line in text.splitlines() if line.startswith("#")]
    assert len(headers) == len(set(headers))


def test_keeps_series_that_only_one_process_has():
    assert values(merged([counted(0), counted(2)])) == values(counted(2))
    assert merged([b"", counted(2)]) == merged([counted(2)])
