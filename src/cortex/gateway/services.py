"""What one gateway process has for every request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cortex.gateway.config import GatewaySection
from cortex.gateway.departures import Departures
from cortex.gateway.desk import Desk
from cortex.gateway.http.ticker import Ticker
from cortex.gateway.metrics import Metrics
from cortex.gateway.nodes import NodeClient
from cortex.telemetry import Tracer


@dataclass(slots=True)
class Services:
    """One per gateway process. A reload replaces `config` while requests run."""

    config: GatewaySection
    desk: Desk
    nodes: Mapping[str, NodeClient]
    metrics: Metrics
    tracer: Tracer
    ticker: Ticker
    departures: Departures
    clock: Callable[[], float]
