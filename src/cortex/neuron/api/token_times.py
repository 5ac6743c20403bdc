"""A histogram that one thread fills: prometheus_client's locks cost more than the rest of an event's metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

Observe = Callable[[float], None]


class TokenTimes(Collector):
    """Seconds between the outputs of responses, by model. Filled on the loop, where scrapes are made too."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = tuple(bounds)
        self._counts: dict[str, list[int]] = {}
        """By model: the number of values up to each bound and above the one before, then of those above all."""
        self._sums: dict[str, list[float]] = {}
        registry.register(self)

    def of(self, model: str) -> Observe:
        """What counts the times of a model's outputs."""
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
