"""The gateway's metrics. Their names are fixed, because dashboards depend on them.

Values that every request updates are kept as plain Python numbers, per model on a node and per model and key. They
become counters and histograms only at a scrape. The gauges of nodes, devices and models are read from the fleet then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cortex.fleet.devices import DeviceState
from cortex.fleet.topology import RESERVES, Fleet, ModelOnNode, Node, Residency
from cortex.wire.events import Usage
from cortex.wire.node.protocol import HostHealth, ModelState

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
    "cortex_node_up": ("1 while the node responds to polls.", ("node",)),
    "cortex_device_memory_total_bytes": ("Memory of the device.", ("node", "device")),
    "cortex_device_memory_free_bytes": ("Free memory as the device reports it.", ("node", "device")),
    "cortex_device_kv_host_bytes": ("Host memory of KV pages that are not on the device.", ("node", "device")),
    "cortex_device_utilisation_ratio": ("How busy the device is, 0 to 1.", ("node", "device")),
    "cortex_device_temperature_celsius": ("Temperature of the device.", ("node", "device")),
    "cortex_device_watts": ("Power draw of the device, where the node can read it.", ("node", "device")),
    "cortex_node_watts": (
        "Power draw of the devices and processor packages that the node can read.",
        ("node",),
    ),
    "cortex_node_asleep": ("1 while the node is suspended.", ("node",)),
    "cortex_model_loaded": ("1 where the model is ready, else 0.", ("model", "node")),
    "cortex_model_memory_bytes": ("Device memory of the model, as measured.", ("model", "node")),
    "cortex_host_memory_budget_bytes": ("Host memory that models of the node may take.", ("node",)),
    "cortex_host_memory_bytes": (
        "Host memory that models take, by `kind`: `weights` of loaded models, `sleeping`, `kv`; `locked` is their "
        "page-locked part.",
        ("node", "kind"),
    ),
    "cortex_model_sleeping_bytes": ("Host memory of the model's weights while it is asleep.", ("model", "node")),
    "cortex_model_host_bytes": ("Host memory of weights of the loaded model.", ("model", "node")),
    "cortex_model_kv_host_bytes": (
        "Host memory of the model's KV pages that its node keeps, whether it is loaded or not.",
        ("model", "node"),
    ),
    "cortex_model_running_requests": ("Requests that the model works on.", ("model", "node")),
    "cortex_model_waiting_requests": ("Requests queued in the model's engine.", ("model", "node")),
    "cortex_model_kv_used_ratio": ("Share of the model's KV pages in use, 0 to 1.", ("model", "node")),
    "cortex_budget_limit": (
        "Limit of a key or group: tokens, or cost in the currency of the prices.",
        ("kind", "owner", "unit", "period"),
    ),
    "cortex_budget_left": ("What is left of `cortex_budget_limit`.", ("kind", "owner", "unit", "period")),
    "cortex_in_flight_requests": ("Requests that this gateway has open at the node.", ("model", "node")),
}


def fleet_gauges(
    fleet: Fleet, queue_depths: Mapping[str, int], in_flight: Mapping[ModelOnNode, int]
) -> Iterator[GaugeSample]:
    """The gauges of every node, device and model that is not cold, and of what nodes keep for cold ones."""
    models = {held.model_id for node in fleet.nodes for held in _not_cold(node)}
    for model, depth in (dict.fromkeys(models, 0) | dict(queue_depths)).items():
        yield GaugeSample("cortex_queue_depth", depth, model=model)
    for target, count in in_flight.items():
        yield GaugeSample("cortex_in_flight_requests", count, model=target.model, node=target.node)
    for node in fleet.nodes:
        yield GaugeSample("cortex_node_up", float(node.healthy), node=node.name)
        yield GaugeSample("cortex_node_asleep", float(node.sleep in RESERVES), node=node.name)
        if node.healthy and node.watts is not None:
            yield GaugeSample("cortex_node_watts", node.watts, node=node.name)
        if node.healthy:
            for device in node.devices:
                yield from _device_gauges(node.name, device)
            if node.host is not None:
                yield from _host_gauges(node.name, node.host)
            for held in _not_cold(node):
                yield from _model_gauges(node.name, held)
            for held in node.residencies.values():
                if (kept := held.status.kv_host) is not None:
                    labels = {"model": held.model_id, "node": node.name}
                    yield GaugeSample("cortex_model_kv_host_bytes", kept.num_bytes, **labels)


def _not_cold(node: Node) -> Iterator[Residency]:
    return (held for held in node.residencies.values() if held.state is not ModelState.COLD)


def _device_gauges(node: str, device: DeviceState) -> Iterator[GaugeSample]:
    labels = {"node": node, "device": str(device.index)}
    yield GaugeSample("cortex_device_memory_total_bytes", device.total_bytes, **labels)
    yield GaugeSample("cortex_device_memory_free_bytes", device.free_bytes, **labels)
    yield GaugeSample("cortex_device_kv_host_bytes", device.kv_host_bytes, **labels)
    if device.utilisation is not None:
        yield GaugeSample("cortex_device_utilisation_ratio", device.utilisation, **labels)
    if device.temperature_c is not None:
        yield GaugeSample("cortex_device_temperature_celsius", device.temperature_c, **labels)
    if device.watts is not None:
        yield GaugeSample("cortex_device_watts", device.watts, **labels)


def _host_gauges(node: str, host: HostHealth) -> Iterator[GaugeSample]:
    yield GaugeSample("cortex_host_memory_budget_bytes", host.budget_bytes, node=node)
    parts = {"weights": host.weight_bytes, "sleeping": host.sleeping_bytes, "kv": host.kv_bytes}
    for kind, num_bytes in (parts | {"locked": host.locked_bytes}).items():
        yield GaugeSample("cortex_host_memory_bytes", num_bytes, node=node, kind=kind)


def _model_gauges(node: str, held: Residency) -> Iterator[GaugeSample]:
    labels = {"model": held.model_id, "node": node}
    load = held.status.load
    on_device = 0 if held.state is ModelState.ASLEEP else held.status.measured_bytes or 0
    yield GaugeSample("cortex_model_loaded", float(held.state is ModelState.READY), **labels)
    yield GaugeSample("cortex_model_memory_bytes", on_device, **labels)
    is_loaded = held.state in (ModelState.READY, ModelState.LOADING, ModelState.RECOVERING)
    yield GaugeSample("cortex_model_sleeping_bytes", 0 if is_loaded else held.status.host_bytes, **labels)
    yield GaugeSample("cortex_model_host_bytes", held.status.host_bytes if is_loaded else 0, **labels)
    yield GaugeSample("cortex_model_running_requests", load.running, **labels)
    yield GaugeSample("cortex_model_waiting_requests", load.waiting, **labels)
    yield GaugeSample("cortex_model_kv_used_ratio", load.kv_used_fraction, **labels)


class _Gauges(Collector):
    """Calls `read` for the current samples at every scrape."""

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


class Distribution:
    """A histogram as plain numbers: an observation costs a bisection and two additions."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        """Expose it as one series of `family`."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(labels, buckets, self._total)


