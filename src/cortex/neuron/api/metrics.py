"""The node's metrics in Prometheus' text format: `neuron_*`, and those of model servers that OpenTelemetry names."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from cortex.neuron.node.node import Node
from cortex.telemetry.spans import MODEL, OPERATION, PROVIDER, PROVIDER_NAME, operation_name
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import CortexError
from cortex.wire.events import AnyEvent, Finish, Usage
from cortex.wire.node.protocol import DeviceHealth, HostHealth, ModelState, ModelStatus

Observe = Callable[[float], None]


class TokenTimes(Collector):
    """Seconds between the outputs of responses, by model. Filled on the loop, where scrapes are made too."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = tuple(bounds)
        self._counts: dict[str, list[int]] = {}
        """By model: the number of values in each bucket, the last of which is above all bounds."""
        self._sums: dict[str, list[float]] = {}
        registry.register(self)

    def of(self, model: str) -> Observe:
        """The counter for the times of a model's outputs."""
        bounds = self._bounds
        counts = self._counts.setdefault(model, [0] * (len(bounds) + 1))
        total = self._sums.setdefault(model, [0.0])

        def observe(seconds: float) -> None:
            counts[bisect_left(bounds, seconds)] += 1
            total[0] += seconds

        return observe

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model"])
        for model, counts in self._counts.items():
            buckets, below = [], 0
            for bound, count in zip((*self._bounds, inf), counts, strict=True):
                below += count
                buckets.append((repr(float(bound)) if bound != inf else "+Inf", float(below)))
            family.add_metric([model], buckets, self._sums[model][0])
        yield family

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=["model"])


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 5)
_STATES = tuple(state for state in ModelState if state not in (ModelState.UNREACHABLE, ModelState.SUSPENDED))
UNKNOWN_MODEL = "unknown"
"""Label of requests for unknown models, so that clients cannot create time series."""


class Metrics:
    """Owns its registry. Requests update the counters; gauges are read at each scrape."""

    def __init__(self, backend: Node) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        counter, histogram = self._counter, self._histogram
        named = [name.replace(".", "_") for name in (PROVIDER, MODEL, OPERATION)]
        self.requests = counter("requests", "Requests that ended, by outcome.", "model", "dialect", "outcome")
        self.errors = counter("request_errors", "Requests that ended in an error, by its code.", "model", "code")
        self.disconnects = counter("client_disconnects", "Disconnected clients, by phase.", "model", "phase")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.", "model")
        self.cached_tokens = counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.", "model")
        self.completion_tokens = counter("completion_tokens", "Tokens generated.", "model")
        self.reasoning_tokens = counter("reasoning_tokens", "Generated tokens that were reasoning.", "model")
        self.first_token = histogram(
            "time_to_first_token", "From arrival to the first token, queue and load included.", _SECONDS, *named
        )
        self.token_time = histogram(
            "time_per_output_token", "For each token of a response after the first.", _TOKEN_SECONDS, *named
        )
        self.inter_token = TokenTimes(
            "neuron_inter_token_seconds", "Between two outputs of a response.", _TOKEN_SECONDS, self._registry
        )
        self.duration = histogram("request_duration", "From arrival to the end.", _SECONDS, *named, "error_type")
        self._registry.register(_NodeState(backend))

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"neuron_{name}", documentation, labels, registry=self._registry)

    def _histogram(self, name: str, documentation: str, buckets: Iterable[float], *labels: str) -> Histogram:
        name = f"gen_ai_server_{name}_seconds"
        return Histogram(name, documentation, labels, buckets=tuple(buckets), registry=self._registry)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    @contextmanager
    def watch(self, kind: str) -> Iterator[RequestWatch]:
        """Counts one request, however it ends. `kind`: its dialect, or what it needs where that is no text."""
        codec = DIALECTS.get(kind)
        watch = RequestWatch(self, operation_name(kind) if codec is None else codec.operation)
        outcome = "ok"
        try:
            yield watch
        except CortexError as error:
            watch.failed(error)
            raise
        except asyncio.CancelledError:
            outcome = "disconnected"
            self.disconnects.labels(watch.model, watch.phase()).inc()
            if not watch.finishes:
                watch.count(watch.usage())
            raise
        except Exception:
            outcome = "error"
            self.errors.labels(watch.model, CortexError.code).inc()
            raise
        finally:
            outcome = "error" if watch.error_code else outcome
            self.requests.labels(watch.model, kind, outcome).inc()
            error_type = watch.error_code or ("" if outcome == "ok" else outcome)
            self.duration.labels(PROVIDER_NAME, watch.model, watch.operation, error_type).observe(
                time.monotonic() - watch.began_s
            )


