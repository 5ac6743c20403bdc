"""What the node counts: `neuron_*` in Prometheus' text format, with real histograms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cortex.neuron.api.backend import Backend
from cortex.wire.errors import CortexError
from cortex.wire.events import AnyEvent, Finish
from cortex.wire.node import ModelState

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 5)
UNKNOWN_MODEL = "unknown"
"""Label for requests that named no model of this node, so that clients cannot make up time series."""


class Metrics:
    """Owns its registry. Counters are updated by the request that is counted, gauges are read when scraped."""

    def __init__(self, backend: Backend) -> None:
        self._registry = CollectorRegistry()
        counter, histogram = self._counter, self._histogram
        self.requests = counter("requests", "Requests that ended, by outcome.", "model", "dialect", "outcome")
        self.errors = counter("request_errors", "Requests that ended in an error, by its code.", "model", "code")
        self.abandoned = counter("requests_abandoned", "Requests whose client left, by phase.", "model", "phase")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished answers.", "model")
        self.cached_tokens = counter("cached_prompt_tokens", "Prompt tokens that the cache held.", "model")
        self.completion_tokens = counter("completion_tokens", "Tokens that were produced.", "model")
        self.reasoning_tokens = counter("reasoning_tokens", "Produced tokens that were thought.", "model")
        self.first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token, queue and load included.", _SECONDS
        )
        self.inter_token = histogram("inter_token_seconds", "Between pieces of a running answer.", _TOKEN_SECONDS)
        self.duration = histogram("request_duration_seconds", "From arrival to the end.", _SECONDS)
        self._registry.register(_NodeGauges(backend))

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"neuron_{name}", documentation, labels, registry=self._registry)

    def _histogram(self, name: str, documentation: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"neuron_{name}", documentation, ["model"], buckets=tuple(buckets), registry=self._registry)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    @contextmanager
    def watch(self, dialect: str) -> Iterator[Watch]:
        """Counts one request, whatever its end."""
        watch = Watch(self)
        outcome = "ok"
        try:
            yield watch
        except CortexError as error:
            watch.failed(error)
            raise
        except (asyncio.CancelledError, ConnectionError):
            outcome = "abandoned"
            self.abandoned.labels(watch.model, watch.phase()).inc()
            raise
        except Exception:
            outcome = "error"
            self.errors.labels(watch.model, CortexError.code).inc()
            raise
        finally:
            outcome = "error" if watch.has_failed else outcome
            self.requests.labels(watch.model, dialect, outcome).inc()
            self.duration.labels(watch.model).observe(time.monotonic() - watch.began_s)


class Watch:
    """One request as it is counted. Owned by the request's task."""

    def __init__(self, metrics: Metrics) -> None:
        self.began_s = time.monotonic()
        self.model = UNKNOWN_MODEL
        self.phase: Callable[[], str] = lambda: "read"
        self.has_failed = False
        self._metrics = metrics
        self._last_s: float | None = None

    def saw(self, events: Iterable[AnyEvent]) -> None:
        """A batch of the answer's events came."""
        now_s = time.monotonic()
        if self._last_s is None:
            self._metrics.first_token.labels(self.model).observe(now_s - self.began_s)
        else:
            self._metrics.inter_token.labels(self.model).observe(now_s - self._last_s)
        self._last_s = now_s
        for event in events:
            if isinstance(event, Finish):
                self._count(event)

    def _count(self, finish: Finish) -> None:
        usage = finish.usage
        self._metrics.prompt_tokens.labels(self.model).inc(usage.prompt_tokens)
        self._metrics.cached_tokens.labels(self.model).inc(usage.cached_tokens)
        self._metrics.completion_tokens.labels(self.model).inc(usage.completion_tokens)
        self._metrics.reasoning_tokens.labels(self.model).inc(usage.reasoning_tokens)

    def failed(self, error: CortexError) -> None:
        """The request ended in `error`, before or after its first byte."""
        self.has_failed = True
        self._metrics.errors.labels(self.model, error.code).inc()


class _NodeGauges(Collector):
    """The node's state at the moment of the scrape."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        health = self._backend.health()
        yield _gauge("uptime_seconds", "Since the node began.", [], [((), health.uptime_s)])
        models = health.models
        yield _gauge("queue_depth", "Requests that wait.", ["model"], [((m.id,), m.load.waiting) for m in models])
        yield _gauge("running_requests", "Requests at work.", ["model"], [((m.id,), m.load.running) for m in models])
        yield _gauge(
            "kv_used_fraction",
            "Share of the cache pages in use.",
            ["model"],
            [((m.id,), m.load.kv_used_fraction) for m in models],
        )
        yield _gauge(
            "tokens_per_second",
            "Completion tokens over the last few seconds.",
            ["model"],
            [((m.id,), m.load.tokens_per_s) for m in models],
        )
        yield _gauge(
            "model_bytes",
            "Device memory that a loaded model takes.",
            ["model"],
            [((m.id,), m.measured_bytes) for m in models if m.measured_bytes is not None],
        )
        yield _gauge(
            "model_state",
            "1 for the state a model is in.",
            ["model", "state"],
            [((m.id, state.value), float(m.state is state)) for m in models for state in ModelState],
        )
        devices = health.devices
        yield _gauge(
            "device_memory_total_bytes",
            "Memory of the device.",
            ["device"],
            [((str(d.index),), d.total_bytes) for d in devices],
        )
        yield _gauge(
            "device_memory_free_bytes",
            "Free memory as the device reports it.",
            ["device"],
            [((str(d.index),), d.free_bytes) for d in devices],
        )
        yield _gauge(
            "device_utilisation",
            "0 to 1.",
            ["device"],
            [((str(d.index),), d.utilisation) for d in devices if d.utilisation is not None],
        )
        yield _gauge(
            "device_temperature_celsius",
            "Temperature of the device.",
            ["device"],
            [((str(d.index),), d.temperature_c) for d in devices if d.temperature_c is not None],
        )


def _gauge(
    name: str, documentation: str, labels: list[str], samples: list[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"neuron_{name}", documentation, labels=labels)
    for values, value in samples:
        family.add_metric(list(values), value)
    return family