class Traffic:
    """The requests to one model on one node."""

    __slots__ = ("duration", "first_token", "num_requests", "speed")

    def __init__(self) -> None:
        self.num_requests = 0
        self.duration = Distribution(DURATION_BUCKETS)
        self.first_token = Distribution(FIRST_TOKEN_BUCKETS)
        self.speed = Distribution(SPEED_BUCKETS)


class KeyTokens:
    """The tokens one key has used on one model."""

    __slots__ = ("cached", "completion", "cost", "energy_mj", "prompt")

    def __init__(self) -> None:
        self.cost = 0.0
        """At the prices in force when each request ended."""
        self.prompt = 0
        self.cached = 0
        self.completion = 0
        self.energy_mj = 0

    def add(self, usage: Usage, cost: float = 0.0) -> None:
        self.cost += cost
        self.prompt += usage.prompt_tokens
        self.cached += usage.cached_tokens
        self.completion += usage.completion_tokens
        self.energy_mj += usage.energy_mj


class _RequestMetrics(Collector):
    """The values that every request updates, converted to metrics at a scrape."""

    def __init__(self) -> None:
        self.overhead = Distribution(OVERHEAD_BUCKETS)
        self.traffic: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)
        """By node and model."""
        self.spend: defaultdict[tuple[str, str], KeyTokens] = defaultdict(KeyTokens)

    def describe(self) -> list[Metric]:
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        pair = ("model", "node")
        requests = CounterMetricFamily("cortex_requests", "Requests that reached a node.", labels=pair)
        duration = HistogramMetricFamily(
            "cortex_request_duration_seconds",
            "From the last byte of the request to the last byte of the response.",
            labels=pair,
        )
        first_token = HistogramMetricFamily(
            "cortex_time_to_first_token_seconds",
            "From the request to the first token of a streamed response.",
            labels=pair,
        )
        speed = HistogramMetricFamily(
            "cortex_tokens_per_second", "Completion tokens after the first, per second.", labels=pair
        )
        for (node, model), traffic in self.traffic.items():
            labels = (model, node)
            requests.add_metric(labels, traffic.num_requests)
            traffic.duration.add_to(duration, labels)
            traffic.first_token.add_to(first_token, labels)
            traffic.speed.add_to(speed, labels)
        overhead = HistogramMetricFamily(
            "cortex_overhead_seconds", "Time in the gateway before a request was sent to a node, without waiting."
        )
        self.overhead.add_to(overhead, ())
        yield from (requests, duration, first_token, speed, overhead)
        yield from self._tokens()

    def _tokens(self) -> Iterator[Metric]:
        labels = ("model", "key")
        prompt = CounterMetricFamily("cortex_prompt_tokens", "Prompt tokens.", labels=labels)
        cached = CounterMetricFamily(
            "cortex_cached_prompt_tokens", "Prompt tokens served from a prefix cache.", labels=labels
        )
        completion = CounterMetricFamily("cortex_completion_tokens", "Generated tokens.", labels=labels)
        cost = CounterMetricFamily(
            "cortex_cost", "Cost of tokens by the prices in models.toml, in their currency.", labels=labels
        )
        energy = CounterMetricFamily(
            "cortex_energy_joules", "Energy that requests used on devices whose power nodes can read.", labels=labels
        )
        for account, spend in self.spend.items():
            energy.add_metric(account, spend.energy_mj / 1000)
            cost.add_metric(account, spend.cost)
            prompt.add_metric(account, spend.prompt)
            cached.add_metric(account, spend.cached)
            completion.add_metric(account, spend.completion)
        yield from (prompt, cached, completion, cost, energy)