class RequestWatch:
    """One request's counters and timers. Owned by the request's task."""

    def __init__(self, metrics: Metrics, operation: str) -> None:
        self.operation = operation
        self.began_s = time.monotonic()
        self.model = UNKNOWN_MODEL
        self.phase: Callable[[], str] = lambda: "read"
        self.usage: Callable[[], Usage] = Usage
        """Usage so far, for a request that has not finished."""
        self.error_code: str | None = None
        """The error that ended it, if any."""
        self.finishes: list[Finish] = []
        """The finish reasons of completed choices."""
        self._metrics = metrics
        self._last_s = self.began_s
        self._inter_token: Observe | None = None
        """Set at the first token, so that the label is looked up once and not for every token."""

    def observe(self, events: Iterable[AnyEvent]) -> None:
        """Observes a batch of the response's events."""
        now_s = time.monotonic()
        passed_s, self._last_s = now_s - self._last_s, now_s
        if self._inter_token is None:
            self._metrics.first_token.labels(PROVIDER_NAME, self.model, self.operation).observe(passed_s)
            self._inter_token = self._metrics.inter_token.of(self.model)
        else:
            self._inter_token(passed_s)
        for event in events:
            if isinstance(event, Finish):
                self.finishes.append(event)
                self.count(event.usage)
                if (later_tokens := event.usage.completion_tokens - 1) > 0:
                    token_s = event.timing.decode_s / later_tokens
                    self._metrics.token_time.labels(PROVIDER_NAME, self.model, self.operation).observe(token_s)

    def count(self, usage: Usage) -> None:
        """Counts used tokens."""
        self._metrics.prompt_tokens.labels(self.model).inc(usage.prompt_tokens)
        self._metrics.cached_tokens.labels(self.model).inc(usage.cached_tokens)
        self._metrics.completion_tokens.labels(self.model).inc(usage.completion_tokens)
        self._metrics.reasoning_tokens.labels(self.model).inc(usage.reasoning_tokens)

    def failed(self, error: CortexError) -> None:
        """The request ended in `error`, before or after its first byte."""
        self.error_code = error.code
        self._metrics.errors.labels(self.model, error.code).inc()


class _NodeState(Collector):
    """The state of the node and the engines' counters at the time of the scrape."""

    def __init__(self, backend: Node) -> None:
        self._backend = backend

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        health = self._backend.health()
        uptime = GaugeMetricFamily("neuron_uptime_seconds", "Since the node started.", value=health.uptime_s)
        restarts = CounterMetricFamily(
            "neuron_task_restarts", "Background tasks that failed and were started again.", labels=["task"]
        )
        for task, count in self._backend.task_restarts().items():
            restarts.add_metric([task], count)
        tokenised = _counter(
            "tokenised_characters",
            "Characters of prompts that were tokenised; the tokens of earlier turns are known.",
            self._backend.texts.tokenised_characters(),
        )
        return [
            uptime,
            restarts,
            tokenised,
            *_of_models(health.models),
            *_of_devices(health.devices),
            *_of_host(health.host),
            *self._of_engines(),
        ]

    def _of_engines(self) -> Iterator[Metric]:
        stats = self._backend.engine_stats()
        yield _counter("engine_steps", "Steps of the engine.", {m: s.steps for m, s in stats.items()})
        yield _counter(
            "preemptions", "Sequences put back into the queue.", {m: s.preemptions for m, s in stats.items()}
        )
        fetched = {m: s.fetched_tokens for m, s in stats.items()}
        yield _counter("fetched_prompt_tokens", "Prompt tokens whose KV pages came from host memory.", fetched)
        drafted = {m: s.drafted_tokens for m, s in stats.items()}
        yield _by_kind("drafted_tokens", "Draft tokens that steps checked.", drafted)
        accepted = {m: s.accepted_tokens for m, s in stats.items()}
        yield _by_kind("accepted_draft_tokens", "Draft tokens that were drawn.", accepted)
        yield _gauge("kv_pages", "Pages of the KV cache.", "model", {m: s.num_pages for m, s in stats.items()})
        yield _gauge(
            "kv_used_pages", "Pages that running sequences hold.", "model", {m: s.used_pages for m, s in stats.items()}
        )
        yield _gauge(
            "kv_cached_pages",
            "Pages that hold a reusable prefix.",
            "model",
            {m: s.cached_pages for m, s in stats.items()},
        )
        failed = {m: s.failed_kernel_passes for m, s in stats.items()}
        yield _counter("failed_kernel_passes", "Loads whose kernels could not be compiled ahead.", failed)
        yield _gauge("graphs", "Sizes of steps that are captured.", "model", {m: s.graphs for m, s in stats.items()})
        graph_bytes = {m: s.graph_bytes for m, s in stats.items()}
        yield _gauge("graph_bytes", "Device memory that captured steps take.", "model", graph_bytes)
        yield _counter("graph_capture_seconds", "Time of the captures.", {m: s.graph_s for m, s in stats.items()})


