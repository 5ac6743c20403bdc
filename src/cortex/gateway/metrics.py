"""What the gateway counts. Names are fixed; a dashboard depends on them.

Counters and histograms are bumped as requests end, through label children that are looked up once per
(model, node). Gauges of nodes, devices and models are read from the fleet when somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cortex.wire.events import Usage

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1)
SPEED_BUCKETS = (1, 2, 5, 10, 20, 40, 80, 120, 160, 240, 320, 480, 640, 1000)
LOAD_BUCKETS = (0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


class GaugeSample:
    """One gauge value to expose: `name{labels} value`."""

    __slots__ = ("labels", "name", "value")

    def __init__(self, name: str, value: float, **labels: str) -> None:
        self.name = name
        self.value = value
        self.labels = labels


GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "cortex_queue_depth": ("Requests waiting for the model to be ready.", ("model",)),
    "cortex_node_up": ("1 while the node answers its polls.", ("node",)),
    "cortex_device_memory_total_bytes": ("Memory of the device.", ("node", "device")),
    "cortex_device_memory_free_bytes": ("Free memory as the device reports it.", ("node", "device")),
    "cortex_device_utilisation_ratio": ("How busy the device is, 0 to 1.", ("node", "device")),
    "cortex_device_temperature_celsius": ("Temperature of the device.", ("node", "device")),
    "cortex_model_loaded": ("1 where the model can answer at once, else 0.", ("model", "node")),
    "cortex_model_memory_bytes": ("Device memory the model takes, as measured.", ("model", "node")),
    "cortex_model_running_requests": ("Requests the model works on.", ("model", "node")),
    "cortex_model_waiting_requests": ("Requests queued in the model's engine.", ("model", "node")),
    "cortex_model_kv_used_ratio": ("Share of the model's KV pages in use, 0 to 1.", ("model", "node")),
    "cortex_in_flight_requests": ("Requests this gateway has open at the node.", ("model", "node")),
}


class _Gauges(Collector):
    """Asks `read` for the current samples at every scrape."""

    def __init__(self, read: Callable[[], Iterable[GaugeSample]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        return [GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in GAUGES.items()]

    def collect(self) -> Iterator[Metric]:
        families = {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in GAUGES.items()}
        for sample in self._read():
            names = GAUGES[sample.name][1]
            families[sample.name].add_metric([sample.labels[name] for name in names], sample.value)
        yield from families.values()


class PairMetrics:
    """The children of one (model, node) pair, so that a request pays no label lookup."""

    __slots__ = ("duration", "first_token", "overhead", "requests", "speed")

    def __init__(self, metrics: Metrics, model: str, node: str) -> None:
        self.requests = metrics.requests.labels(model, node)
        self.duration = metrics.duration.labels(model, node)
        self.first_token = metrics.first_token.labels(model, node)
        self.speed = metrics.speed.labels(model, node)
        self.overhead = metrics.overhead


class SpendMetrics:
    """The token counters of one (model, key) pair."""

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self, metrics: Metrics, model: str, key: str) -> None:
        self.prompt = metrics.prompt_tokens.labels(model, key)
        self.cached = metrics.cached_tokens.labels(model, key)
        self.completion = metrics.completion_tokens.labels(model, key)

    def add(self, usage: Usage) -> None:
        self.prompt.inc(usage.prompt_tokens)
        self.cached.inc(usage.cached_tokens)
        self.completion.inc(usage.completion_tokens)


class Metrics:
    """Everything one gateway process counts, in a registry of its own."""

    def __init__(self, read_gauges: Callable[[], Iterable[GaugeSample]]) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        pair = ("model", "node")
        spend = ("model", "key")
        self.requests = Counter("cortex_requests", "Requests that reached a node.", pair, registry=registry)
        self.errors = Counter(
            "cortex_request_errors", "Requests that ended in an error.", ("model", "code"), registry=registry
        )
        self.cold_starts = Counter("cortex_cold_starts", "Loads begun for a request.", pair, registry=registry)
        self.evictions = Counter("cortex_evictions", "Models unloaded to make room.", pair, registry=registry)
        self.load_seconds = Histogram(
            "cortex_load_duration_seconds", "Time a load took.", pair, buckets=LOAD_BUCKETS, registry=registry
        )
        self.duration = Histogram(
            "cortex_request_duration_seconds",
            "From the request's first byte to the answer's last.",
            pair,
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.first_token = Histogram(
            "cortex_time_to_first_token_seconds",
            "From the request to the first byte of the answer's body.",
            pair,
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.speed = Histogram(
            "cortex_tokens_per_second",
            "Completion tokens over the time after the first.",
            pair,
            buckets=SPEED_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter("cortex_prompt_tokens", "Prompt tokens.", spend, registry=registry)
        self.cached_tokens = Counter(
            "cortex_cached_prompt_tokens", "Prompt tokens served from a prefix cache.", spend, registry=registry
        )
        self.completion_tokens = Counter("cortex_completion_tokens", "Generated tokens.", spend, registry=registry)
        self.overhead = Histogram(
            "cortex_overhead_seconds",
            "Time the gateway itself took before it passed a request on.",
            buckets=OVERHEAD_BUCKETS,
            registry=registry,
        )
        self.retries = Counter(
            "cortex_retries",
            "Requests sent again because a node failed before its first byte.",
            pair,
            registry=registry,
        )
        self.disconnects = Counter(
            "cortex_client_disconnects", "Clients that left before their answer ended.", ("phase",), registry=registry
        )
        self.stripped = Counter(
            "cortex_billing_headers_stripped", "Requests whose billing header block was removed.", registry=registry
        )
        registry.register(_Gauges(read_gauges))
        self.pair = cache(lambda model, node: PairMetrics(self, model, node))
        self.spend = cache(lambda model, key: SpendMetrics(self, model, key))

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return prometheus_client.generate_latest(self.registry)