class Metrics:
    """The metrics of one gateway process, in their own registry."""

    def __init__(self, read_gauges: Callable[[], Iterable[GaugeSample]]) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        pair = ("model", "node")
        self._request_metrics = _RequestMetrics()
        self.overhead = self._request_metrics.overhead
        registry.register(self._request_metrics)
        self.errors = Counter(
            "cortex_request_errors", "Requests that ended in an error.", (*pair, "code"), registry=registry
        )
        self.cold_starts = Counter(
            "cortex_cold_starts", "Loads started, from disk or from sleep.", pair, registry=registry
        )
        self.evictions = Counter(
            "cortex_evictions", "Models unloaded or put to sleep to make room.", pair, registry=registry
        )
        self.load_seconds = Histogram(
            "cortex_load_duration_seconds", "Duration of loads.", pair, buckets=LOAD_BUCKETS, registry=registry
        )
        self.retries = Counter(
            "cortex_retries", "Requests sent again after a node failed before its first byte.", pair, registry=registry
        )
        self.disconnects = Counter(
            "cortex_client_disconnects",
            "Clients that disconnected before their response ended.",
            ("phase",),
            registry=registry,
        )
        self.stripped = Counter(
            "cortex_billing_headers_stripped", "Requests whose billing header block was removed.", registry=registry
        )
        self.stored_responses = Counter(
            "cortex_stored_responses",
            "Responses to store: stored, too_large, without_end (the node sent no last event), or failed.",
            ("result",),
            registry=registry,
        )
        self.config_reloads = Counter(
            "cortex_config_reloads",
            "Reloads of the configuration: applied, or rejected with the old one left in force.",
            ("result",),
            registry=registry,
        )
        self.task_restarts = Counter(
            "cortex_task_restarts",
            "Background tasks that failed and were started again.",
            ("task",),
            registry=registry,
        )
        registry.register(_Gauges(read_gauges))

    def traffic(self, model: str, node: str) -> Traffic:
        """The counters of one model on one node, for the caller to update."""
        return self._request_metrics.traffic[node, model]

    def spend(self, model: str, key: str) -> KeyTokens:
        """The counters of one key on one model, for the caller to update."""
        return self._request_metrics.spend[model, key]

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return prometheus_client.generate_latest(self.registry)