def _of_models(models: Iterable[ModelStatus]) -> Iterator[Metric]:
    loads = {model.id: model.load for model in models}
    yield _gauge("queue_depth", "Requests that wait.", "model", {m: load.waiting for m, load in loads.items()})
    yield _gauge("running_requests", "Requests that run.", "model", {m: load.running for m, load in loads.items()})
    used = {m: load.kv_used_fraction for m, load in loads.items()}
    yield _gauge("kv_used_ratio", "Share of the cache pages in use.", "model", used)
    speeds = {m: load.tokens_per_s for m, load in loads.items()}
    yield _gauge("tokens_per_second", "Completion tokens after the first, over the last few seconds.", "model", speeds)
    sizes = {model.id: model.measured_bytes for model in models if model.state is not ModelState.ASLEEP}
    yield _gauge("model_bytes", "Device memory that a loaded model takes.", "model", sizes)
    replicas = {model.id: model.replicas for model in models if sizes.get(model.id) is not None}
    yield _gauge("model_replicas", "Copies of a model in memory, extra replicas included.", "model", replicas)
    in_host = {model.id: model.host_bytes for model in models if model.host_bytes}
    loaded = {model.id for model in models if model.state is ModelState.READY}
    sleeping = {model_id: num_bytes for model_id, num_bytes in in_host.items() if model_id not in loaded}
    yield _gauge("model_sleeping_bytes", "Host memory that a sleeping model's weights take.", "model", sleeping)
    split = {model_id: num_bytes for model_id, num_bytes in in_host.items() if model_id in loaded}
    yield _gauge("model_host_bytes", "Host memory of weights of a loaded model.", "model", split)
    states = GaugeMetricFamily("neuron_model_state", "1 for the state a model is in.", labels=["model", "state"])
    for model in models:
        for state in _STATES:
            states.add_metric([model.id, state.value], float(model.state is state))
    yield states


def _of_devices(devices: Iterable[DeviceHealth]) -> Iterator[Metric]:
    by_index = {str(device.index): device for device in devices}
    total = {index: device.total_bytes for index, device in by_index.items()}
    yield _gauge("device_memory_total_bytes", "Memory of the device.", "device", total)
    free = {index: device.free_bytes for index, device in by_index.items()}
    yield _gauge("device_memory_free_bytes", "Free memory; that of extra replicas counts as free.", "device", free)
    kv = {index: device.kv_host_bytes for index, device in by_index.items()}
    yield _gauge("device_kv_host_bytes", "Host memory of KV pages that are not on the device.", "device", kv)
    utilisation = {index: device.utilisation for index, device in by_index.items()}
    yield _gauge("device_utilisation_ratio", "How busy the device is, 0 to 1.", "device", utilisation)
    yield _fallbacks(by_index.values())
    temperature = {index: device.temperature_c for index, device in by_index.items()}
    yield _gauge("device_temperature_celsius", "Temperature of the device.", "device", temperature)
    watts = {index: device.watts for index, device in by_index.items()}
    yield _gauge("device_watts", "Power draw of the device, where it can be read.", "device", watts)


def _of_host(host: HostHealth | None) -> Iterator[Metric]:
    if host is None:
        return
    parts = {"weights": host.weight_bytes, "sleeping": host.sleeping_bytes, "kv": host.kv_bytes}
    parts |= {"locked": host.locked_bytes, "budget": host.budget_bytes}
    yield _gauge("host_memory_bytes", "Host memory that models take, and that they may take.", "kind", parts)


def _fallbacks(devices: Iterable[DeviceHealth]) -> Metric:
    what = "1 for each feature that the installed libraries lack and the node runs without."
    family = GaugeMetricFamily("neuron_fallbacks", what, labels=["device", "name"])
    for device in devices:
        for fallback in device.fallbacks:
            family.add_metric([str(device.index), fallback.name], 1)
    return family


def _gauge(name: str, documentation: str, label: str, values: Mapping[str, float | None]) -> Metric:
    family = GaugeMetricFamily(f"neuron_{name}", documentation, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family


def _by_kind(name: str, documentation: str, values: Mapping[str, Mapping[str, float]]) -> Metric:
    family = CounterMetricFamily(f"neuron_{name}", documentation, labels=["model", "kind"])
    for model, by_kind in values.items():
        for kind, value in by_kind.items():
            family.add_metric([model, kind], value)
    return family


def _counter(name: str, documentation: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"neuron_{name}", documentation, labels=["model"])
    for model, value in values.items():
        family.add_metric([model], value)
    return family
