"""Services that all requests of a gateway share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cortex.fleet.idle_caps import IdleCaps
from cortex.gateway.config import GatewaySection
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.metrics import Metrics
from cortex.gateway.pictures import PictureInlining
from cortex.gateway.proxy.accounting.activity import ActivityLog
from cortex.gateway.proxy.accounting.disconnected_usage import DisconnectedUsage
from cortex.gateway.proxy.accounting.running import RunningRequests
from cortex.gateway.proxy.admission import AdmissionController
from cortex.http.limits import Buffered
from cortex.http.ticker import Ticker
from cortex.parsing.parser import BodyParser
from cortex.telemetry.spans import Tracer


@dataclass(slots=True)
class Services:
    """One per gateway. A reload replaces `config` while requests run."""

    config: GatewaySection
    admission: AdmissionController
    dispatcher: Dispatcher
    nodes: Mapping[str, NodeClient]
    metrics: Metrics
    tracer: Tracer
    ticker: Ticker
    disconnected_usage: DisconnectedUsage
    activity: ActivityLog
    running: RunningRequests
    parser: BodyParser
    pictures: PictureInlining
    buffered: Buffered
    """Request bytes in memory, of clients and background runs."""
    idle_caps: IdleCaps
    """Limits the batch lines per node by how fast interactive requests are served."""
    clock: ClassVar = staticmethod(time.monotonic)
    """Not the loop's clock, which has a resolution of a millisecond and is constant during a turn: too coarse for a
    request."""
